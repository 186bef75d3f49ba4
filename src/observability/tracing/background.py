"""One thread that builds what the event loop hands over, so that no step waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

# Jobs that may wait. What comes on top is dropped, oldest first: a request is never made to wait.
MAX_JOBS: Final = 4096
# Seconds between two looks. The thread is not woken per job: a wake-up costs the event loop more
# than the job's hand-over does.
INTERVAL: Final = 0.1
# Jobs between which others get the interpreter.
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
        """Run it soon; never blocks, from any thread."""
        self._jobs.append(job)

    def close(self, timeout: float) -> bool:
        """Run what waits and end the thread; ``False`` when ``timeout`` seconds were too short."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._interval
        while not self._stop.wait(pause):
            for _ in range(_BATCH):
                if not self._next():
                    break
            # With more to do it sleeps for a moment only: the loop's thread goes first.
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
        # What observes must not fail those who are observed, nor end this thread.
        except Exception:
            logger.exception("telemetry: a span or a metric could not be written")
        return True
