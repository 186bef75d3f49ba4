"""``GET /`` and ``GET /playground/{name}``."""

from __future__ import annotations

from typing import Final

import anyio

from src.http.playground.files import INDEX, NAMES, File, load, wants_html
from src.http.server.body import header
from src.http.server.call import Call
from src.http.server.errors import RouteNotFoundError

# Everything comes from this server and runs nowhere else: no script, style or event handler inside
# the HTML, no other origin, and no frame around the page.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # A copy may be kept, and is asked about each time: another version has another page.
    (b"cache-control", b"no-cache"),
)


async def show_page(call: Call) -> None:
    """A page to chat with the model and to watch the engine; for browsers."""
    if not call.server.config.http.playground or not wants_html(call.scope):
        raise RouteNotFoundError("there is nothing at /")
    await _answer(call, INDEX, (b"vary", b"accept"))


async def show_page_file(call: Call) -> None:
    """One of the files of the page."""
    name = call.scope["path_params"]["name"]
    if not call.server.config.http.playground or name not in NAMES:
        raise RouteNotFoundError(f"there is nothing at {call.scope['path'][:200]}")
    await _answer(call, name)


async def _answer(call: Call, name: str, *headers: tuple[bytes, bytes]) -> None:
    file = await anyio.to_thread.run_sync(load, name)
    extra = ((b"etag", file.etag), *_HEADERS, *headers)
    if _has_copy(call, file):
        # Without a length: a cache would take it for the file's.
        await call.begin(304, extra, b"")
        await call.end(b"")
    else:
        await call.answer(file.content, kind=file.kind, headers=extra)


def _has_copy(call: Call, file: File) -> bool:
    """Whether the client has this very file, as ``If-None-Match`` says (RFC 9110, 13.1.2)."""
    given = header(call.scope, b"if-none-match") or ""
    known = {tag.strip().removeprefix("W/") for tag in given.split(",")}
    return file.etag.decode() in known
