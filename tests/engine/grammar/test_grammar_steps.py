"""Many steps in one call: as they would be one by one, up to what somebody has to look at."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.grammar import grammar_steps
from src.engine.grammar.compiled import ORDINARY_CALL
from src.engine.grammar.compiler import Tokenizers, compile_grammar
from src.engine.grammar.grammar_steps import NO_TOKEN, GrammarStepper, GrammarSteps, Outcome
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.vocabulary import Vocabulary
from src.ops.runtime.kernel_library import KernelLibrary

LETTERS = [bytes([letter]) for letter in range(ord("a"), ord("z") + 1)]
TOKENS = [*LETTERS, *(bytes([i]) for i in range(256) if bytes([i]) not in LETTERS), b"</s>"]
END = len(TOKENS) - 1
ROWS = 8


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    made = Tokenizers.of(Vocabulary(TOKENS, [END], [END]))
    assert made.constraints is not None
    return made


def table(allowed: dict[int, tuple[int, ...]] | None = None) -> MaskTable:
    made = MaskTable(ROWS, len(TOKENS))
    for row in range(ROWS):
        params = SamplingParams(ignore_eos=row % 2 == 1, allowed_token_ids=(allowed or {}).get(row))
        made.install(
            row,
            DeviceRequest(key=row, prompt_len=1, params=params, end_token_ids=frozenset([END])),
        )
    return made


CASES = st.lists(
    st.tuples(
        st.sampled_from(["a+", "[ab]{2,9}", "b*", "c"]),
        st.lists(st.sampled_from([0, 1, 2, 25, END]), min_size=3, max_size=3),
        st.none() | st.sets(st.integers(0, 3), min_size=1),
    ),
    min_size=1,
    max_size=ROWS,
)


def steps_of(
    matchers: Sequence[Any], rows: Sequence[int], token_ids: Sequence[int]
) -> GrammarSteps:
    steps = GrammarSteps(matchers, rows, range(len(rows)))
    steps.take(np.array(token_ids, np.int64))
    return steps


def walk(
    stepper: GrammarStepper, steps: GrammarSteps, table: MaskTable
) -> list[tuple[int, Outcome]]:
    """Advance all; returns what became of each row."""
    outcomes = []
    while len(steps):
        (made,) = stepper.make([steps])
        assert 0 <= made.seconds < 1
        last = made.num_steps - 1
        outcomes += [(row, Outcome.ADVANCED) for row in steps.rows[:last]]
        row, outcome = steps.rows[last], Outcome(made.outcome)
        if outcome is Outcome.COMPLETE:
            table.masks[row] = table._packed([END])
            is_possible = table.restrict([row]) is None
            outcome = Outcome.ADVANCED if is_possible else Outcome.NOTHING_POSSIBLE
        outcomes.append((row, outcome))
        # What is behind it has not been made.
        steps = steps.only(range(made.num_steps, len(steps)))
    return outcomes


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_steps_of_constraints_are_those_of_matchers(
    library: KernelLibrary,
    tokenizers: Tokenizers,
    cases: list[tuple[str, list[int], set[int] | None]],
) -> None:
    allowed = {row: tuple(ids) for row, (_, _, ids) in enumerate(cases) if ids is not None}
    found = []
    for shares in (True, False):
        masks = table(allowed)
        stepper = GrammarStepper(masks, len(TOKENS))
        assert stepper.can_constrain()
        matchers: list[Any] = []
        for pattern, _, _ in cases:
            grammar = compile_grammar(tokenizers, f"start: /{pattern}/")
            matchers.append(grammar.begin(0) if shares else grammar.begin_matcher())
        seen, live = [], list(range(len(cases)))
        for step in range(5):
            token_ids = [NO_TOKEN if step == 0 else (*cases[row][1], END)[step - 1] for row in live]
            steps = steps_of([matchers[row] for row in live], live, token_ids)
            outcomes = walk(stepper, steps, masks)
            live = [row for row, outcome in outcomes if outcome is Outcome.ADVANCED]
            seen.append((outcomes, masks.masks[live].tolist()))
        assert not live
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
        self.mask = (ctypes.c_uint32 * 4)()
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
        (WORKS, Outcome.ADVANCED),
        (FAILS, Outcome.MATCHER_FAILED),
        (HAS_STOPPED, Outcome.MATCHER_FAILED),
        (MASK_FAILS, Outcome.MATCHER_FAILED),
        (HAS_NO_MASK, Outcome.MATCHER_FAILED),
        (EMPTY, Outcome.NOTHING_POSSIBLE),
        (STOPS, Outcome.COMPLETE),
    ],
)
def test_steps_stop_where_somebody_has_to_look(
    library: KernelLibrary, token_id: int, outcome: Outcome
) -> None:
    fakes = Fakes()
    advance = library.bind_grammar_steps(fakes.addresses, MaskTable(4, 128).arrays, ORDINARY_CALL)
    numbers = [[1001, 0, 5], [1002, 1, WAITS], [1003, 2, token_id], [1004, 3, 5]]
    made, what, seconds = advance(np.array(numbers))
    assert (made, what) == (3, outcome)
    # Of the last alone, and waiting is no work.
    assert (seconds > 2 * ORDINARY_CALL) == (token_id == WORKS)
    expected = [(kind, at) for at in (1001, 1002, 1003) for kind in ("commit", "compute")]
    assert fakes.calls == (expected[:-1] if token_id in (FAILS, HAS_STOPPED) else expected)
    fakes.calls.clear()
    assert advance(np.array([[1004, 3, NO_TOKEN]]))[:2] == (1, Outcome.ADVANCED)
    assert fakes.calls == [("compute", 1004)]


def test_an_end_token_advances_nothing(library: KernelLibrary) -> None:
    fakes, masks = Fakes(), MaskTable(4, 128)
    masks._ends[2] = masks._packed([7, 100])
    advance = library.bind_grammar_steps(fakes.addresses, masks.arrays, ORDINARY_CALL)
    for token_id in (7, 100):
        numbers = np.array([[1001, 1, token_id - 1], [1002, 2, token_id], [1003, 3, 5]])
        assert advance(numbers)[:2] == (2, Outcome.ENDED)
        assert masks.ends(2, token_id)
        assert not masks.ends(2, token_id - 1)
        assert not masks.ends(1, token_id)
    assert {at for _, at in fakes.calls} == {1001}


@pytest.mark.parametrize("wrong", [[1002, -1, 5], [1002, 4, 5], [1002, 0, 128]])
def test_what_is_not_there_is_refused_before_anything_moves(
    library: KernelLibrary, wrong: list[int]
) -> None:
    fakes = Fakes()
    advance = library.bind_grammar_steps(fakes.addresses, MaskTable(4, 128).arrays, ORDINARY_CALL)
    with pytest.raises(ValueError, match=r"rows and tokens of masks \(4, 4\)"):
        advance(np.array([[1001, 0, 5], wrong]))
    assert not fakes.calls
    assert advance(np.zeros((0, 3), np.int64))[0] == 0
    with pytest.raises(ValueError, match="int64"):
        advance(np.zeros((1, 3), np.int32))
    with pytest.raises(ValueError, match="int64"):
        advance(np.zeros((3, 6), np.int64)[:, ::2])


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
    advance = library.bind_grammar_steps(fakes.addresses, MaskTable(4, 128).arrays, ORDINARY_CALL)
    thread = threading.Thread(target=answer)
    thread.start()
    assert advance(np.array([[1001, 0, 5]]))[:2] == (1, Outcome.ADVANCED)
    thread.join()


@pytest.fixture
def stepper(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarStepper]:
    """Four lanes, and every move is worth a thread."""
    monkeypatch.setattr(grammar_steps, "num_lanes", lambda: 4)
    monkeypatch.setattr(grammar_steps, "_WORTH_A_THREAD", 1e-3)
    stepper = GrammarStepper(table(), len(TOKENS))
    assert stepper.can_constrain()
    yield stepper
    stepper.close()


@pytest.mark.parametrize("sizes", [[1], [1] * 2, [1] * 3, [2, 1, 1, 1], [2] * 4])
def test_lanes_side_by_side_are_all_of_it(
    stepper: GrammarStepper, tokenizers: Tokenizers, sizes: list[int]
) -> None:
    count = sum(sizes)
    grammar = compile_grammar(tokenizers, "start: /[a-c]+/")
    matchers: list[Any] = [
        grammar.begin(stepper.lane(row)) if row % 3 else grammar.begin_matcher()
        for row in range(count)
    ]
    # Their tokens come the other way round.
    entries = list(reversed(range(count)))
    parts = stepper.prepare(matchers, list(range(count)), entries)
    assert sorted(row for part in parts for row in part.rows) == list(range(count))
    for token_ids in (np.full(count, NO_TOKEN), np.arange(count) % 3):
        for part in parts:
            part.take(token_ids)
            assert len({row % 4 for row in part.rows}) == 1
            assert len({type(matcher) for matcher in part.matchers}) == 1
            assert part.numbers[:, 1].tolist() == part.rows
            expected = [token_ids[count - 1 - row] for row in part.rows]
            assert part.numbers[:, 2].tolist() == expected
        for part, made in zip(parts, stepper.make(parts), strict=True):
            assert (made.num_steps, made.outcome) == (len(part), Outcome.ADVANCED)
    # Ends are left out where the request goes on.
    packed = stepper._table._packed
    for row in range(count):
        allowed = packed([0, 1, 2, END] if row % 2 == 0 else [0, 1, 2])
        assert np.array_equal(stepper._table.masks[row], allowed)


def test_a_part_that_stops_leaves_the_others(
    stepper: GrammarStepper, tokenizers: Tokenizers
) -> None:
    grammar = compile_grammar(tokenizers, "start: /a+/")
    begun = [grammar.begin_matcher() for _ in range(8)]
    parts = stepper.prepare(begun, range(8), range(8))
    assert [list(part.rows) for part in parts] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for part in parts:
        part.take(np.arange(8) == 2)
    made = stepper.make(parts)
    assert [each.num_steps for each in made] == [2, 2, 1, 2]
    assert made[2].outcome == Outcome.MATCHER_FAILED
    assert [matcher.is_error() for matcher in begun] == [row == 2 for row in range(8)]
    # The one behind it has not moved.
    assert not stepper._table.masks[6].any()
    assert stepper._table.masks[7].any()
    left = parts[2].only([1])
    assert left.numbers.tolist() == [[0, 6, 0]]
    assert stepper.make([left])[0].outcome == Outcome.ADVANCED
    assert stepper._table.masks[6].any()
