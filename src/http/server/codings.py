"""Bodies that a client has compressed, as ``Content-Encoding`` says (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from typing import Final

from starlette.types import Scope

from src.core.errors import InvalidRequestError, RequestTooLargeError
from src.http.server.body_work import ANY_SIZE, PIECE_BYTES, beside_the_loop, pause
from src.http.server.errors import UnsupportedCodingError

# Coding -> how zlib finds its head and its check.
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
READ_CODINGS: Final = ", ".join(_WINDOW_BITS)
# Each of them may make a body as long as bodies may be.
_MAX_CODINGS: Final = 2
# Members of one body; programs that compress block by block make one of each 64 KiB.
_MAX_MEMBERS: Final = 1024
# What is decoded at once.
_DECODED_BYTES: Final = 512 * 1024


def body_codings(scope: Scope) -> list[str]:
    """The codings of a request's body, in the order in which they were applied.

    Raises
    ------
    UnsupportedCodingError
        One of them is not read here, or there are too many.
    """
    values = [
        value.decode("latin-1") for key, value in scope["headers"] if key == b"content-encoding"
    ]
    names = [name.strip().lower() for value in values for name in value.split(",")]
    codings = [name.removeprefix("x-") for name in names if name not in ("", "identity")]
    for coding in codings:
        if coding not in _WINDOW_BITS:
            raise UnsupportedCodingError(
                f"content-encoding {coding[:50]!r} is not read by this server; send {READ_CODINGS} "
                "or the body as it is",
                READ_CODINGS,
            )
    if len(codings) > _MAX_CODINGS:
        raise UnsupportedCodingError(
            f"content-encoding may have at most {_MAX_CODINGS} codings, got {len(codings)}",
            READ_CODINGS,
        )
    return codings


async def decoded_body(body: bytes, codings: list[str], limit: int) -> bytes:
    """The body as it was before the client coded it, of at most ``limit`` bytes.

    Raises
    ------
    InvalidRequestError
        It is not coded as its header says.
    RequestTooLargeError
        It is longer than ``limit``.
    """
    for coding in reversed(codings):
        # A short body may be the code of a long one.
        body = await beside_the_loop(ANY_SIZE, _decoded, body, coding, limit)
    return body


def _decoded(body: bytes, coding: str, limit: int) -> bytes:
    pieces: list[bytes] = []
    room = limit
    decoder = None
    # A body may be several members that were coded one by one.
    members = 0
    # What follows a member is copied at its end, so it may not be the whole rest of the body.
    for start in range(0, len(body), PIECE_BYTES):
        rest = body[start : start + PIECE_BYTES]
        while rest:
            if decoder is None:
                members += 1
                if members > _MAX_MEMBERS:
                    raise _broken(coding, f"it has more than {_MAX_MEMBERS} members")
                decoder = zlib.decompressobj(_WINDOW_BITS[coding])
            try:
                # One more than there may be tells a body of the largest size from a longer one.
                piece = decoder.decompress(rest, min(room + 1, _DECODED_BYTES))
            except zlib.error as error:
                raise _broken(coding, str(error)) from None
            room -= len(piece)
            if room < 0:
                raise RequestTooLargeError(
                    f"the decoded body has {limit + 1} bytes or more, at most {limit} are accepted"
                )
            pieces.append(piece)
            rest = decoder.unconsumed_tail
            if decoder.eof:
                rest, decoder = decoder.unused_data, None
            pause()
    if decoder is not None:
        raise _broken(coding, "it ends too early")
    return b"".join(pieces)


def _broken(coding: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the body is no {coding}, which content-encoding says: {reason}",
        code="invalid_content_encoding",
    )
