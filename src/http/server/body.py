"""Reading a request's body: bounded while it is read, decoded with errors that name a field."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import anyio
import msgspec
from starlette.types import Receive, Scope

from src.core.errors import InvalidRequestError, RequestTooLargeError
from src.http.server.body_work import PIECE_BYTES, beside_the_loop, pause
from src.http.server.errors import UnsupportedMediaTypeError

MIB: Final = 1024 * 1024
# Of a body that is too large, this much more is read and thrown away, so that the client gets to
# read the answer: most send the whole body before they look for one.
DISCARD_BYTES: Final = 256 * MIB
DISCARD_SECONDS: Final = 10.0

# Lists and objects within one another. What walks them recurses, and Python does so a thousand
# times at most.
MAX_DEPTH: Final = 128
# Outermost fields of a body.
MAX_FIELDS: Final = 1024

_NO_STRUCTURE: Final = bytes(sorted(set(range(256)) - set(b"{}[]:,")))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
# A float written out has 309 before its point. To read an integer, or to write it, takes the square
# of its digits, of which there may be thousands.
_MAX_DIGITS: Final = 400
_TOO_LONG: Final = b"0" * (_MAX_DIGITS + 1)
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
# Counting alone is fast.
_UNPAUSED_BYTES: Final = 4 * PIECE_BYTES
_BRACKET: Final = re.compile(rb"[{}\[\]]")
_BRACKETS_AT_ONCE: Final = 1000
# Of an error's text, at either end: one may quote the whole body.
_MAX_QUOTED: Final = 500

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`(?P<path>\$[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


class ClientDisconnectedError(Exception):
    """The client went away before its request was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a request header; ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body of at most ``limit`` bytes.

    Raises
    ------
    RequestTooLargeError
        It is larger, or declared to be; the rest of it has not been read.
    ClientDisconnectedError
        The client went away.
    """
    declared = header(scope, b"content-length") or ""
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    chunks: list[bytes] = []
    received, more = 0, True
    while more and size <= limit:
        chunk, more = await _next_chunk(receive)
        received += len(chunk)
        if received > limit:
            break
        chunks.append(chunk)
    else:
        if size <= limit:
            return b"".join(chunks)
    raise RequestTooLargeError(
        f"the body has {max(size, received)} bytes or more, at most {limit} are accepted"
    )


async def check_structure(
    *texts: bytes, max_nodes: int, max_values: int, what: str = "the body", param: str | None = None
) -> None:
    """Refuse JSON of more objects and lists than can be built without holding up the event loop.

    Parameters
    ----------
    texts
        What is going to be decoded; the bounds are of all together.
    max_nodes
        Objects, lists and keys of objects: they cost about half a microsecond each, and set off
        the garbage collector.
    max_values
        Values in lists and objects, less one for each: numbers and texts, a tenth of that.
    what, param
        What the texts are called, and the field that they are in.

    Raises
    ------
    InvalidRequestError
        There are more, of whatever, or they are nested deeper than `MAX_DEPTH`; or a number
        in a long text has more than 400 digits in a row.
    """
    check = functools.partial(_check_exactly, texts, max_nodes, max_values, what, param)
    size = sum(map(len, texts))
    if size > PIECE_BYTES:
        await beside_the_loop(size, _check_long, texts, max_nodes, max_values, check)
    elif not _is_small(texts, max_nodes, max_values):
        check()


async def check_fields(body: bytes) -> None:
    """Refuse a long body of more outermost fields than any request has.

    Their names are all built, in order to tell unknown ones.

    Raises
    ------
    InvalidRequestError
        There are more than `MAX_FIELDS`.
    """
    if len(body) > PIECE_BYTES:
        await beside_the_loop(len(body), _check_fields, body)


def _check_fields(body: bytes) -> None:
    if body.count(b":") <= MAX_FIELDS:
        return
    pieces = []
    for piece in _outside_texts(body):
        pieces.append(piece.translate(None, _NO_STRUCTURE))
        pause()
    outside = b"".join(pieces)
    fields = depth = position = 0
    for number, bracket in enumerate(_BRACKET.finditer(outside), start=1):
        if depth == 1:
            fields += outside.count(b":", position, bracket.start())
        depth += 1 if bracket[0] in b"{[" else -1
        position = bracket.end()
        if number % _BRACKETS_AT_ONCE == 0:
            pause()
    if fields > MAX_FIELDS:
        raise too_many_fields(fields)


def too_many_fields(count: int) -> InvalidRequestError:
    """The error of a body with so many outermost fields."""
    return InvalidRequestError(
        f"the body may have at most {MAX_FIELDS} fields, got {count}", code="too_many_values"
    )


def check_short_structure(
    text: str, *, max_nodes: int, max_values: int, what: str, param: str
) -> None:
    """The same of a text that is not long, at once."""
    texts = (text.encode(errors="replace"),)
    if not _is_small(texts, max_nodes, max_values):
        _check_exactly(texts, max_nodes, max_values, what, param)


def _check_long(
    texts: Sequence[bytes], max_nodes: int, max_values: int, check: Callable[[], None]
) -> None:
    nodes = values = unpaused = 0
    for text in texts:
        brackets = 0
        for start in range(0, len(text), PIECE_BYTES):
            piece = text[start : start + PIECE_BYTES]
            brackets += piece.count(b"{") + piece.count(b"[")
            found = _structure(piece)
            nodes, values = nodes + found[0], values + found[1]
            is_small = brackets <= MAX_DEPTH and nodes <= max_nodes and values <= max_values
            if not is_small or _has_long_number(piece):
                check()
                return
            unpaused += len(piece)
            if unpaused >= _UNPAUSED_BYTES:
                pause()
                unpaused = 0


def _has_long_number(piece: bytes) -> bool:
    return _TOO_LONG in piece.translate(_DIGITS)


def _is_small(texts: Sequence[bytes], max_nodes: int, max_values: int) -> bool:
    """Whether nothing can be too much, even if texts within the JSON are counted with it."""
    nodes = values = 0
    for text in texts:
        if text.count(b"{") + text.count(b"[") > MAX_DEPTH:
            return False
        found = _structure(text)
        nodes, values = nodes + found[0], values + found[1]
    return nodes <= max_nodes and values <= max_values


def _structure(text: bytes) -> tuple[int, int]:
    """Opening brackets and colons, and commas."""
    return text.count(b"{") + text.count(b"[") + text.count(b":"), text.count(b",")


def _check_exactly(
    texts: Sequence[bytes], max_nodes: int, max_values: int, what: str, param: str | None
) -> None:
    nodes = values = 0
    for text in texts:
        pieces = []
        for piece in _outside_texts(text):
            if len(text) > PIECE_BYTES:
                pause()
            if _has_long_number(piece):
                raise InvalidRequestError(
                    f"{what} may have numbers of at most {_MAX_DIGITS} digits in a row",
                    param=param,
                    code="invalid_json",
                )
            pieces.append(piece.translate(None, _NO_STRUCTURE))
        outside = b"".join(pieces)
        found = _structure(outside)
        nodes, values = nodes + found[0], values + found[1]
        for count, most, things in (
            (nodes, max_nodes, "objects, lists and keys"),
            (values, max_values, "values"),
        ):
            if count > most:
                raise InvalidRequestError(
                    f"{what} may have at most {most} {things}, got {count} or more",
                    param=param,
                    code="too_many_values",
                )
        if _is_too_deep(outside):
            raise InvalidRequestError(
                f"{what} may be nested {MAX_DEPTH} levels deep at most",
                param=param,
                code="invalid_json",
            )


def _outside_texts(text: bytes) -> Iterator[bytes]:
    """What is not between quotes, in pieces.

    Exact up to where the text is no JSON any more.
    """
    start = 0
    inside = False
    while start < len(text):
        end = min(start + PIECE_BYTES, len(text))
        piece = text[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # A piece does not end between a backslash and what it escapes.
            end += 1
            piece = text[start:end]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[int(inside) :: 2])
        inside ^= len(parts) % 2 == 0
        start = end


def _is_too_deep(outside: bytes) -> bool:
    brackets = outside.translate(_SQUARE, b":,")
    # Each turn takes the innermost pairs away.
    for _ in range(MAX_DEPTH):
        if b"[]" not in brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets


def declares_body(scope: Scope) -> bool:
    """Whether the headers of an HTTP/1 request announce a body."""
    length = header(scope, b"content-length")
    return length not in (None, "0") or header(scope, b"transfer-encoding") is not None


async def discard_body(receive: Receive) -> None:
    """Read on to the end of the body and forget it, within bounds of size and time."""
    discarded, more = 0, True
    with anyio.move_on_after(DISCARD_SECONDS):
        while more and discarded < DISCARD_BYTES:
            chunk, more = await _next_chunk(receive)
            discarded += len(chunk)
            # A server that has the whole body at hand never suspends here.
            await anyio.lowlevel.checkpoint()


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError
    return message.get("body", b""), message.get("more_body", False)


def check_content_type(scope: Scope) -> None:
    """Refuse what a web page may send elsewhere without being asked first.

    Raises
    ------
    UnsupportedMediaTypeError
        The body is declared to be something other than JSON, or comes from a web page and is not
        declared to be anything.
    """
    declared = header(scope, b"content-type")
    if not declared and header(scope, b"origin") is not None:
        raise UnsupportedMediaTypeError(
            "a web page's body needs the header content-type: application/json"
        )
    kind = (declared or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaTypeError(
            f"expected content-type application/json, got {kind[:100]}; with curl: "
            "-H 'Content-Type: application/json'"
        )


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The message in ``body``.

    Raises
    ------
    InvalidRequestError
        It is not JSON, or not such a message; names the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None


def invalid_field(error: msgspec.ValidationError) -> InvalidRequestError:
    """The same error in a client's terms: ``messages[0].role`` for ``$.messages[0].role``."""
    text = str(error)
    if len(text) > 2 * _MAX_QUOTED:
        text = f"{text[:_MAX_QUOTED]} ... {text[-_MAX_QUOTED:]}"
    problem = _PATH.sub("", text)
    param = _param(text)
    missing = _MISSING.search(problem)
    if missing is not None:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidRequestError(f"{param} is required", param=param)
    problem = problem[:1].lower() + problem[1:]
    return InvalidRequestError(f"{param}: {problem}" if param else problem, param=param)


def _param(text: str) -> str | None:
    found = _PATH.search(text)
    path = found["path"] if found is not None else ""
    # msgspec does not say which index or key it was inside `[...]`.
    return path.removeprefix("$").removeprefix(".").replace("[...]", "") or None
