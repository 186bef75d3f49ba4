"""The results of steps, on their way from other threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
# What C says; Python raises an error.
_FAILED: Final = -1


class StepResults(Generic[T]):
    """Has something taken on the event loop that any thread posts.

    By an eventfd, on Linux. `call_soon_threadsafe` writes to a socket, and Linux takes who writes
    to another thread's socket to be about to sleep, and may put the reader on its CPU; here the
    writer goes on with the next step. Nor does it release the interpreter lock: the loop, which
    this wakes, would take it for a whole turn, while the device waits for the next step.

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
        self._signal: Callable[[int, int], object] | None = None

    def __del__(self) -> None:
        self._close_event()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what is posted from now on, on this loop, which is the running one."""
        if loop is self._loop:
            return
        assert self._loop is None, "an engine lives on one event loop"
        self._loop = loop
        if hasattr(os, "eventfd"):
            # Without one, or a loop that can listen to it, there is the other way.
            with contextlib.suppress(OSError, NotImplementedError):
                self._open_event(loop)

    def _open_event(self, loop: asyncio.AbstractEventLoop) -> None:
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            loop.add_reader(event, self._take_all)
        except BaseException:
            os.close(event)
            raise
        self._event, self._signal = event, _signaling()

    def post(self, arrival: T) -> None:
        """From any thread; the loop may be gone by then."""
        self._posted.append(arrival)
        event, signal = self._event, self._signal
        if event is not None and signal is not None and signal(event, 1) != _FAILED:
            return
        if self._loop is not None:
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
            try:
                self._take(self._posted.popleft())
            except Exception as error:
                # What was posted behind it is nobody's fault.
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a result could not be taken", "exception": error}
                )

    def _end(self) -> None:
        self._take_posted()
        if self._event is not None and self._loop is not None:
            self._loop.remove_reader(self._event)
        self._close_event()

    def _close_event(self) -> None:
        if self._event is not None:
            os.close(self._event)
            self._event = None


def _signaling() -> Callable[[int, int], object]:
    """What `os.eventfd_write` does, by a call that keeps the interpreter lock if there is one."""
    try:
        signal = ctypes.PyDLL(None).eventfd_write
    except (OSError, AttributeError):
        return os.eventfd_write
    signal.argtypes, signal.restype = (ctypes.c_int, ctypes.c_uint64), ctypes.c_int
    return signal
