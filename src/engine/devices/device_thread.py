"""The device thread: it launches steps, and on the CPU also computes them."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Work: TypeAlias = Callable[[], object]

logger = logging.getLogger(__name__)


class DeviceThread:
    """Runs functions one after the other in its thread, until it is closed.

    Not an executor, because that makes a future with a lock and a condition for every call. A step
    does not need one, since its result is delivered in another way.

    Parameters
    ----------
    begin
        The first function to run in the thread.
    """

    def __init__(self, begin: Work) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue.put(begin)
        # A daemon, because at exit the interpreter waits for other threads before `atexit`
        # functions could stop them.
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="slipstream-device", daemon=True
        )
        self._thread.start()
        _running.add(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def post(self, work: Work) -> None:
        """Queue ``work`` behind earlier work. An error that it raises is logged.

        Raises
        ------
        RuntimeError
            The thread was closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the device thread has ended")
            self._queue.put(work)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Like `post`, but returns a future with the result or the error.

        Raises
        ------
        RuntimeError
            The thread was closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.post(run)
        return future

    def close(self) -> None:
        """Accept no more work, and wait until all queued work is done."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join()


def _work(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        try:
            work()
        # A library's panic is not an Exception. The thread must survive it to run later steps.
        except BaseException:
            logger.exception("the device thread goes on without this")
        # Otherwise the objects that it refers to would live until the next work comes.
        del work


_running: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all threads: one that computes while the interpreter exits would crash it."""
    for thread in list(_running):
        thread.close()
