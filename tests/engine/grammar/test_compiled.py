"""What following one grammar may take of everybody's time."""

from __future__ import annotations

import random

import pytest

from src.core.config import StructuredOutputSection
from src.core.structured_output import StructuredOutput
from src.engine.grammar import compiled
from src.engine.grammar.compiled import (
    ORDINARY_CALL,
    REFUELED_TOKENS,
    CompiledGrammar,
    TextJudge,
    TimeBudget,
    compile_matcher,
)
from src.engine.grammar.compiler import Tokenizers
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.vocabulary import Vocabulary
from src.text import Tokenizer
from src.text.output import OutputText
from tests.support.tokenizers import BUILDERS

GREETING = 'start: "[" /[a-z ]+/ "]"'


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(BUILDERS["byte_level"](), special_tokens={"eos_token": "</s>"})


def grammar_of(tokenizer: Tokenizer, lark: str = GREETING) -> CompiledGrammar:
    assert tokenizer.eos_token_id is not None
    given = Vocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    tokenizers = Tokenizers.of(given)
    return CompiledGrammar(compile_matcher(tokenizers.matchers, lark), tokenizers.matchers)


def test_the_budget_is_of_what_is_beyond_the_ordinary() -> None:
    now = 0.0
    budget = TimeBudget(lambda: now)
    assert all(budget.allows(ORDINARY_CALL) for _ in range(10_000))
    assert budget.allows(0.2)
    assert not budget.allows(0.3)
    assert all(budget.allows(0.1) for _ in range(15))
    assert not budget.allows(0.1)
    # What is quick is never refused, and time heals.
    assert budget.allows(ORDINARY_CALL)
    assert budget.allows(32 * ORDINARY_CALL, 32)
    now = 100.0
    assert budget.allows(0.1)


def test_what_a_judge_computes_on_the_way_is_charged() -> None:
    class Matcher:
        masks = 0

        def try_consume_tokens(self, token_ids: list[int]) -> int:
            return len(token_ids)

        def compute_bitmask(self) -> bytes:
            self.masks += 1
            return b""

        def is_error(self) -> bool:
            return False

    class Budget(TimeBudget):
        calls = 0

        def allows(self, seconds: float, num_calls: float = 1) -> bool:
            self.calls += 1
            # As if the mask were what is too much.
            return num_calls < 1

    matcher, budget = Matcher(), Budget()
    judge = TextJudge(matcher, lambda text: [1] * len(text), budget)  # type: ignore[arg-type]
    for _ in range(REFUELED_TOKENS):
        assert matcher.masks == 0
        judge.advance("a")
    assert matcher.masks == 1
    assert not judge.completes("")
    # Nothing more is asked of it.
    judge.advance("a" * REFUELED_TOKENS)
    assert (matcher.masks, budget.calls) == (1, REFUELED_TOKENS + 1)


def test_what_is_refused_behind_a_mask_is_not_tried_again() -> None:
    """Only a lexer that may be without fuel is asked twice."""

    class Matcher:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def try_consume_tokens(self, token_ids: list[int]) -> int:
            self.calls.append(f"consume {token_ids}")
            assert len(self.calls) < 9
            return token_ids.index(9) if 9 in token_ids else len(token_ids)

        def compute_bitmask(self) -> bytes:
            self.calls.append("mask")
            return b""

        def is_error(self) -> bool:
            return False

    matcher = Matcher()
    judge = TextJudge(matcher, lambda text: list(map(int, text)), TimeBudget())  # type: ignore[arg-type]
    judge.advance("1293")
    assert matcher.calls == ["consume [1, 2, 9, 3]", "mask", "consume [9, 3]"]
    # What the grammar does not know.
    assert judge.completes("")


def test_a_slow_neighbour_does_not_have_a_text_cut_within_its_form(tokenizer: Tokenizer) -> None:
    """Text that is held back costs a judge nothing, so it cannot be over what others have spent."""
    grammar = grammar_of(tokenizer)
    text = OutputText(tokenizer, [5], stop=["ed end", "o"], judge=grammar.judge())
    while grammar.budget.allows(0.2):
        pass
    shown = []
    for token_id in tokenizer.encode("[bed edge hello]", add_special_tokens=False):
        # Nothing is forgiven meanwhile.
        grammar.budget.allows(0.2)
        delta = text.push([token_id])
        assert delta.stop is None
        shown.append(delta.text)
    assert "".join([*shown, text.finish()]).strip() == "[bed edge hello]"


def test_nothing_is_complete_for_a_judge_without_budget(tokenizer: Tokenizer) -> None:
    class Spent(TimeBudget):
        def allows(self, seconds: float, num_calls: float = 1) -> bool:
            assert num_calls > 0
            return False

    grammar = grammar_of(tokenizer)
    grammar.budget = Spent()
    judge = grammar.judge()
    judge.advance("")
    assert not judge.completes("")
    judge.advance("[a]")
    assert not judge.completes("")
    judge.advance("!")
    assert not judge.completes("")


def test_text_that_the_grammar_does_not_know_ends_anywhere(tokenizer: Tokenizer) -> None:
    judge = grammar_of(tokenizer).judge()
    judge.advance("[a")
    assert not judge.completes("")
    assert judge.completes("]")
    judge.advance("!")
    assert judge.completes("")


def test_white_space_of_json_has_a_bound(tokenizer: Tokenizer) -> None:
    """A model that writes white space writes it for ever, if it may."""
    candidate = grammar_candidate(StructuredOutput.json_object(), StructuredOutputSection())
    judge = grammar_of(tokenizer, candidate.text).judge()
    judge.advance("{")
    assert judge.completes(" " * 64 + "}")
    assert not judge.completes(" " * 65 + "}")


def test_text_that_is_held_back_is_judged_once(tokenizer: Tokenizer) -> None:
    """However many stop strings end at each of its characters."""
    grammar = grammar_of(tokenizer, "start: / *zq/")
    judge = grammar.judge()
    taken = 0

    def counted(self: TextJudge, token_ids: list[int]) -> int:
        nonlocal taken
        taken += len(token_ids)
        return consume(self, token_ids)

    stops = [" " * 400 + "x", *(" " * length for length in range(1, 16))]
    text = OutputText(tokenizer, [5], stop=stops, judge=judge)
    with pytest.MonkeyPatch.context() as patch:
        consume = TextJudge._consume
        patch.setattr(TextJudge, "_consume", counted)
        (space,) = tokenizer.encode(" ", add_special_tokens=False)
        shown = [text.push([space]) for _ in range(600)]
    assert taken <= 600
    assert not judge._has_given_up
    assert all(delta.stop is None for delta in shown)
    assert "".join([*(delta.text for delta in shown), text.finish()]) == " " * 600


@pytest.mark.parametrize("lark", ["start: /[ab]*c?a/", "start: /(ab|ba)*/", 'start: "ab" "ba"*'])
def test_a_judge_that_looked_ahead_says_what_a_new_one_would(
    tokenizer: Tokenizer, lark: str
) -> None:
    """Whatever is asked of it, in whatever order, also about texts that are never let out."""
    source = random.Random(lark)
    grammar = grammar_of(tokenizer, lark)
    for _ in range(60):
        judge, said = grammar.judge(), ""
        for _ in range(12):
            text = "".join(source.choices("abc", weights=(4, 4, 1), k=source.randint(0, 5)))
            if source.random() < 0.2:
                judge.advance(text)
                said += text
                continue
            for end in source.sample(range(len(text) + 1), len(text) + 1):
                fresh = grammar.judge()
                fresh.advance(said)
                assert judge.completes(text[:end]) == fresh.completes(text[:end]), (said, text, end)


def test_a_character_that_is_refused_within_it_leaves_no_trace(tokenizer: Tokenizer) -> None:
    """It has two tokens, of which the grammar knows the first."""
    grammar = grammar_of(tokenizer, "start: /(éx)*/")
    assert len(grammar._tokenizer.greedy_tokenize("è")) == 2
    judge = grammar.judge()
    assert not judge.completes("è")
    assert judge.completes("éx")
    assert not judge.completes("éxè")
    assert judge.completes("éxéx")


def test_a_judgement_that_takes_long_is_the_last(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waits for it: budgets of the threads that follow grammars are not for it."""
    judge = grammar_of(tokenizer).judge()
    judge.advance("[a")
    assert judge.completes("]")
    clock = iter(range(100))
    monkeypatch.setattr(compiled.time, "thread_time", lambda: next(clock) * 0.03)
    judge.advance("a")
    monkeypatch.undo()
    assert not judge.completes("]")
    assert judge._has_given_up


def test_nothing_is_complete_for_a_judge_whose_matcher_fails(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over its limits it knows no more, which is not that the grammar does not know the text."""
    monkeypatch.setattr(compiled, "MAX_LEXER_STATES", 100)
    judge = grammar_of(tokenizer, "start: /(.{0,30}x){0,40}y/").judge()
    source = random.Random(0)
    for _ in range(20):
        judge.advance("".join(source.choices("abcdefg", k=source.randint(1, 20))) + "x")
    assert judge._matcher.is_error()
    assert not judge.completes("")
