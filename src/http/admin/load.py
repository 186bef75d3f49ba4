"""``GET /get_load``, ``/load`` and ``/is_sleeping``: what routers ask of a replica."""

from __future__ import annotations

import msgspec

from src.core.errors import NotReadyError
from src.http.protocol.load import LoadBody, ServerLoadBody, SleepBody
from src.http.server.call import Call


async def get_load(call: Call) -> None:
    """The completions that run or wait."""
    await call.answer(msgspec.json.encode(LoadBody(_load(call))))


async def server_load(call: Call) -> None:
    """The same, as vLLM spells it."""
    await call.answer(msgspec.json.encode(ServerLoadBody(_load(call))))


async def is_sleeping(call: Call) -> None:
    """Never: there is nothing here that gives its memory away for a while."""
    await call.answer(msgspec.json.encode(SleepBody(is_sleeping=False)))


def _load(call: Call) -> int:
    engine = call.server.engine
    # A router must not take a replica that serves nobody yet for one that is free.
    if engine is None:
        raise NotReadyError("the server is starting", retry_after=1.0)
    stats = engine.stats
    return stats.num_running + stats.num_waiting
