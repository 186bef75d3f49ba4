"""Reading a request's body: bounded while it is read, decoded with errors that name a field."""

from __future__ import annotations

import asyncio
import re
from typing import Final, TypeVar

import anyio
import msgspec
from starlette.types import Receive, Scope

from src.core.errors import InvalidRequestError, RequestTooLargeError
from src.http.errors import UnsupportedMediaTypeError

MIB: Final = 1024 * 1024
# Of a body that is too large, this much more is read and thrown away, so that the client gets to
# read the answer: most send the whole body before they look for one.
DISCARD_BYTES: Final = 256 * MIB
DISCARD_SECONDS: Final = 10.0

# What is looked at in one go, so that other threads get their turn in between.
_PIECE_BYTES: Final = 64 * 1024

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


async def check_structure(body: bytes, max_nodes: int, max_values: int) -> None:
    """Refuse a body of more objects and lists than can be built without holding up the event loop.

    Parameters
    ----------
    max_nodes
        Objects, lists and keys of objects: they cost about half a microsecond each, and set off
        the garbage collector.
    max_values
        Values in lists and objects, less one for each: numbers and texts, a tenth of that.

    Raises
    ------
    InvalidRequestError
        There are more, of whatever.
    """
    if len(body) < min(max_nodes, max_values):
        return
    # Brackets and commas in texts count too, at first: nearly every body passes as it is.
    nodes, values = _structure(body)
    if nodes > max_nodes or values > max_values:
        nodes, values = await asyncio.to_thread(_structure_outside_texts, body)
    for count, most, what in (
        (nodes, max_nodes, "objects, lists and keys"),
        (values, max_values, "values"),
    ):
        if count > most:
            raise InvalidRequestError(
                f"the body has {count} {what} or more, at most {most} are accepted",
                code="too_many_values",
            )


def _structure(text: bytes) -> tuple[int, int]:
    """Opening brackets and colons, and commas."""
    return text.count(b"{") + text.count(b"[") + text.count(b":"), text.count(b",")


def _structure_outside_texts(body: bytes) -> tuple[int, int]:
    """The same, but for what is between quotes. Exact up to where the body is no JSON any more."""
    nodes = values = start = 0
    inside = False
    while start < len(body):
        end = min(start + _PIECE_BYTES, len(body))
        piece = body[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # A piece does not end between a backslash and what it escapes.
            end += 1
            piece = body[start:end]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        found = _structure(b"".join(parts[int(inside) :: 2]))
        nodes, values = nodes + found[0], values + found[1]
        inside ^= len(parts) % 2 == 0
        start = end
    return nodes, values


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
        The body is declared to be something other than JSON.
    """
    declared = header(scope, b"content-type")
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
