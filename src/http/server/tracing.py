"""The trace of an HTTP request: begun from its headers, ended when it has been answered."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

from src.engine.client import AsyncEngine
from src.http.server.body import header
from src.observability.tracing import RequestTrace

# Path of an endpoint that computes, which is asked by POST -> what the conventions call it, where
# they do; else its task.
OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/embed": "embeddings",
    "/": "embeddings",
    "/classify": "classify",
    "/predict": "classify",
    # Until its task is known.
    "/pooling": "pooling",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "score",
    "/v1/rerank": "score",
    "/v2/rerank": "score",
}

_SESSION_ID = re.compile(r"[!-~]{1,128}")


def begin_trace(engine: AsyncEngine | None, scope: Scope, received: float) -> RequestTrace | None:
    """Start the request's span; ``None`` when it computes nothing or is not sampled.

    ``received`` is when the request arrived, on the monotonic clock.
    """
    # At some of these paths a GET shows something.
    if engine is None or not engine.telemetry.traces or scope["method"] != "POST":
        return None
    route = scope["path"].removeprefix(scope.get("root_path", ""))
    operation = OPERATIONS.get(route)
    if operation is None:
        return None
    trace = engine.telemetry.begin(operation, scope["headers"], received=received)
    if trace is None:
        return None
    trace.attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "url.path": scope["path"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        address, port = scope["server"]
        trace.attributes["server.address"] = address
        if port is not None:
            trace.attributes["server.port"] = port
    # What routers keep a conversation on one replica by.
    session = header(scope, b"x-session-id")
    if session and _SESSION_ID.fullmatch(session):
        trace.attributes["gen_ai.conversation.id"] = session
    return trace


def end_trace(
    engine: AsyncEngine | None, trace: RequestTrace, status: int | None, *, disconnected: bool
) -> None:
    """End the span of a request that is over; ``status`` is that of its answer, if it has one."""
    if engine is None:
        return
    trace.disconnected = disconnected
    if status is not None:
        trace.attributes["http.response.status_code"] = status
    engine.telemetry.end(trace)
