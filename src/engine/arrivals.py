"""The results of steps, on their way from other threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Has something taken on the event loop that any thread posts.

    As `call_soon_threadsafe`, but on Linux by an eventfd: that writes to a socket, and Linux takes
    who writes to another's socket to be about to sleep, and puts the reader on its CPU. Here the
    writer goes on with the next step.

    Parameters
    ----------
    take
        Called on the loop with what was posted, in that order.
    """

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take = take
        self._posted: deque[T] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: int | None = None

    def __del__(self) -> None:
        self._close_event()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what is posted from now on, on this loop, which is the running one."""
        if loop is self._loop:
            return
        assert self._loop is None, "an engine lives on one event loop"
        self._loop = loop
        if not hasattr(os, "eventfd"):
            return
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            loop.add_reader(event, self._take_all)
        except NotImplementedError:
            os.close(event)
        else:
            self._event = event

    def post(self, arrival: T) -> None:
        """From any thread; the loop may be gone by then."""
        self._posted.append(arrival)
        if self._event is not None:
            os.eventfd_write(self._event, 1)
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take_posted)

    def close(self) -> None:
        """From any thread, once nobody posts; what is posted before is taken still."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end)

    def _take_all(self) -> None:
        assert self._event is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._take_posted()

    def _take_posted(self) -> None:
        while self._posted:
            self._take(self._posted.popleft())

    def _end(self) -> None:
        self._take_posted()
        if self._event is not None and self._loop is not None:
            self._loop.remove_reader(self._event)
        self._close_event()

    def _close_event(self) -> None:
        if self._event is not None:
            os.close(self._event)
            self._event = None
