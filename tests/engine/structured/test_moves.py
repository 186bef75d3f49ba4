"""Many moves in one call: as they would be one by one, up to what somebody has to look at."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src import SamplingParams
from src.core.request import Request
from src.engine.structured import moves as moves_module
from src.engine.structured.compiled import ORDINARY_CALL
from src.engine.structured.compiler import Tokenizers, compile_grammar
from src.engine.structured.masks import MaskTable
from src.engine.structured.moves import NO_TOKEN, Move, Mover, Outcome
from src.engine.structured.vocabulary import Vocabulary
from src.ops.cpu.build import ensure_built
from src.ops.cpu.kernel_library import KernelLibrary

LETTERS = [bytes([letter]) for letter in range(ord("a"), ord("z") + 1)]
TOKENS = [*LETTERS, *(bytes([i]) for i in range(256) if bytes([i]) not in LETTERS), b"</s>"]
END = len(TOKENS) - 1
ROWS = 8


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    built = ensure_built(wait=True)
    assert built is not None, "no kernel library"
    from src.ops.cpu.build import kernel_library

    found = kernel_library()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    made = Tokenizers.of(Vocabulary(TOKENS, [END], [END]))
    assert made.sharing is not None
    return made


def table(allowed: dict[int, tuple[int, ...]] | None = None) -> MaskTable:
    made = MaskTable(ROWS, len(TOKENS))
    for row in range(ROWS):
        params = SamplingParams(ignore_eos=row % 2 == 1, allowed_token_ids=(allowed or {}).get(row))
        made.install(
            row,
            Request(
                key=row, prompt_token_ids=[0], params=params, max_tokens=1,
                end_token_ids=frozenset([END]),
            ),
        )  # fmt: skip
    return made


CASES = st.lists(
    st.tuples(
        st.sampled_from(["a+", "[ab]{2,9}", "b*", "c"]),
        st.lists(st.sampled_from([0, 1, 2, 25]), max_size=3),
        st.none() | st.sets(st.integers(0, 3), min_size=1),
    ),
    min_size=1,
    max_size=ROWS,
)


def walk(
    mover: Mover, moves: list[Move], end_ids: list[int], table: MaskTable
) -> list[tuple[int, Outcome]]:
    """Make all moves; returns what became of each row."""
    outcomes = []
    while moves:
        ((part, made),) = mover.move(moves)
        assert part == moves
        assert 0 <= made.seconds < 1
        outcomes += [(move.row, Outcome.MOVED) for move in part[: made.num_moves - 1]]
        last, outcome = part[made.num_moves - 1], Outcome(made.outcome)
        if outcome is Outcome.COMPLETE:
            table.complete(last.row, end_ids)
            is_possible = table.restrict([last.row]) is None
            outcome = Outcome.MOVED if is_possible else Outcome.NOTHING_POSSIBLE
        outcomes.append((last.row, outcome))
        # What is behind it has not been made.
        moves = moves[made.num_moves :]
    return outcomes


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_moves_with_a_shared_lexer_are_those_without(
    library: KernelLibrary,
    tokenizers: Tokenizers,
    cases: list[tuple[str, list[int], set[int] | None]],
) -> None:
    allowed = {row: tuple(ids) for row, (_, _, ids) in enumerate(cases) if ids is not None}
    found = []
    for shares in (True, False):
        masks = table(allowed)
        mover = Mover(masks, len(TOKENS))
        assert mover.can_share()
        matchers: list[Any] = []
        for pattern, _, _ in cases:
            grammar = compile_grammar(tokenizers, f"start: /{pattern}/")
            matchers.append(grammar.begin(0) if shares else grammar.begin_alone())
        seen, dead = [], set[int]()
        for step in range(4):
            moves = []
            for row, (_, token_ids, _) in enumerate(cases):
                token_id = NO_TOKEN if step == 0 else (*token_ids, *[END] * 3)[step - 1]
                if row not in dead and token_id != END:
                    moves.append(Move(matchers[row], row, token_id))
            outcomes = walk(mover, moves, [END], masks)
            dead |= {row for row, outcome in outcomes if outcome is not Outcome.MOVED}
            live = [row for row, _ in outcomes if row not in dead]
            seen.append((outcomes, masks.masks[live].tolist()))
        found.append(seen)
    assert found[0] == found[1]


class CommitResult(ctypes.Structure):
    _fields_ = (("tokens", ctypes.c_void_p), ("n", ctypes.c_uint32), ("stop", ctypes.c_bool))


class MaskResult(ctypes.Structure):
    _fields_ = (("mask", ctypes.c_void_p), ("heat", ctypes.c_float), ("stop", ctypes.c_bool))


COMMIT = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(CommitResult)
)
COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(MaskResult))
WAITS, WORKS, FAILS, HAS_STOPPED, MASK_FAILS, HAS_NO_MASK, EMPTY, STOPS = range(100, 108)


def work(seconds: float) -> None:
    started = time.thread_time()
    while time.thread_time() - started < seconds:
        pass


class Fakes:
    """Functions that do what a token says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.last: dict[int, int] = {}
        self.mask = (ctypes.c_uint32 * 1)()
        self.held: tuple[Any, Any] = COMMIT(self.commit), COMPUTE(self.compute)

    @property
    def addresses(self) -> tuple[int, int]:
        commit, compute = (ctypes.cast(each, ctypes.c_void_p).value for each in self.held)
        assert commit is not None
        assert compute is not None
        return commit, compute

    def commit(self, matcher: int, token_id: int, result: Any) -> int:
        self.calls.append(("commit", matcher))
        self.last[matcher] = token_id
        if token_id == WAITS:
            time.sleep(3 * ORDINARY_CALL)
        if token_id == WORKS:
            work(2 * ORDINARY_CALL)
        result.contents.stop = token_id == HAS_STOPPED
        return -1 if token_id == FAILS else 0

    def compute(self, matcher: int, result: Any) -> int:
        self.calls.append(("compute", matcher))
        last = self.last.get(matcher)
        self.mask[0] = 0 if last == EMPTY else 1
        result.contents.stop = last == STOPS
        result.contents.mask = None if last in (STOPS, HAS_NO_MASK) else ctypes.addressof(self.mask)
        return -1 if last == MASK_FAILS else 0


@pytest.mark.parametrize(
    ("token_id", "outcome"),
    [
        (WORKS, Outcome.MOVED),
        (FAILS, Outcome.MATCHER_FAILED),
        (HAS_STOPPED, Outcome.MATCHER_FAILED),
        (MASK_FAILS, Outcome.MATCHER_FAILED),
        (HAS_NO_MASK, Outcome.MATCHER_FAILED),
        (EMPTY, Outcome.NOTHING_POSSIBLE),
        (STOPS, Outcome.COMPLETE),
    ],
)
def test_moves_stop_where_somebody_has_to_look(
    library: KernelLibrary, token_id: int, outcome: Outcome
) -> None:
    fakes = Fakes()
    move = library.bind_moves(fakes.addresses, MaskTable(4, 32).arrays, ORDINARY_CALL)
    numbers = [1001, 0, 5, 1002, 1, WAITS, 1003, 2, token_id, 1004, 3, 5]
    made, what, seconds = move(array("q", numbers))
    assert (made, what) == (3, outcome)
    # Of the last alone, and waiting is no work.
    assert (seconds > 2 * ORDINARY_CALL) == (token_id == WORKS)
    expected = [(kind, at) for at in (1001, 1002, 1003) for kind in ("commit", "compute")]
    assert fakes.calls == (expected[:-1] if token_id in (FAILS, HAS_STOPPED) else expected)
    fakes.calls.clear()
    assert move(array("q", [1004, 3, NO_TOKEN]))[:2] == (1, Outcome.MOVED)
    assert fakes.calls == [("compute", 1004)]


def test_rows_that_are_not_there_are_refused_before_anything_moves(library: KernelLibrary) -> None:
    fakes = Fakes()
    move = library.bind_moves(fakes.addresses, MaskTable(4, 32).arrays, ORDINARY_CALL)
    for row in (-1, 4):
        with pytest.raises(ValueError, match="rows below 4"):
            move(array("q", [1001, 0, 5, 1002, row, 5]))
    assert not fakes.calls
    assert move(array("q"))[0] == 0


def test_others_run_while_matchers_move(library: KernelLibrary) -> None:
    """The interpreter lock is free: a matcher that waits for another thread's Python gets it."""
    asked, answered = threading.Event(), threading.Event()
    fakes = Fakes()

    def commit(matcher: int, token_id: int, result: Any) -> int:
        asked.set()
        return 0 if answered.wait(10) else -1

    def answer() -> None:
        asked.wait(10)
        answered.set()

    fakes.held = COMMIT(commit), fakes.held[1]
    move = library.bind_moves(fakes.addresses, MaskTable(4, 32).arrays, ORDINARY_CALL)
    thread = threading.Thread(target=answer)
    thread.start()
    assert move(array("q", [1001, 0, 5]))[:2] == (1, Outcome.MOVED)
    thread.join()


@pytest.fixture
def mover(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mover]:
    """Four lanes, and every move is worth a thread."""
    monkeypatch.setattr(moves_module, "num_lanes", lambda: 4)
    monkeypatch.setattr(moves_module, "_WORTH_A_THREAD", 1e-3)
    mover = Mover(table(), len(TOKENS))
    assert mover.can_share()
    yield mover
    mover.close()


@pytest.mark.parametrize("sizes", [[1], [1] * 2, [1] * 3, [2, 1, 1, 1], [2] * 4])
def test_lanes_side_by_side_are_all_of_it(
    mover: Mover, tokenizers: Tokenizers, sizes: list[int]
) -> None:
    count = sum(sizes)
    grammar = compile_grammar(tokenizers, "start: /[a-c]+/")
    moves = []
    for row in range(count):
        matcher = grammar.begin(mover.lane(row)) if row % 3 else grammar.begin_alone()
        assert matcher is not None
        moves.append(Move(matcher, row, NO_TOKEN))
    for token_id in (NO_TOKEN, 0):
        parts = mover.move([move._replace(token_id=token_id) for move in moves])
        rows = [move.row for part, _ in parts for move in part]
        assert sorted(rows) == list(range(count))
        for part, made in parts:
            assert len({move.row % 4 for move in part}) == 1
            assert len({type(move.matcher) for move in part}) == 1
            assert (made.num_moves, made.outcome) == (len(part), Outcome.MOVED)
    # Ends are left out where the request goes on.
    packed = mover._table._packed
    for row in range(count):
        expected = packed([0, 1, 2, END] if row % 2 == 0 else [0, 1, 2])
        assert np.array_equal(mover._table.masks[row], expected)


def test_a_part_that_stops_leaves_the_others(mover: Mover, tokenizers: Tokenizers) -> None:
    grammar = compile_grammar(tokenizers, "start: /a+/")
    begun = [grammar.begin_alone() for _ in range(8)]
    parts = mover.move([Move(matcher, row, int(row == 2)) for row, matcher in enumerate(begun)])
    assert [[move.row for move in part] for part, _ in parts] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [made.num_moves for _, made in parts] == [2, 2, 1, 2]
    assert parts[2][1].outcome == Outcome.MATCHER_FAILED
    assert [matcher.is_error() for matcher in begun] == [row == 2 for row in range(8)]
    # The one behind it has not moved.
    assert not mover._table.masks[6].any()
    assert mover._table.masks[7].any()
