"""Connections that an idle client has closed, under hypercorn.

Hypercorn 0.18 ends such a connection only after `keep_alive_timeout`: its group of tasks waits for
the one that sleeps until then. Meanwhile each of them holds a file and three tasks, and clients
that come anew for every request, a dozen a second, use up the 1,024 files of an ordinary process.
"""

from __future__ import annotations

import sys


def release_closed_connections() -> None:
    """Let hypercorn end a connection when its client has; does nothing under another server."""
    module = sys.modules.get("hypercorn.asyncio.tcp_server")
    if module is None:
        return
    server = module.TCPServer
    read_data = server._read_data
    if hasattr(read_data, "__wrapped__"):
        return

    async def read_then_release(self: object) -> None:
        await read_data(self)
        # Nothing more can come: there is nothing to be idle for.
        await self.idle_task.stop()  # type: ignore[attr-defined]

    read_then_release.__wrapped__ = read_data  # type: ignore[attr-defined]
    server._read_data = read_then_release
