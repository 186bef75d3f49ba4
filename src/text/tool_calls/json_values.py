"""Strict JSON (RFC 8259), read as it comes."""

from __future__ import annotations

import json
import re
from typing import Final

from src.text.source import SPACE, MismatchError, Source, Steps, finished

MAX_DEPTH: Final = 128
"""Bound on the nesting of containers, which clients' parsers would not survive either."""
_MAX_NUMBER_CHARS: Final = 512

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD_RUN = re.compile(r"[a-z]*")
_HEX: Final = "0123456789abcdefABCDEF"
_CLOSING: Final = {"{": "}", "[": "]"}


def read_value(source: Source) -> Steps[None]:
    """Consume one value, and the white space before it.

    Raises
    ------
    MismatchError
        There is none, or it is nested deeper than `MAX_DEPTH`.
    """
    open_containers: list[str] = []
    while True:
        yield from source.run(SPACE)
        character = yield from source.peek()
        if character in ("{", "["):
            yield from source.take()
            if len(open_containers) == MAX_DEPTH:
                raise MismatchError
            open_containers.append(_CLOSING[character])
            yield from source.run(SPACE)
            if (yield from source.peek()) != open_containers[-1]:
                if character == "{":
                    yield from _read_key(source)
                continue
        else:
            yield from _read_scalar(source, character)
        # A value has ended, or is about to: close what it closes, up to the next comma.
        while open_containers:
            yield from source.run(SPACE)
            if (yield from _take_one(source, f",{open_containers[-1]}")) == ",":
                if open_containers[-1] == "}":
                    yield from source.run(SPACE)
                    yield from _read_key(source)
                break
            open_containers.pop()
        else:
            return


def read_string(source: Source) -> Steps[str]:
    """Consume a string; return it as it is written, with its quotes.

    Raises
    ------
    MismatchError
        There is none.
    """
    yield from source.expect('"')
    written = ['"']
    while True:
        written.append((yield from source.run(_STRING_RUN)))
        written.append((yield from _take_one(source, '"\\')))
        if written[-1] == '"':
            return "".join(written)
        written.append((yield from _take_one(source, '"\\/bfnrtu')))
        if written[-1] == "u":
            for _ in range(4):
                written[-1] += yield from _take_one(source, _HEX)


def read_text(source: Source) -> Steps[str]:
    """Consume a string; return the text that it holds.

    Raises
    ------
    MismatchError
        There is none, or it has a lone surrogate.
    """
    text: str = json.loads((yield from read_string(source)))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MismatchError from None
    return text


def is_object(text: str) -> bool:
    """Whether the whole text is a JSON object."""
    return text.startswith("{") and is_value(text)


def is_value(text: str) -> bool:
    """Whether the whole text is a JSON value, without white space around it."""
    source = Source()
    source.feed(text)
    source.end()
    try:
        finished(read_value(source))
        return not finished(source.peek())
    except MismatchError:
        return False


def read_number(source: Source) -> Steps[str]:
    """Consume a number; return it as it is written.

    Raises
    ------
    MismatchError
        There is none.
    """
    written = yield from source.run(_NUMBER_RUN)
    if len(written) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(written):
        raise MismatchError
    return written


def _take_one(source: Source, characters: str) -> Steps[str]:
    """Consume one of these characters; what else stands there is left, for it may be a tag's."""
    character = yield from source.peek()
    if not character or character not in characters:
        raise MismatchError
    return (yield from source.take())


def _read_key(source: Source) -> Steps[None]:
    yield from read_string(source)
    yield from source.run(SPACE)
    yield from source.expect(":")


def _read_scalar(source: Source, character: str) -> Steps[None]:
    if character == '"':
        yield from read_string(source)
    elif character.isdigit() or character == "-":
        yield from read_number(source)
    elif (yield from source.run(_WORD_RUN)) not in ("true", "false", "null"):
        raise MismatchError
