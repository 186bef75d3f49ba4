"""Translates a `StructuredOutput` to llguidance's Lark, after checking its size and its depth.

The grammar itself is not parsed here; the compiler does that.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llguidance import regex_to_lark

from src.core.config import StructuredOutputSection
from src.core.errors import InvalidRequestError
from src.core.structured_output import PARAM, StructuredOutput
from src.engine.grammar.compiled import Candidate

# Also matches an unclosed string. Otherwise the search would start again at each quote, which takes
# minutes.
_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[\]{}]")
_ANY_OBJECT: Final = '{"type": "object"}'
# Bounded, so that a model cannot write white space forever.
_WHITE_SPACE: Final = r"[ \t\r\n]{1,64}"
_SEPARATORS: Final = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}


def refusal(message: str) -> InvalidRequestError:
    """The error of a request whose grammar is at fault."""
    return InvalidRequestError(f"{PARAM}: {message}", param=PARAM, code="invalid_grammar")


def grammar_candidate(output: StructuredOutput, bounds: StructuredOutputSection) -> Candidate:
    """The text for the compiler to try.

    Raises
    ------
    InvalidRequestError
        The constraint is too long, nested too deeply, empty, or not valid Unicode.
    """
    pieces = (output.value,) if isinstance(output.value, str) else output.value
    _check_text((*pieces, output.whitespace_pattern or ""), bounds)
    match output.kind:
        case "json_object":
            return Candidate(_json(_ANY_OBJECT, output))
        case "json_schema":
            _check_depth(_one(output), bounds.max_depth)
            return Candidate(_json(_one(output), output))
        case "regex":
            _check_filled(pieces)
            return Candidate(_regex(_one(output)))
        case "choice":
            return Candidate(_choice(pieces, bounds.max_choices))
        case "grammar":
            _check_filled(pieces)
            text = _one(output)
            # GBNF is the format of llama.cpp and xgrammar.
            return Candidate(text, is_gbnf="::=" in text)


def _one(output: StructuredOutput) -> str:
    if not isinstance(output.value, str):
        raise refusal(f"the value of a {output.kind} must be one text")
    return output.value


def _check_text(pieces: tuple[str, ...], bounds: StructuredOutputSection) -> None:
    size = 0
    for piece in pieces:
        try:
            size += len(piece.encode())
        except UnicodeEncodeError:
            raise refusal("must be valid Unicode, got a lone surrogate") from None
    if size > bounds.max_bytes:
        raise refusal(f"may have at most {bounds.max_bytes} bytes, got {size}")


def _check_filled(pieces: tuple[str, ...]) -> None:
    if not all(pieces):
        raise refusal("must not be empty")


def _check_depth(schema: str, most: int) -> None:
    """Count brackets outside of strings, before a recursive parser sees the text."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", schema)):
        depth += 1 if bracket in "{[" else -1
        deepest = max(deepest, depth)
    if deepest > most:
        raise refusal(f"a schema may be nested at most {most} deep, got {deepest}")


def _json(schema: str, output: StructuredOutput) -> str:
    try:
        decoded = json.loads(schema)
    except ValueError as error:
        raise refusal(f"the schema is not valid JSON: {error}") from None
    if isinstance(decoded, bool):
        decoded = {} if decoded else {"enum": []}
    if not isinstance(decoded, dict):
        raise refusal(f"a schema must be an object or a boolean, got {type(decoded).__name__}")
    decoded["x-guidance"] = _json_options(output)
    return f"start: %json {json.dumps(decoded, ensure_ascii=False)}"


def _json_options(output: StructuredOutput) -> dict[str, Any]:
    if not output.any_whitespace:
        return dict(_SEPARATORS)
    return {"whitespace_pattern": output.whitespace_pattern or _WHITE_SPACE}


def _regex(pattern: str) -> str:
    """The pattern as an escaped terminal of Lark; digit classes match 0 to 9 only."""
    return f"start: /{regex_to_lark(pattern, 'd')}/"


def _choice(texts: tuple[str, ...], most: int) -> str:
    if not texts:
        raise refusal("a choice needs at least one text")
    if len(texts) > most:
        raise refusal(f"a choice may have at most {most} texts, got {len(texts)}")
    _check_filled(texts)
    # One terminal, not one rule per text: the parser would follow thousands of rules in parallel.
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return f"start: CHOICE\nCHOICE: {alternatives}"
