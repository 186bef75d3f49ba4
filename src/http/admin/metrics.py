"""``GET /metrics``, and ``HEAD`` for those that only ask whether it is there."""

from __future__ import annotations

import anyio

from src.http.server.body import header
from src.http.server.call import Call


async def show_metrics(call: Call) -> None:
    """All metrics in Prometheus' text format, or OpenMetrics where the client asks for it."""
    accept = header(call.scope, b"accept") or ""
    parts, content_type = call.server.metrics.render_parts(accept)
    body = bytearray()
    for part in parts:
        body += part
        # Streams get their turn: all of it takes several milliseconds.
        await anyio.lowlevel.checkpoint()
    await call.answer(bytes(body), kind=content_type.encode())
