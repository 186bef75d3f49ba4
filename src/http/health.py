"""``GET /live``, ``/ready``, ``/health`` and ``/version``.

``/live``: this process answers. ``/ready``: send requests here. ``/health``: what was admitted
makes progress; it is also true while the server drains, which ``/ready`` is not.
"""

from __future__ import annotations

from typing import Final

import msgspec

from src.http.call import Call
from src.http.version import VERSION

_encode: Final = msgspec.json.Encoder().encode
_RETRY: Final = ((b"retry-after", b"1"),)


async def live(call: Call) -> None:
    """200 for as long as the process answers at all."""
    await call.answer(b'{"status":"live"}')


async def ready(call: Call) -> None:
    """200 when requests are admitted, otherwise 503 with the phase and its progress."""
    await _report(call, good=call.server.status.ready)


async def health(call: Call) -> None:
    """200 when the engine makes progress, otherwise 503 with the phase and its progress."""
    await _report(call, good=call.server.status.healthy)


async def version(call: Call) -> None:
    """The version of Slipstream."""
    await call.answer(_encode({"version": VERSION}))


async def _report(call: Call, *, good: bool) -> None:
    # Neither the detail nor the error: they name paths, and these routes are open to all.
    status = call.server.status
    body = _encode({"phase": status.phase, "progress": round(status.progress, 3)})
    if good:
        await call.answer(body)
    else:
        await call.answer(body, status=503, headers=_RETRY)
