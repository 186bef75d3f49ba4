"""Passes results of steps from other threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
# The C function returns this on an error; the Python function raises.
_FAILED: Final = -1


class StepResults(Generic[T]):
    """A queue that any thread posts to, and that the event loop takes from.

    On Linux the loop is woken by an eventfd. `call_soon_threadsafe` writes to a socket instead, and
    Linux assumes that a thread which writes to another thread's socket is about to sleep. So it may
    move the reader to the writer's CPU, but here the writer goes on with the next step. Also, the
    write keeps the interpreter lock. Otherwise the loop that it wakes would take the lock for a
    whole turn, while the device waits for the next step. For the same reason a result may be posted
    without waking the loop, until the next step computes and leaves the lock to it.

    Parameters
    ----------
    take
        Called on the loop with each posted item, in order.
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
        """Take posted items on this loop from now on; it must be the running one."""
        if loop is self._loop:
            return
        assert self._loop is None, "an engine lives on one event loop"
        self._loop = loop
        if hasattr(os, "eventfd"):
            # If there is no eventfd, or the loop cannot watch it, `call_soon_threadsafe` is used.
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

    def post(self, arrival: T, *, wakes: bool = True) -> None:
        """Post an item from any thread. Does nothing once the loop is closed.

        Without ``wakes`` the loop may take it now, but is told of it by `wake` only.
        """
        self._posted.append(arrival)
        if wakes:
            self.wake()

    def wake(self) -> None:
        """Tell the loop of posted items, if there are some."""
        if not self._posted:
            return
        event, signal = self._event, self._signal
        if event is not None and signal is not None and signal(event, 1) != _FAILED:
            return
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take_posted)

    def close(self) -> None:
        """Close from any thread, once no thread posts any more. Posted items are still taken."""
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
                # An error in one item must not stop the items behind it.
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
    """A function like `os.eventfd_write`, if possible one that keeps the interpreter lock."""
    try:
        signal = ctypes.PyDLL(None).eventfd_write
    except (OSError, AttributeError):
        return os.eventfd_write
    signal.argtypes, signal.restype = (ctypes.c_int, ctypes.c_uint64), ctypes.c_int
    return signal
