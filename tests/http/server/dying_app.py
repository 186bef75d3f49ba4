"""The application with an engine that breaks when a request of one token arrives."""

from __future__ import annotations

from src.http import app
from src.http.server.state import Server
from tests.support.probe import Probe

_wait_ready = Server.ready_engine


async def _break_down(self: Server):  # type: ignore[no-untyped-def]
    engine = await _wait_ready(self)

    def fail() -> None:
        raise MemoryError("broken on purpose")

    Probe(engine).loop.scheduler.schedule = fail  # type: ignore[method-assign,assignment]
    return engine


Server.ready_engine = _break_down  # type: ignore[method-assign]

__all__ = ["app"]
