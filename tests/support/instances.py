"""Checks whether grammars accept instances of JSON schemas, in any order of properties."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from src.core.config import StructuredOutputSection
from src.core.structured_output import StructuredOutput
from src.engine.grammar.compiled import compile_matcher
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.trial import prepared
from src.engine.grammar.vocabulary import Vocabulary


@functools.cache
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose tokens are single bytes."""
    return Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [], [256]).build()


def matcher_of(schema: dict[str, Any] | bool) -> LLMatcher:
    """A matcher at the beginning of JSON under the schema, as a request gets it."""
    output = StructuredOutput.json(schema, any_whitespace=False)
    candidate = grammar_candidate(output, StructuredOutputSection())
    return compile_matcher(byte_tokenizer(), prepared(candidate).text)


def accepts(matcher: LLMatcher, instance: Any) -> bool:
    """Whether the matcher accepts the instance, in any order of its properties."""
    return any(_takes(matcher, text) for text in spellings(instance))


def _takes(matcher: LLMatcher, text: str) -> bool:
    copied = matcher.deep_copy()
    token_ids = list(text.encode())
    taken = 0
    for start in range(0, len(token_ids), 32):
        taken += copied.try_consume_tokens(token_ids[start : start + 32])
        copied.compute_bitmask()
    return taken == len(token_ids) and copied.is_accepting()


def spellings(instance: Any) -> Iterator[str]:
    """The instance's JSON texts, one for each order of properties."""
    if isinstance(instance, dict):
        for names in itertools.permutations(instance):
            values = [list(spellings(instance[name])) for name in names]
            for chosen in itertools.product(*values):
                pairs = zip(map(_dumped, names), chosen, strict=True)
                yield "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"
    elif isinstance(instance, list):
        for chosen in itertools.product(*(list(spellings(item)) for item in instance)):
            yield "[" + ", ".join(chosen) + "]"
    else:
        yield _dumped(instance)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_valid(schema: Any, instance: Any) -> bool:
    """The verdict of jsonschema, with the draft that the schema names."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    valid: bool = kind(schema).is_valid(instance)
    return valid
