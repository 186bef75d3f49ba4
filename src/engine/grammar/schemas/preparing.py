"""A grammar whose schemas the library takes, or why it does not.

The library says what it does not take, but not where. That is found here by asking it of smaller
and smaller parts.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any, Final

from llguidance import LLMatcher

from src.engine.grammar.schemas.lark import Rewritten, rewrite_lark
from src.engine.grammar.schemas.rewriting import HOMES, children, rewrite
from src.engine.grammar.schemas.terms import Refusal, Schema, at, pointer

# Parts that are left out, one after the other, of a schema that may be enforced in part.
_MAX_LEFT_OUT: Final = 32
# Seconds that are spent to find the place of a fault.
_SECONDS: Final = 1.0
_PREFIX: Final = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
# What nobody can set who asks for a schema.
_ADVICE: Final = re.compile(r"\. Enable .*|; either increase .*", re.DOTALL)
# The grammar itself follows.
_QUOTED: Final = re.compile(r"<non-verbose/>|\n *[0-9]+ \|")
_MAX_MESSAGE_CHARS: Final = 200


def prepare(lark: str) -> Rewritten:
    """The grammar with schemas that the library takes.

    Raises
    ------
    Refusal
        A schema cannot be enforced; the message says where it says what, as a JSON pointer.
    """
    return rewrite_lark(lark, _prepare_schema)


def _prepare_schema(schema: Schema, dropped: list[str] | None) -> Schema:
    rewritten = rewrite(schema, dropped)
    # One more than is left out: the last has to be right.
    for _ in range(_MAX_LEFT_OUT):
        fault = _fault(rewritten)
        if fault is None or isinstance(rewritten, bool):
            return rewritten
        path = _place(rewritten, fault)
        refusal = Refusal(path, fault)
        if dropped is None or not path:
            raise refusal
        dropped.append(str(refusal))
        rewritten = _without(rewritten, path)
    return rewritten


def _fault(schema: Schema) -> str | None:
    """What the library does not take, in a line; it has read the schema, and compiled nothing."""
    text = json.dumps(schema)
    is_fault, messages = LLMatcher.validate_grammar_with_warnings(f"start: %json {text}")
    if not is_fault:
        return None
    message = _QUOTED.split(messages[0])[0] if messages else ""
    message = _ADVICE.sub("", _PREFIX.sub("", message))
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS] or "it cannot be enforced"


def _place(root: dict[str, Any], fault: str) -> str:
    """Where the smallest part is that the library does not take, for the same reason."""
    until, path, node = time.monotonic() + _SECONDS, "", root
    homes: dict[str, Any] = {home: root[home] for home in HOMES if home in root}
    while True:
        for inner, child in _parts(node, path):
            if time.monotonic() > until:
                return path
            if _fault({**child, **homes}) == fault:
                path, node = inner, child
                break
        else:
            return path


def _parts(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for keyword, key, child in children(node):
        if isinstance(child, dict):
            yield pointer(path, *((keyword,) if key is None else (keyword, key))), child


def _without(schema: dict[str, Any], path: str) -> Schema:
    """The schema with no more than a type at that place."""
    changed = copy.deepcopy(schema)
    parent, _, last = path.rpartition("/")
    holder = at(changed, "#" + parent)
    key: Any = int(last) if isinstance(holder, list) else last.replace("~1", "/").replace("~0", "~")
    given = holder[key].get("type")
    holder[key] = {} if given is None else {"type": given}
    return changed
