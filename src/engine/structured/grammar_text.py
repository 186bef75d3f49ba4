"""A `StructuredOutput` in llguidance's language, once its size and its depth are known to be sane.

Nothing here reads the grammar in earnest: that is done by the compiler, elsewhere.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher

from src.core.config import StructuredOutputSection
from src.core.errors import InvalidRequestError
from src.core.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PARAM: Final = "structured_output"

_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[\]{}]")
_ANY_OBJECT: Final = '{"type": "object"}'
_BOOLEAN: Final = {"true": "{}", "false": '{"enum": []}'}
# Bounded: a model that falls into white space comes out of it again.
_WHITE_SPACE: Final = r"[ \t\r\n]{1,64}"
_SEPARATORS: Final[JsonCompileOptions] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}


def refusal(message: str) -> InvalidRequestError:
    """The error of a request whose grammar is at fault."""
    return InvalidRequestError(f"{PARAM}: {message}", param=PARAM, code="invalid_grammar")


def grammar_text(output: StructuredOutput, bounds: StructuredOutputSection) -> str:
    """What llguidance compiles.

    Raises
    ------
    InvalidRequestError
        It is longer or nested deeper than the bounds, or empty, or no Unicode text.
    """
    pieces = (output.value,) if isinstance(output.value, str) else output.value
    _check_text((*pieces, output.whitespace_pattern or ""), bounds)
    match output.kind:
        case "json_object":
            return _json(_ANY_OBJECT, output)
        case "json_schema":
            _check_depth(_one(output), bounds.max_depth)
            return _json(_one(output), output)
        case "regex":
            _check_filled(pieces)
            return LLMatcher.grammar_from_regex(_one(output))
        case "choice":
            return _choice(pieces, bounds.max_choices)
        case "grammar":
            _check_filled(pieces)
            return LLMatcher.grammar_from_lark(_one(output))


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
    """Count brackets outside of strings: a parser that recurses has not seen the text yet."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", schema)):
        depth += 1 if bracket in "{[" else -1
        deepest = max(deepest, depth)
    if deepest > most:
        raise refusal(f"a schema may be nested at most {most} deep, got {deepest}")


def _json(schema: str, output: StructuredOutput) -> str:
    # Options go with objects only.
    schema = _BOOLEAN.get(schema.strip(), schema)
    options: JsonCompileOptions = {}
    if not output.any_whitespace:
        options |= _SEPARATORS
    elif output.whitespace_pattern is not None:
        options["whitespace_pattern"] = output.whitespace_pattern
    else:
        options["whitespace_pattern"] = _WHITE_SPACE
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise refusal(f"the schema is not valid JSON: {error}") from None


def _choice(texts: tuple[str, ...], most: int) -> str:
    if not texts:
        raise refusal("a choice needs at least one text")
    if len(texts) > most:
        raise refusal(f"a choice may have at most {most} texts, got {len(texts)}")
    _check_filled(texts)
    # One terminal: the parser would follow thousands of rules side by side.
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}\n")
