"""Makes a grammar whose schemas the library accepts, or finds out why it does not.

The library says what it refuses, but not where. The place is found by validating smaller and
smaller parts.
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

# The most parts that are left out of a lenient schema.
_MAX_LEFT_OUT: Final = 32
# Seconds for finding the place of a fault.
_SECONDS: Final = 1.0
_PREFIX: Final = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
# Advice on options of the library that a client cannot set.
_ADVICE: Final = re.compile(r"\. Enable .*|; either increase .*", re.DOTALL)
# The message quotes the grammar from here on.
_QUOTED: Final = re.compile(r"<non-verbose/>|\n *[0-9]+ \|")
_MAX_MESSAGE_CHARS: Final = 200


def prepare(lark: str) -> Rewritten:
    """The grammar with schemas that the library accepts.

    Raises
    ------
    Refusal
        A schema cannot be enforced; the message has the place as a JSON pointer, and the reason.
    """
    return rewrite_lark(lark, _prepare_schema)


def _prepare_schema(schema: Schema, dropped: list[str] | None) -> Schema:
    rewritten = rewrite(schema, dropped)
    # Each turn leaves out one more part, until the library accepts the rest.
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
    """The library's reason to refuse a schema, in one line; it validates without compiling."""
    text = json.dumps(schema)
    is_fault, messages = LLMatcher.validate_grammar_with_warnings(f"start: %json {text}")
    if not is_fault:
        return None
    message = _QUOTED.split(messages[0])[0] if messages else ""
    message = _ADVICE.sub("", _PREFIX.sub("", message))
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS] or "it cannot be enforced"


def _place(root: dict[str, Any], fault: str) -> str:
    """The place of the smallest part that the library refuses for the same reason."""
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
    """The schema with only the ``type`` left at that place."""
    changed = copy.deepcopy(schema)
    parent, _, last = path.rpartition("/")
    holder = at(changed, "#" + parent)
    key: Any = int(last) if isinstance(holder, list) else last.replace("~1", "/").replace("~0", "~")
    given = holder[key].get("type")
    holder[key] = {} if given is None else {"type": given}
    return changed
