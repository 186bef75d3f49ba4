"""``GET /openapi.json`` and ``GET /docs``."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from src.http.openapi.document import Schema, openapi_document
from src.http.openapi.page import STYLE_HASH, page
from src.http.server.call import Call

# The page has no script, one style sheet, and nothing of it comes from elsewhere.
_POLICY: Final = (
    f"default-src 'none'; style-src '{STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_PAGE_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


async def show_openapi(call: Call) -> None:
    """The endpoints as an OpenAPI document."""
    document = await anyio.to_thread.run_sync(_document, call)
    await call.answer(msgspec.json.encode(document))


async def show_docs(call: Call) -> None:
    """The endpoints as a page to read."""
    html = await anyio.to_thread.run_sync(lambda: page(_document(call)))
    await call.answer(html.encode(), kind=b"text/html; charset=utf-8", headers=_PAGE_HEADERS)


def _document(call: Call) -> Schema:
    server = call.server
    return openapi_document(
        call.scope["app"].state.endpoints,
        keys=server.keys is not None and len(server.keys.api) > 0,
        admin=server.keys is not None and len(server.keys.admin) > 0,
        public_metrics=server.config.http.public_metrics,
        page=server.config.http.playground,
    )
