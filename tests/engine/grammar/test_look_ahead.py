"""How far rows with a grammar are looked ahead in, and how long that may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.grammar import compiled as compiled_module
from src.engine.grammar import follower as follower_module
from src.engine.grammar import look_ahead as look_ahead_module
from src.engine.grammar.compiled import CompiledGrammar, compile_matcher
from src.engine.grammar.compiler import Tokenizers, compile_grammar
from src.engine.grammar.constraints import Constraint
from src.engine.grammar.follower import Follower
from src.engine.grammar.look_ahead import LookAhead, Wanted
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.grammar.spelling import Spelling
from src.engine.grammar.thinking import RowThinking
from src.engine.grammar.vocabulary import Vocabulary

# Nothing is forced before the x.
CHOOSING = 'start: /[ab]*/ "xyz"'
END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"</s>"], [END], [END])
A, B, X = b"abx"


def grammar(text: str) -> CompiledGrammar:
    tokenizer = VOCABULARY.build()
    spelling = Spelling(VOCABULARY, lambda text: list(text.encode()))
    return CompiledGrammar(compile_matcher(tokenizer, text), tokenizer, spelling=spelling)


def following(text: str, output: Sequence[int] = ()) -> Follower:
    made = Follower(1, grammar(text), None, set())
    made.resume(list(output))
    return made


@pytest.mark.parametrize(("length", "drafts"), [(1024, [B, B, B]), (1025, [])])
def test_a_long_output_is_not_looked_ahead_of(length: int, drafts: list[int]) -> None:
    """The time of a copy grows with the output."""
    assert following('start: /a{1020,}/ "bbb" "a"', [A] * length).drafts([B] * 3, 3) == drafts


class Clock:
    """A thread's time, which goes on by itself and by what is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now

    monotonic = thread_time


class Slow:
    """A row's grammar whose look ahead takes a part of a millisecond."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.key, self._clock, self._seconds = 7, clock, seconds

    def drafts(self, guessed: Sequence[int], most: int) -> list[int]:
        self._clock.now += self._seconds
        return [A]


def test_a_grammar_that_was_slow_is_tried_again_by_later_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others share it, and the machine may have been busy."""
    clock, shared = Clock(), grammar('start: "abab"')
    monkeypatch.setattr(compiled_module, "time", clock)
    first, second = (Follower(key, shared, None, set()) for key in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(follower_module, "ORDINARY_CALL", -1.0)
        first.drafts((), 4)
    assert first.never_drafts
    assert second.drafts((), 4) == []
    clock.now += 61
    assert Follower(3, shared, None, set()).drafts((), 4) == list(b"abab")
    assert first.drafts((), 4) == []


def look_ahead(rows: int, followers: Any) -> LookAhead:
    table = MaskTable(rows, len(VOCABULARY.tokens))
    return LookAhead(table, RowThinking(table), followers)


def test_the_device_waits_a_millisecond_and_every_row_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(look_ahead_module, "time", clock)
    made = look_ahead(8, {row: Slow(clock, 0.0004) for row in range(8)})
    wanted = [Wanted(row, (), 3) for row in range(8)]
    served: set[int] = set()
    for _ in range(8):
        drafts = made.choose(wanted, [7] * 8)
        assert sum(map(bool, drafts)) == 3
        served |= {row for row, found in enumerate(drafts) if found}
    assert served == set(range(8))


def test_masks_behind_drafts_are_left_out_once_they_have_taken_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(follower_module, "time", clock)
    made = following('start: "abab" /[abx]*/')
    drafts = made.drafts((), 4)
    assert bytes(drafts) == b"abab"
    mask = np.zeros(9, np.int32)

    def restrict() -> bool:
        clock.now += 0.02
        return True

    found = made.masks_behind(drafts, mask, restrict)
    assert [each is None for each in found] == [False, False, True, True]
    # From then on there are no drafts.
    assert made.drafts((), 4) == []


@pytest.mark.parametrize(("length", "is_spelled"), [(100, True), (100_000, False)])
def test_no_long_text_is_asked_for(length: int, is_spelled: bool) -> None:
    """All of it is found in one call, wherever it stands."""
    tokenizers = Tokenizers.of(VOCABULARY)
    made = compile_grammar(tokenizers, f'start: /[ab]/ "{"x" * length}"')
    assert (made.spelling is not None) == is_spelled


def test_the_device_learns_which_rows_never_have_drafts() -> None:
    rows = RowGrammars(2, len(VOCABULARY.tokens), on_cpu=True)
    try:
        rows.hold(7, grammar('start: /a*/ "bbb"'))
        for row, length in enumerate((1100, 5)):
            request = DeviceRequest(key=row, prompt_len=1, params=SamplingParams(), grammar=7)
            rows.install(row, request, [A] * length)
        rows.begin()
        drafts = rows.draft([Wanted(row, [B] * 3, 3) for row in range(2)])
        assert drafts == [[], [B] * 3]
        assert [rows.never_drafts(row) for row in range(2)] == [True, False]
        rows.install(0, DeviceRequest(key=3, prompt_len=1, params=SamplingParams()), [])
        assert not rows.never_drafts(0)
    finally:
        rows.close()


def test_a_row_keeps_its_constraint_until_it_has_drafts() -> None:
    """A constraint is faster than a matcher, which can be copied."""
    made = Follower(1, compile_grammar(Tokenizers.of(VOCABULARY), CHOOSING), 0, set())
    constraint = made.matcher
    assert isinstance(constraint, Constraint)
    for output in (b"", b"a", b"aba"):
        made.token_ids = list(output)
        assert made.drafts((), 4) == []
        assert made.matcher is constraint
    # What is replayed is what was not looked at before.
    made.token_ids = [*b"ab" * 300]
    assert made.drafts((), 4) == []
    assert made.never_drafts
    made = Follower(1, compile_grammar(Tokenizers.of(VOCABULARY), CHOOSING), 0, set())
    for length in range(0, 601, 200):
        made.token_ids = [*b"ab" * (length // 2)]
        assert made.drafts((), 4) == []
    made.token_ids += [X]
    assert made.drafts((), 4) == list(b"yz")
    assert isinstance(made.matcher, LLMatcher)
    made.take(list(b"yz"))
    assert made.matcher.is_accepting()
