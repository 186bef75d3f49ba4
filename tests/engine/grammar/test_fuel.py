r"""The lexer's fuel: what takes tokens without a mask between them must not run out of it.

A lexer without fuel takes nothing any more, and says that the tokens are at fault. Schemas such as
"at most twenty words" need much of it: `\S+\s+` repeated may begin anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from src import SamplingParams
from src.core.config import StructuredOutputSection
from src.core.request import Request
from src.core.step_message import DeviceRequest
from src.core.structured_output import StructuredOutput
from src.engine.grammar import compiled, follower
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.compiler import Tokenizers, compile_grammar
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.grammar.vocabulary import Vocabulary


def words(most: int, max_length: int) -> dict[str, Any]:
    pattern = rf"^(?:\S+\s+){{0,{most - 1}}}\S+$"
    return {"type": "string", "pattern": pattern, "maxLength": max_length}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "words": closed(x=words(20, 200)),
    "list": closed(tags={"type": "array", "items": words(8, 60), "maxItems": 4}),
    "nested": closed(
        a=closed(b=words(12, 90), c={"type": "string", "pattern": "^(a|b|ab){0,30}$"})
    ),
    "digits": closed(x={"type": "string", "pattern": r"^(?:\w{1,9}[ ,;]{1,3}){2,9}[0-9]{2,60}$"}),
}


@functools.cache
def vocabulary() -> Vocabulary:
    """Bytes and words: masks over many words cost most of the fuel."""
    source = random.Random(0)
    alphabet = string.ascii_letters + string.digits
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(5000):
        word = "".join(source.choices(alphabet, k=source.randint(2, 8)))
        tokens.append((source.choice(["", " "]) + word).encode())
    return Vocabulary([*dict.fromkeys(tokens), b""], [], [len(dict.fromkeys(tokens))])


def end_id() -> int:
    return vocabulary().end_ids[0]


def grammar_of(schema: dict[str, Any]) -> CompiledGrammar:
    """One whose lexers have seen nothing yet."""
    candidate = grammar_candidate(StructuredOutput.json(schema), StructuredOutputSection())
    return compile_grammar(tokenizers(), candidate.text)


@functools.cache
def tokenizers() -> Tokenizers:
    return Tokenizers.of(vocabulary())


@pytest.fixture
def rows() -> Iterator[RowGrammars]:
    rows = RowGrammars(4, len(vocabulary().tokens), on_cpu=True)
    yield rows
    rows.close()


def install(
    rows: RowGrammars, row: int, grammar: CompiledGrammar, done: Sequence[int] = ()
) -> None:
    request = Request(
        key=100 + row,
        prompt_token_ids=[1],
        params=SamplingParams(),
        max_tokens=999,
        end_token_ids=frozenset([end_id()]),
        grammar=grammar,
    )
    rows.hold(request.key, grammar)
    rows.install(row, DeviceRequest.of(request), list(done))
    rows.begin()


def allowed(rows: RowGrammars, row: int) -> list[int]:
    awaited = rows.masks([row], [0], as_bits=True)
    assert awaited is not None
    found = awaited.result()
    assert not found.failures
    bits = np.unpackbits(found.table.numpy()[row].view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def write(rows: RowGrammars, row: int, seed: int) -> list[int]:
    """The tokens of an output, chosen at random up to its end."""
    source, written = random.Random(seed), []
    while True:
        token_id = source.choice(allowed(rows, row))
        rows.follow([row], lambda token_id=token_id: [token_id])
        if token_id == end_id():
            return written
        written.append(token_id)


def walk(schema: dict[str, Any], seed: int) -> list[int]:
    """The same of a matcher that computes a mask before each token."""
    source, written = random.Random(seed), list[int]()
    matcher = grammar_of(schema).begin_matcher()
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_id = int(source.choice(np.flatnonzero(bits)))
        if token_id == end_id():
            return written
        written.append(token_id)
        assert matcher.consume_token(token_id)


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(vocabulary().tokens[token_id] for token_id in token_ids).decode()


def is_complete(text: str) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(text)
        return True
    return False


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_end_and_resume_and_are_judged(name: str, rows: RowGrammars) -> None:
    schema = SCHEMAS[name]
    for seed in range(3):
        install(rows, 0, grammar_of(schema))
        token_ids = write(rows, 0, seed)
        text = text_of(token_ids)
        jsonschema.validate(json.loads(text), schema)
        # Wherever it is taken up again, with lexers that have seen nothing.
        for end in (len(token_ids) // 2, len(token_ids)):
            install(rows, 1, grammar_of(schema), token_ids[:end])
            assert [*token_ids, end_id()][end] in allowed(rows, 1)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_text_is_judged_complete_that_is_not(name: str) -> None:
    """A stop string may cut it there."""
    for seed in range(3):
        text = text_of(walk(SCHEMAS[name], seed))
        judge, shown = grammar_of(SCHEMAS[name]).judge(), ""
        for piece in re.findall(r"(?s).{1,7}", text):
            assert not judge.completes(piece) or is_complete(shown + piece)
            judge.advance(piece)
            shown += piece
        assert judge.completes("")


def test_a_lexer_that_is_lost_costs_nobody_their_output(
    rows: RowGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matchers' lexer runs out of fuel between two masks: any bound may be too low."""
    schema = SCHEMAS["words"]
    install(rows, 0, grammar_of(schema))
    token_ids = write(rows, 0, 0)
    # A mask can be paid with it, and hardly more.
    monkeypatch.setattr(compiled, "MATCHER_LEXER_FUEL", least_fuel(schema, token_ids))
    monkeypatch.setattr(follower, "REFUELED_TOKENS", 999)
    grammar = grammar_of(schema)
    install(rows, 1, grammar, token_ids[:1])
    install(rows, 2, grammar, token_ids)
    assert end_id() in allowed(rows, 2)
    assert grammar.num_renewals > 0
    # Who shares the lexer that was lost goes on with another one.
    for token_id in token_ids[1:]:
        assert token_id in allowed(rows, 1)
        rows.follow([1], lambda token_id=token_id: [token_id])
    assert end_id() in allowed(rows, 1)


def least_fuel(schema: dict[str, Any], token_ids: list[int]) -> int:
    """What suffices for a mask behind each token."""
    fuel = 50_000
    while True:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "MATCHER_LEXER_FUEL", fuel)
            matcher = grammar_of(schema).begin_matcher()
        for token_id in token_ids:
            matcher.consume_token(token_id)
            matcher.compute_bitmask()
        if not matcher.is_error():
            return fuel
        fuel = fuel * 6 // 5
