"""Literals of Python, read as they come, for models that write their calls as Python."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from src.text.source import SPACE, MismatchError, Source, Steps
from src.text.tool_calls.json_values import read_number

MAX_DEPTH: Final = 32
"""Bound on the nesting of containers."""

NAME_RUN = re.compile(r"[A-Za-z0-9_.\-]*")
_WORDS: Final = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_STRING_RUNS: Final = {
    "'": re.compile(r"[^'\\\r\n]*"),
    '"': re.compile(r'[^"\\\r\n]*'),
}
_OUTSIDE_RUN = re.compile(r"""[^'"()\[\]{}]*""")
_ESCAPES: Final = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "0": "\0",
    "\n": "",
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}


def read_literal(source: Source, depth: int = 0) -> Steps[Any]:
    """Consume a literal; return its value, of JSON's types.

    Raises
    ------
    MismatchError
        There is none, or none that JSON can spell, or it is nested deeper than `MAX_DEPTH`.
    """
    first = yield from source.peek()
    if first in _STRING_RUNS:
        return (yield from _read_string(source))
    if first in _CLOSING:
        if depth == MAX_DEPTH:
            raise MismatchError
        yield from source.take()
        if first == "{":
            return (yield from _read_dict(source, depth))
        return (yield from _read_list(source, depth, _CLOSING[first]))
    if first == "-" or first.isdigit():
        number = json.loads((yield from read_number(source)))
        if isinstance(number, float) and not math.isfinite(number):
            raise MismatchError
        return number
    word = yield from source.run(NAME_RUN)
    if word not in _WORDS:
        raise MismatchError
    return _WORDS[word]


def read_arguments(source: Source) -> Steps[str]:
    """Consume ``(name=value, ...)``; return the arguments as a JSON object.

    Raises
    ------
    MismatchError
        It has another form: positional arguments, a name that comes twice.
    """
    values: dict[str, Any] = {}
    yield from source.expect("(")
    yield from source.run(SPACE)
    while (yield from source.peek()) != ")":
        name = yield from source.run(NAME_RUN)
        if not name or name in values:
            raise MismatchError
        yield from source.run(SPACE)
        yield from source.expect("=")
        yield from source.run(SPACE)
        values[name] = yield from read_literal(source)
        if not (yield from next_item(source, ")")):
            break
    yield from source.expect(")")
    return json.dumps(values, ensure_ascii=False)


def read_brackets(source: Source) -> Steps[str]:
    """Consume ``(`` and what follows to the bracket that closes it; return all of it.

    Raises
    ------
    MismatchError
        It does not begin so, the brackets are not in order or nested deeper than `MAX_DEPTH`, or a
        string is not closed.
    """
    written: list[str] = []
    if (yield from source.peek()) != "(":
        raise MismatchError
    open_brackets: list[str] = []
    while not written or open_brackets:
        written.append((yield from source.run(_OUTSIDE_RUN)))
        character = yield from source.peek()
        if character in _STRING_RUNS:
            written.append((yield from _run_string(source)))
            continue
        if character in _CLOSING:
            if len(open_brackets) > MAX_DEPTH:
                raise MismatchError
            open_brackets.append(_CLOSING[character])
        elif not character or character != open_brackets.pop():
            raise MismatchError
        written.append((yield from source.take()))
    return "".join(written)


def _run_string(source: Source) -> Steps[str]:
    """Consume a string, whatever its escapes are; return it as it is written."""
    quote = yield from source.take()
    written = [quote]
    while True:
        written.append((yield from source.run(_STRING_RUNS[quote])))
        if (yield from source.peek()) not in (quote, "\\"):
            raise MismatchError
        written.append((yield from source.take()))
        if written[-1] == quote:
            return "".join(written)
        written.append((yield from source.take()))


def next_item(source: Source, closing: str) -> Steps[bool]:
    """Consume the comma after an item; say whether there is one."""
    yield from source.run(SPACE)
    if (yield from source.peek()) == closing:
        return False
    yield from source.expect(",")
    yield from source.run(SPACE)
    return True


def _read_list(source: Source, depth: int, closing: str) -> Steps[list[Any]]:
    items = []
    yield from source.run(SPACE)
    while (yield from source.peek()) != closing:
        items.append((yield from read_literal(source, depth + 1)))
        if not (yield from next_item(source, closing)):
            break
    yield from source.expect(closing)
    return items


def _read_dict(source: Source, depth: int) -> Steps[dict[str, Any]]:
    items: dict[str, Any] = {}
    yield from source.run(SPACE)
    while (yield from source.peek()) != "}":
        key = yield from read_literal(source, MAX_DEPTH)
        if not isinstance(key, str):
            raise MismatchError
        yield from source.run(SPACE)
        yield from source.expect(":")
        yield from source.run(SPACE)
        items[key] = yield from read_literal(source, depth + 1)
        if not (yield from next_item(source, "}")):
            break
    yield from source.expect("}")
    return items


def _read_string(source: Source) -> Steps[str]:
    quote = yield from source.take()
    texts = []
    while True:
        texts.append((yield from source.run(_STRING_RUNS[quote])))
        character = yield from source.take()
        if character == quote:
            break
        if character != "\\":
            raise MismatchError
        texts.append((yield from _read_escape(source)))
    try:
        # Two halves of a character, each written as an escape, are the character.
        return "".join(texts).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise MismatchError from None


def _read_escape(source: Source) -> Steps[str]:
    character = yield from source.take()
    if character in _HEX_DIGITS:
        digits = ""
        for _ in range(_HEX_DIGITS[character]):
            digits += yield from source.take()
        if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
            raise MismatchError
        return chr(int(digits, 16))
    if not character:
        raise MismatchError
    # As in Python, what is no escape is what it says.
    return _ESCAPES.get(character, "\\" + character)
