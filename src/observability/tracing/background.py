"""A thread that does work for the event loop, so that no step waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

# Maximal number of waiting jobs. Beyond it the oldest are dropped; requests never wait.
MAX_JOBS: Final = 4096
# Seconds between two polls. The thread is not woken for each job, because that would cost the event
# loop more than queueing the job.
INTERVAL: Final = 0.1
# Number of jobs after which the thread yields the GIL.
_BATCH: Final = 8


class Background:
    """Runs jobs in a daemon thread, in order, a little at a time."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._jobs: deque[Callable[[], None]] = deque(maxlen=MAX_JOBS)
        self._stop = threading.Event()
        self._interval = interval
        self._thread = threading.Thread(target=self._run, name="slipstream-telemetry", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job; never blocks; any thread may call it."""
        self._jobs.append(job)

    def close(self, timeout: float) -> bool:
        """Run waiting jobs and end the thread; ``False`` if that takes over ``timeout`` seconds."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._interval
        while not self._stop.wait(pause):
            for _ in range(_BATCH):
                if not self._next():
                    break
            # Even with more to do, sleep for a moment so that the event loop's thread goes first.
            pause = 0.001 if self._jobs else self._interval
        while self._next():
            pass

    def _next(self) -> bool:
        try:
            job = self._jobs.popleft()
        except IndexError:
            return False
        try:
            job()
        # A failure to observe must neither fail a request nor end this thread.
        except Exception:
            logger.exception("telemetry: a span or a metric could not be written")
        return True
