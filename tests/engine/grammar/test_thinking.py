"""Rows whose thinking has a budget: who has one token to choose, and when somebody has to look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from src import SamplingParams
from src.core.plan import RowFailure
from src.core.step_message import DeviceRequest
from src.core.thinking import Thinking
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.grammar.thinking import RowThinking
from src.text.thinking import ThinkingGuide

ROWS, VOCAB, PROMPT_LEN = 4, 256, 10
TAG = b"</t>"


def guide(budget: int) -> ThinkingGuide:
    """Tokens are bytes."""
    thinking = Thinking(openings=("<t>",), closings=("</t>",), is_open=True, budget=budget)
    return ThinkingGuide(thinking, list(TAG), lambda token_id: bytes([token_id]))


def request(key: int) -> DeviceRequest:
    return DeviceRequest(key=key, prompt_len=PROMPT_LEN, params=SamplingParams(), thinking=key)


class Thoughts:
    """Rows, each told of at once."""

    def __init__(self) -> None:
        self.table = MaskTable(ROWS, VOCAB)
        self.rows = RowThinking(self.table)

    def install(self, row: int, key: int, budget: int, done: bytes = b"") -> None:
        self.rows.hold(key, guide(budget))
        self.rows.vacate(row)
        self.rows.install(row, request(key), list(done))
        self.tell()

    def tell(self) -> None:
        self.rows.apply(self.rows.take_changes())

    def take(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        self.rows.take(rows, np.array(token_ids, np.int64))

    def forced(self, *rows: int) -> dict[int, list[int]]:
        """Row that is forced -> what it may sample."""
        entries, failures = self.rows.force(rows)
        assert not failures
        bits = np.unpackbits(self.table.masks.view(np.uint8), axis=1, bitorder="little")
        return {rows[entry]: np.flatnonzero(bits[rows[entry]]).tolist() for entry in entries}


@pytest.fixture
def thoughts() -> Thoughts:
    return Thoughts()


def test_each_row_writes_the_tag_where_its_budget_is_spent(thoughts: Thoughts) -> None:
    thoughts.install(0, 7, budget=2)
    thoughts.install(2, 9, budget=3)
    written = {0: b"", 2: b""}
    for _ in range(9):
        forced = thoughts.forced(2, 1, 0)
        assert all(len(allowed) == 1 for allowed in forced.values())
        token_ids = [forced.get(row, [ord("a")])[0] for row in (2, 0)]
        thoughts.take([2, 0], token_ids)
        written[2] += bytes(token_ids[:1])
        written[0] += bytes(token_ids[1:])
    assert written == {0: b"aa</t>aaa", 2: b"aaa</t>aa"}


def test_somebody_has_to_look_from_the_end_of_the_budget_to_the_end_of_the_tag(
    thoughts: Thoughts,
) -> None:
    thoughts.install(1, 7, budget=2)
    first = PROMPT_LEN + 2
    for position, token_id in enumerate(b"aa</t>aa", start=PROMPT_LEN):
        is_tag = first <= position < first + len(TAG)
        assert thoughts.rows.may_force([0, 1], [99, position]) == is_tag, position
        # Where it is not looked at it is followed, for it may yet be.
        assert thoughts.rows.follows([0, 1]) == (position < first + len(TAG))
        assert not thoughts.rows.may_force([0, 2], [99, 99])
        assert not thoughts.rows.follows([0, 2])
        thoughts.take([1], [token_id])


def test_a_row_is_its_newest_owner_s(thoughts: Thoughts) -> None:
    thoughts.install(0, 7, budget=0)
    assert thoughts.forced(0) == {0: [ord("<")]}
    thoughts.rows.vacate(0)
    thoughts.tell()
    assert thoughts.forced(0) == {}
    thoughts.install(0, 8, budget=2)
    assert thoughts.forced(0) == {}
    # With what it had written before its row was taken away.
    thoughts.install(3, 9, budget=3, done=b"abc</")
    assert thoughts.forced(0, 3) == {3: [ord("t")]}


def test_a_token_that_could_not_be_sampled_is_no_thinking(thoughts: Thoughts) -> None:
    for row in range(2):
        thoughts.install(row, 7 + row, budget=1)
    thoughts.take([0, 1], [-1, ord("a")])
    assert thoughts.forced(0, 1) == {1: [ord("<")]}


def test_nobody_looks_at_who_has_ended(thoughts: Thoughts) -> None:
    for row in range(2):
        thoughts.install(row, 7 + row, budget=0)
    assert thoughts.rows.num_held == 2
    thoughts.rows.forget(7)
    assert thoughts.rows.num_held == 1
    assert not thoughts.rows.follows([0])
    assert not thoughts.rows.may_force([0], [PROMPT_LEN])
    thoughts.tell()
    assert thoughts.forced(0, 1) == {1: [ord("<")]}
    with pytest.raises(LookupError, match="handle 7"):
        thoughts.rows.install(2, request(7), [])


def test_who_was_lost_fails_alone(thoughts: Thoughts) -> None:
    for row in range(3):
        thoughts.install(row, 7 + row, budget=0 if row else 9)
    thoughts.take([2], [ord("<")])
    thoughts.rows.lose([0, 1, 3])
    forced, failures = thoughts.rows.force([0, 1, 2])
    reason = "the thinking could not be followed"
    assert failures == [RowFailure(key, reason, is_own=False) for key in (7, 8)]
    assert forced == [2]


@pytest.fixture
def rows() -> Iterator[RowGrammars]:
    rows = RowGrammars(ROWS, VOCAB, on_cpu=True)
    yield rows
    rows.close()


def test_no_grammar_is_needed_to_end_thinking(rows: RowGrammars) -> None:
    """What the grammar thread makes of it, in rows that have no grammar."""
    rows.hold_thinking(7, guide(2))
    rows.install(1, request(7), [])
    rows.begin()
    for position, token_id in enumerate(b"aa</t>", start=PROMPT_LEN):
        awaited = rows.masks([0, 1], [PROMPT_LEN, position])
        if position < PROMPT_LEN + 2:
            assert awaited is None
        else:
            assert awaited is not None
            masks = awaited.result()
            assert (masks.rows, masks.forced, masks.failures) == ([-1, 1], [1], [])
            assert masks.added is not None
            assert np.flatnonzero(masks.added[1] == 0).tolist() == [token_id]
            assert not masks.added[0].any()
        rows.follow([0, 1], partial(list, [5, token_id]))
    rows.forget(7)
    rows.begin()
    assert rows.masks([1], [PROMPT_LEN + 9]) is None
    assert rows.num_held == 0
