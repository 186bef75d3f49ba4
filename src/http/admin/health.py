"""``GET /live``, ``/ready``, ``/health`` and ``/version``.

``/live``: this process answers, so its event loop turns. ``/ready``: send requests here.
``/health``: what was admitted makes progress; it is also true while the server drains, which
``/ready`` is not. None of them waits for the device.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from src.core.errors import NotReadyError
from src.core.memory_report import MemoryReport
from src.core.version import VERSION
from src.http.server.browsers import is_known_host
from src.http.server.call import Call
from src.http.server.keys import is_trusted

_encode: Final = msgspec.json.Encoder().encode
_RETRY: Final = ((b"retry-after", b"1"),)


class StallBody(msgspec.Struct):
    """Which part of a step hangs, and for how long."""

    phase: str
    seconds: float


class HealthBody(msgspec.Struct, omit_defaults=True):
    """What is said of an engine; ``stalled`` and ``queue`` only when something is wrong.

    ``memory``, of `/health` once the model is loaded, says where memory went when it was loaded.
    Where keys are needed, only those with a key see it.
    """

    phase: str
    progress: float
    stalled: StallBody | None = None
    queue: str | None = None
    memory: MemoryReport | None = None


async def live(call: Call) -> None:
    """200 for as long as the process answers at all."""
    await call.answer(b'{"status":"live"}')


async def ready(call: Call) -> None:
    """200 when a request sent now would be queued, otherwise 503 with the reason."""
    body = _body(call)
    if call.server.status.ready and not call.server.admits:
        body.queue = "full"
    await _answer(call, body, good=call.server.admits and body.stalled is None)


async def health(call: Call) -> None:
    """200 when the engine makes progress, otherwise 503 with its phase and with what hangs."""
    body = _body(call)
    engine = call.server.engine
    if engine is not None and is_trusted(call.scope, call.server.keys) and _is_for_us(call):
        # Before the model is loaded there is no such report.
        with contextlib.suppress(NotReadyError):
            body.memory = engine.inspector.memory
    await _answer(call, body, good=call.server.status.healthy and body.stalled is None)


async def version(call: Call) -> None:
    """The version of Slipstream."""
    await call.answer(_encode({"version": VERSION}))


def _is_for_us(call: Call) -> bool:
    """Whether no web page can have asked under a name of its own; whoever has a key is none."""
    keys = call.server.keys
    return bool(keys and len(keys.api)) or is_known_host(
        call.scope, call.server.config.http.allowed_hosts
    )


def _body(call: Call) -> HealthBody:
    # Neither the detail nor the error: they name paths, and these routes are open to all.
    status, stall = call.server.status, call.server.stall
    body = HealthBody(status.phase, round(status.progress, 3))
    if stall is not None:
        body.stalled = StallBody(stall.phase, round(stall.seconds, 1))
    return body


async def _answer(call: Call, body: HealthBody, *, good: bool) -> None:
    if good:
        await call.answer(_encode(body))
    else:
        await call.answer(_encode(body), status=503, headers=_RETRY)
