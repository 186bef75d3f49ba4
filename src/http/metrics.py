"""``GET /metrics``, and ``HEAD`` for those that only ask whether it is there."""

from __future__ import annotations

from src.http.body import header
from src.http.call import Call


async def show_metrics(call: Call) -> None:
    """All metrics in Prometheus' text format, or OpenMetrics where the client asks for it."""
    accept = header(call.scope, b"accept") or ""
    body, content_type = call.server.metrics.render(accept)
    await call.answer(body, kind=content_type.encode())
