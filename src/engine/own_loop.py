"""The event loop that an engine belongs to, and a clear error for calls from elsewhere."""

from __future__ import annotations

import asyncio

from src.core.errors import EventLoopError


class OwnLoop:
    """The first event loop on which an engine is used; everything of it stays there.

    Its futures, events and tasks are of that loop. Used on another one, some of them would fail
    without saying why, and others would never wake who waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    def enter(self) -> None:
        """Belong to the running event loop from now on; raises what `check` raises."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.check()

    def check(self) -> None:
        """Check that the running event loop is the one, if there is one yet.

        Raises
        ------
        EventLoopError
            It is another one, or none runs in this thread.
        """
        running = asyncio._get_running_loop()
        if self._loop is not None and running is not self._loop:
            where = "without an event loop" if running is None else "on another event loop"
            ended = ", which has ended since" if self._loop.is_closed() else ""
            raise EventLoopError(
                f"this engine belongs to the event loop that it was started on{ended}, and was "
                f"used {where}: start it, use it and close it within one asyncio.run()"
            )
