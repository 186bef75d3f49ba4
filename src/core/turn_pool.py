"""Threads that do what waits for them, owners in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from src.core.in_turns import InTurns

T = TypeVar("T")


class Job(Generic[T]):
    """A function that one thread calls once.

    Attributes
    ----------
    owner
        Whose it is.
    future
        Of what it returns or raises. A job whose future is cancelled before it begins is not done.
    """

    def __init__(self, run: Callable[[], T], owner: str = "") -> None:
        self.owner = owner
        self.future: Future[T] = Future()
        self.is_taken = False
        # A job waits for its turn long after its future is cancelled. What it was about, a text
        # say, need not. The list keeps the future from holding the job, which holds the future.
        self._runs = runs = [run]
        self.future.add_done_callback(lambda _: runs.clear())

    def do(self) -> None:
        """Call the function, unless nobody waits any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._runs.pop()()
        except BaseException as error:
            self.future.set_exception(error)
            # The error has this frame, and the job has the error: without this both, and what the
            # function was about, would stay until the cycle collector comes.
            self = None  # type: ignore[assignment]
        else:
            self.future.set_result(result)


class TurnPool:
    """Some threads, and jobs that wait for them; the threads begin with the first jobs.

    Among jobs that wait, owners take turns, so that nobody waits for all that somebody else has
    asked for.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: InTurns[Job[object]] = InTurns()

    def submit(self, owner: str, run: Callable[[], T]) -> Job[T]:
        """Have ``run`` called on one of the threads.

        Raises
        ------
        RuntimeError
            The pool is closed.
        """
        job = Job(run, owner)
        self.share(owner, job)
        return job

    def share(self, owner: str, job: Job[T]) -> None:
        """Let a job have a turn of this owner's too, who waits for it as well.

        Raises
        ------
        RuntimeError
            The pool is closed.
        """
        with self._lock:
            # As many turns as there are entries, and each takes what is next then.
            self._threads.submit(self._take_turn)
            self._waiting.push(owner, job)  # type: ignore[arg-type]

    def close(self) -> None:
        """Cancel what waits, and wait for what has begun. Harmless when done twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [self._waiting.pop() for _ in range(len(self._waiting))]
        for job in waiting:
            job.future.cancel()
        self._threads.shutdown(wait=True)

    def _take_turn(self) -> None:
        # No name here holds the job: an error that it raises has this frame.
        (self._next() or int)()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._waiting:
                return None
            job = self._waiting.pop()
            if job.is_taken:
                return None
            job.is_taken = True
            return job.do
