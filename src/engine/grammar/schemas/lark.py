"""Rewrites the schemas within a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from src.engine.grammar.schemas.terms import Schema

# The beginning of a schema (``%json {``), or a string, regular expression or comment to skip.
_PIECES: Final = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"|//[^\n]*+|/(?:[^/\\\n]|\\.)++/|#[^\n]*+|(?P<schema>%json\s*+(?=\{))'
)
_DECODER: Final = json.JSONDecoder()


class Rewritten(NamedTuple):
    """A grammar, and the parts of its schemas that it does not enforce."""

    text: str
    dropped: Sequence[str] = ()


def rewrite_lark(text: str, rewrite_one: Callable[[Schema, list[str] | None], Schema]) -> Rewritten:
    """The grammar with each schema (``%json {...}``) rewritten; malformed ones stay unchanged.

    Parameters
    ----------
    rewrite_one
        Rewrites one schema. For a schema whose options say ``lenient`` the list is ``dropped`` of
        `rewrite`.

    Raises
    ------
    Refusal
        A schema cannot be enforced.
    """
    if "%json" not in text:
        return Rewritten(text)
    dropped: list[str] = []
    written, place = [], 0
    while (found := _PIECES.search(text, place)) is not None:
        written.append(text[place : found.end()])
        place = found.end()
        if found["schema"] is not None:
            try:
                schema, end = _DECODER.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            options = schema.pop("x-guidance", None)
            is_lenient = isinstance(options, dict) and options.get("lenient") is True
            rewritten = rewrite_one(schema, dropped if is_lenient else None)
            if isinstance(rewritten, bool):
                rewritten = {} if rewritten else {"enum": []}
            if options is not None:
                # These are options for the library, not a part of the schema.
                rewritten = {**rewritten, "x-guidance": options}
            written.append(json.dumps(rewritten, ensure_ascii=False))
            place = end
    written.append(text[place:])
    return Rewritten("".join(written), dropped)
