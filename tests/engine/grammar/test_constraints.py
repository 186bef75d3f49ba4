"""Constraints give the masks that matchers give, and where they cannot go on matchers do."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from src import SamplingParams
from src.core.config import StructuredOutputSection
from src.core.request import Request
from src.core.step_message import DeviceRequest
from src.core.structured_output import StructuredOutput
from src.engine.grammar import compiled as compiled_module
from src.engine.grammar import constraints
from src.engine.grammar.compiled import CompiledGrammar, compile_matcher, with_options
from src.engine.grammar.compiler import Tokenizers, compile_grammar
from src.engine.grammar.constraints import (
    CInterface,
    Constraint,
    ConstraintTokenizer,
    c_interface,
    constraint_tokenizer,
)
from src.engine.grammar.grammar_steps import NO_TOKEN, GrammarStepper, GrammarSteps, Outcome
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.masks import MaskTable
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.grammar.vocabulary import Vocabulary
from src.text import Tokenizer
from tests.support.tokenizers import BUILDERS

GRAMMARS = [
    StructuredOutput.regex("[a-z ]{4,12}: [0-9]{2}"),
    StructuredOutput.choice(["yes", "no", "日本"]),
    StructuredOutput.json(
        {
            "type": "array",
            "items": {"type": "object", "properties": {"é": {"type": "string", "maxLength": 4}}},
        }
    ),
    StructuredOutput.grammar('start: a <|end|>\na: "x" a | "y"'),
]


def vocabulary(name: str = "byte_level") -> Vocabulary:
    tokenizer = Tokenizer(BUILDERS[name](), special_tokens={"eos_token": "</s>"})
    assert tokenizer.eos_token_id is not None
    end_ids = [tokenizer.eos_token_id]
    if (other := tokenizer.token_to_id("<|user|>")) is not None:
        end_ids.append(other)
    return Vocabulary.of(tokenizer, tokenizer.vocab_size + 37, end_ids)


def compiled(tokenizers: Tokenizers, output: StructuredOutput) -> CompiledGrammar:
    candidate = grammar_candidate(output, StructuredOutputSection())
    return compile_grammar(tokenizers, candidate.text)


def moved(stepper: GrammarStepper, matcher: Any, row: int, token_id: int) -> Outcome:
    steps = GrammarSteps([matcher], [row], [0])
    steps.take(np.array([token_id]))
    (made,) = stepper.make([steps])
    assert made.num_steps == 1
    return Outcome(made.outcome)


class Pair:
    """One output by a constraint, in row 0, and by a matcher, in row 1."""

    def __init__(self, given: Vocabulary, grammar: CompiledGrammar) -> None:
        self.given = given
        self.table = MaskTable(2, len(given.tokens))
        self._stepper = GrammarStepper(self.table, len(given.tokens))
        assert self._stepper.can_constrain()
        first = grammar.begin(0)
        assert first is not None, "this wheel of llguidance exports no C interface"
        self.matchers = first, grammar.begin_matcher()
        self.outcomes = self.move(NO_TOKEN)

    def move(self, token_id: int) -> list[Outcome]:
        outcomes = []
        for row, matcher in enumerate(self.matchers):
            outcomes.append(moved(self._stepper, matcher, row, token_id))
        return outcomes

    def allowed(self, row: int = 0) -> list[int]:
        bits = np.unpackbits(self.table.masks[row].view(np.uint8), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits[: len(self.given.tokens)])]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("output", GRAMMARS, ids=lambda output: output.kind)
def test_masks_are_the_same_all_the_way(name: str, output: StructuredOutput) -> None:
    given = vocabulary(name)
    if output.kind == "grammar" and b"<|end|>" not in given.tokens:
        output = StructuredOutput.grammar('start: a\na: "x" a | "y"')
    grammar, source = compiled(Tokenizers.of(given), output), random.Random(name)
    for _ in range(4):
        pair = Pair(given, grammar)
        assert pair.outcomes == [Outcome.ADVANCED] * 2
        for _ in range(60):
            assert pair.allowed(0) == pair.allowed(1) != []
            left = sorted(set(pair.allowed()) - set(given.end_ids))
            if not left:
                break
            outcomes = pair.move(source.choice(left))
            if outcomes[0] is Outcome.COMPLETE:
                assert pair.allowed(1) == given.end_ids
                break
            assert outcomes == [Outcome.ADVANCED] * 2


def test_a_complete_output_may_only_end() -> None:
    given = vocabulary()
    assert len(given.end_ids) == 2
    pair = Pair(given, compiled(Tokenizers.of(given), StructuredOutput.choice(["x"])))
    x = given.tokens.index(b"x")
    assert pair.move(x) == [Outcome.COMPLETE, Outcome.ADVANCED]
    assert pair.allowed(1) == given.end_ids
    # Nobody takes a token behind it.
    assert pair.move(x) == [Outcome.MATCHER_FAILED] * 2


def test_a_token_that_is_not_allowed_fails() -> None:
    given = vocabulary()
    pair = Pair(given, compiled(Tokenizers.of(given), GRAMMARS[1]))
    assert pair.move(given.tokens.index(b"z")) == [Outcome.MATCHER_FAILED] * 2


BRANCHING = "start: /[ab]{0,9}a[ab]{9}c/"


def bounded(tokenizers: Tokenizers, most: int) -> CompiledGrammar:
    """A grammar whose lexer has more states the more texts it has seen."""
    assert tokenizers.constraints is not None
    lark = BRANCHING
    root = tokenizers.constraints.compile(with_options(lark), most)
    lanes = [] if root is None else [root]
    return CompiledGrammar(compile_matcher(tokenizers.matchers, lark), tokenizers.matchers, lanes)


def follows(given: Vocabulary, matcher: Constraint, text: str) -> bool:
    table = MaskTable(1, len(given.tokens))
    stepper = GrammarStepper(table, len(given.tokens))
    assert stepper.can_constrain()
    ids = [given.tokens.index(letter.encode()) for letter in text]
    outcomes = (moved(stepper, matcher, 0, token_id) for token_id in (NO_TOKEN, *ids))
    return all(outcome is Outcome.ADVANCED for outcome in outcomes)


TEXT, OTHER = "abaabbaba", "bbbaaabab"


def least_bound(given: Vocabulary, tokenizers: Tokenizers) -> int:
    """The least number of states with which `TEXT` can be followed, or a few more."""
    for most in range(20, 4000, 5):
        matcher = bounded(tokenizers, most).begin(0)
        if matcher is not None and follows(given, matcher, TEXT):
            return most
    raise AssertionError("it takes more")


def test_what_one_row_has_made_the_next_one_finds() -> None:
    given = vocabulary()
    tokenizers = Tokenizers.of(given)
    grammar = bounded(tokenizers, least_bound(given, tokenizers))
    outcomes = []
    for text in (TEXT, TEXT, TEXT, OTHER):
        matcher = grammar.begin(0)
        assert matcher is not None
        outcomes.append(follows(given, matcher, text))
    # Nothing new is needed, and nothing is left for what is new.
    assert outcomes == [True, True, True, False]


@pytest.fixture
def rows() -> Iterator[RowGrammars]:
    rows = RowGrammars(4, len(vocabulary().tokens), on_cpu=True)
    yield rows
    rows.close()


def install(rows: RowGrammars, row: int, grammar: CompiledGrammar, done: Sequence[int]) -> None:
    request = Request(
        key=100 + row,
        prompt_token_ids=[1],
        params=SamplingParams(),
        max_tokens=99,
        end_token_ids=frozenset(vocabulary().end_ids),
        grammar=grammar,
    )
    rows.hold(request.key, grammar)
    rows.install(row, DeviceRequest.of(request), list(done))
    rows.begin()


def masks(rows: RowGrammars, wanted: Sequence[int]) -> np.ndarray:
    awaited = rows.masks(wanted, [0] * len(wanted), as_bits=True)
    assert awaited is not None
    found = awaited.result()
    assert not found.failures
    copied: np.ndarray = found.table.numpy()[list(wanted)].copy()
    return copied


def test_rows_that_have_used_a_lexer_up_go_on_as_matchers(rows: RowGrammars) -> None:
    given = vocabulary()
    tokenizers = Tokenizers.of(given)
    grammar = bounded(tokenizers, least_bound(given, tokenizers))
    fresh = compile_grammar(tokenizers, BRANCHING)
    for row in (0, 1):
        install(rows, row, grammar, [])
        install(rows, row + 2, fresh, [])
    texts = [[given.tokens.index(c.encode()) for c in text] for text in (TEXT, OTHER)]
    for step in zip(*texts, *texts, strict=True):
        rows.follow([0, 1, 2, 3], lambda step=step: list(step))
        found = masks(rows, [0, 1, 2, 3])
        assert np.array_equal(found[:2], found[2:])
    assert (grammar.is_worn, fresh.is_worn) == (True, False)
    assert grammar.begin(0) is None
    # Who begins now begins with a matcher, and gets on as well; so does who resumes.
    install(rows, 0, grammar, [])
    for token_id in texts[0]:
        rows.follow([0], lambda token_id=token_id: [token_id])
    install(rows, 1, grammar, texts[0])
    found = masks(rows, [0, 1, 2])
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[2])
    assert not grammar.is_spent


def test_a_matchers_lexer_that_is_used_up_is_noticed(
    rows: RowGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = vocabulary()
    tokenizers = Tokenizers.of(given)
    most = least_bound(given, tokenizers)
    monkeypatch.setattr(compiled_module, "MAX_LEXER_STATES", most)
    grammar = bounded(tokenizers, most)
    for row in (0, 1):
        install(rows, row, grammar, [])
    for letters in zip(TEXT, OTHER, strict=True):
        token_ids = [given.tokens.index(letter.encode()) for letter in letters]
        rows.follow([0, 1], lambda token_ids=token_ids: token_ids)
    awaited = rows.masks([0, 1], [0, 0])
    assert awaited is not None
    reasons = [reason for _, reason, is_own in awaited.result().failures if is_own]
    assert reasons
    assert all("states" in reason for reason in reasons)
    assert grammar.is_spent


HEAVY = "start: /(.{0,30}x){0,40}/"


def test_a_long_output_resumes(rows: RowGrammars) -> None:
    """Many tokens, and no mask between them that would give the lexer fuel."""
    given, source = vocabulary(), random.Random(0)
    letters = [given.tokens.index(c.encode()) for c in "abcdefgh"]
    x = given.tokens.index(b"x")
    text = [x if i % 18 == 17 else source.choice(letters) for i in range(600)]
    grammar = compile_grammar(Tokenizers.of(given), HEAVY)
    install(rows, 0, grammar, [])
    for token_id in text:
        rows.follow([0], lambda token_id=token_id: [token_id])
    first = masks(rows, [0])
    install(rows, 1, grammar, text)
    assert np.array_equal(first, masks(rows, [1]))
    judge = grammar.judge()
    for token_id in text:
        judge.advance(given.tokens[token_id].decode())
    assert not judge._has_given_up
    assert not judge._is_beyond


def test_a_dead_end_is_no_end(rows: RowGrammars) -> None:
    """Behind "ab" comes a rule that derives nothing: that is not a complete output."""
    given = vocabulary()
    lark = 'start: A dead | C\nA: /ab/\nC: /x/\ndead: dead "y"'
    grammar = compile_grammar(Tokenizers.of(given), lark)
    for row in (0, 1):
        install(rows, row, grammar, [])
    a, b, x = (given.tokens.index(letter) for letter in (b"a", b"b", b"x"))
    rows.follow([0, 1], lambda: [a, x])
    rows.follow([0], lambda: [b])
    awaited = rows.masks([0, 1], [0, 0])
    assert awaited is not None
    found = awaited.result()
    assert found.failures == [
        (
            100,
            "a dead end of the grammar: "
            "no text conforms to it, or none that the model's tokens can spell",
            False,
        )
    ]
    bits = np.unpackbits(found.table.numpy()[1].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == given.end_ids
    assert (grammar.is_worn, grammar.is_spent) == (False, False)


def test_what_fails_as_a_matcher_too_does_not_wear_it_out(rows: RowGrammars) -> None:
    given = vocabulary()
    grammar = compiled(Tokenizers.of(given), GRAMMARS[1])
    install(rows, 0, grammar, [])
    rows.follow([0], lambda: [given.tokens.index(b"z")])
    awaited = rows.masks([0], [0])
    assert awaited is not None
    ((key, reason, is_own),) = awaited.result().failures
    assert (key, grammar.is_worn, grammar.is_spent) == (100, False, False)
    assert reason
    assert not is_own
    assert grammar.begin(0) is not None


def test_what_cannot_be_compiled_has_no_constraint() -> None:
    made = constraint_tokenizer(vocabulary())
    assert made is not None
    assert made.compile(with_options("start: nowhere"), 100) is None
    # A zero would end the string there.
    assert made.compile(with_options('start: "a\0b"'), 100) is None
    assert made.compile(with_options('start: "a"'), 100) is not None


def test_what_is_let_go_of_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    library = c_interface()
    assert library is not None
    for name in ("free_constraint", "free_tokenizer"):
        free: Any = getattr(library, name)
        monkeypatch.setattr(
            library, name, lambda address, free=free: (freed.append(address), free(address))
        )
    made = ConstraintTokenizer(library, vocabulary())
    address = made._address
    first = made.compile(with_options('start: "ab"'), 100)
    assert first is not None
    second = first.clone()
    addresses = [first.address, second.address]
    freed.clear()
    # It lives as long as what was made of it.
    del made, first
    assert freed == addresses[:1]
    assert follows(vocabulary(), second, "a")
    del second
    assert freed == [*addresses, address]


def test_end_tokens_that_are_not_there_are_an_error() -> None:
    library = c_interface()
    assert library is not None
    with pytest.raises(ValueError, match="EOS"):
        ConstraintTokenizer(library, Vocabulary([b"a", b"b"], [], [7]))


def test_another_minor_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_VERSION", b"llguidance@1.10.")
    with pytest.raises(AttributeError, match=r"got b'llguidance@1\.9\."):
        CInterface(constraints._lib.__file__)


def test_masks_of_another_width_are_refused() -> None:
    table = MaskTable(1, 300)
    table.check_size(300)
    with pytest.raises(ValueError, match="300 tokens, got 301"):
        table.check_size(301)


def test_a_wheel_without_the_interface_has_no_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        CInterface(ctypes.pythonapi._name)
    c_interface.cache_clear()
    monkeypatch.setattr(constraints._lib, "__file__", "/nowhere/_lib.so")
    try:
        assert c_interface() is None
        assert constraint_tokenizer(vocabulary()) is None
    finally:
        c_interface.cache_clear()
