"""The device thread: it launches steps, and on the CPU also computes them."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
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
        # Of all work that is queued, whether it is a step.
        self._kinds: deque[bool] = deque([False])
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue.put(begin)
        # A daemon, because at exit the interpreter waits for other threads before `atexit`
        # functions could stop them.
        self._thread = threading.Thread(
            target=_work, args=(self._queue, self._kinds), name="slipstream-device", daemon=True
        )
        self._thread.start()
        _running.add(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def post(self, work: Work, *, is_step: bool = False) -> None:
        """Queue ``work`` behind earlier work. An error that it raises is logged.

        Raises
        ------
        RuntimeError
            The thread was closed.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the device thread has ended")
            self._kinds.append(is_step)
            self._queue.put(work)

    @property
    def next_is_step(self) -> bool:
        """Whether a step is queued right behind the work that runs. For that work alone."""
        return bool(self._kinds) and self._kinds[0]

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


def _work(queue: SimpleQueue[Work | None], kinds: deque[bool]) -> None:
    while (work := queue.get()) is not None:
        kinds.popleft()
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
