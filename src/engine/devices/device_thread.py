"""The thread that steps are launched from, and computed in where the host is the device."""

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
    """Does what it is given, one thing after the other, until it is closed.

    Not an executor: that makes a future of everything, with a lock and a condition, of which a
    step has no use, since its result goes another way.

    Parameters
    ----------
    begin
        Called first, in the thread.
    """

    def __init__(self, begin: Work) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue.put(begin)
        # A daemon, since the interpreter waits for other threads before anybody could end them.
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="slipstream-device", daemon=True
        )
        self._thread.start()
        _running.add(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def post(self, work: Work) -> None:
        """Have it done after what was given before; what it raises is logged.

        Raises
        ------
        RuntimeError
            After the end.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the device thread has ended")
            self._queue.put(work)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """As `post`, with the outcome in a future.

        Raises
        ------
        RuntimeError
            After the end.
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
        """Take nothing more, and wait until all is done that was given before."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join()


def _work(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        try:
            work()
        # A panic of a library is no Exception, and nobody else would go on with the steps.
        except BaseException:
            logger.exception("the device thread goes on without this")
        # What it holds would live until the next one comes.
        del work


_running: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter goes down would crash it."""
    for thread in list(_running):
        thread.close()
