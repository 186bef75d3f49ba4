"""Forward progress: whether pending work gets done, and what hangs if it does not.

A process that answers requests may still hang: a kernel that never ends leaves every endpoint
alive. So the engine is judged by its steps. While there is work, steps must complete; otherwise
`/health` says which part of a step is being waited for. The event loop is watched
from outside, by a thread: a loop that hangs cannot say so itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

from src.core.plan import StepTimes
from src.core.status import Stall
from src.observability.logs import log_lines

logger = logging.getLogger(__name__)

# The first steps may wait for compilers of kernels, so they get this many times the patience.
FIRST_STEPS: Final = 8
FIRST_PATIENCE: Final = 5.0

# Seconds without a turn after which the event loop is reported to hang.
LOOP_PATIENCE: Final = 10.0
BEAT_INTERVAL: Final = 0.25
# Seconds between two reports of the same kind.
REPORT_INTERVAL: Final = 60.0


class Progress:
    """Tracks pending work and the last completed step. The loop's observer writes it.

    Any thread may read it.

    Parameters
    ----------
    patience
        Seconds without a completed step after which pending work is stalled; 0: never.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._in_flight: deque[StepTimes] = deque()
        self._unfinished = 0
        self._num_steps = 0
        # When the last step completed, or when work arrived after an idle time.
        self._since = 0.0

    def submitted(self, now: float) -> None:
        """A completion was queued."""
        if not self._unfinished and not self._in_flight:
            self._since = now
        self._unfinished += 1

    def ended(self) -> None:
        """A completion ended."""
        self._unfinished -= 1

    def launched(self, times: StepTimes) -> None:
        """A step was put on the device's queue."""
        self._in_flight.append(times)

    def committed(self, now: float) -> None:
        """The oldest launched step completed."""
        self._in_flight.popleft()
        self._num_steps += 1
        self._since = now

    def stopped(self) -> None:
        """The loop has ended, so no work is pending."""
        self._in_flight.clear()
        self._unfinished = 0

    def waited(self, now: float) -> float:
        """Seconds that work has been pending since the last completed step; 0 without work."""
        return max(0.0, now - self._since) if self._unfinished or self._in_flight else 0.0

    def stall(self, now: float) -> Stall | None:
        """The stall, if work has been pending for longer than the patience."""
        waited = self.waited(now)
        bound = self._patience * (FIRST_PATIENCE if self._num_steps < FIRST_STEPS else 1.0)
        if not bound or waited <= bound:
            return None
        return Stall(self._phase(), waited)

    def _phase(self) -> str:
        try:
            oldest = self._in_flight[0]
        except IndexError:
            return "planning"
        if oldest.arrived:
            return "committing"
        if oldest.device_end:
            return "returning"
        return "device" if oldest.device_start else "launching"


class Heartbeat:
    """A timer of the event loop that measures how late it is called.

    Parameters
    ----------
    on_lag
        Called with the seconds, on the event loop.
    """

    def __init__(self, on_lag: Callable[[float], None], interval: float = BEAT_INTERVAL) -> None:
        self._on_lag = on_lag
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        # When the loop turned last, in seconds of ``time.monotonic``.
        self.last = time.monotonic()

    def start(self) -> None:
        """Beat in the running event loop until `stop`."""
        self.last = time.monotonic()
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._interval
        self._timer = loop.call_at(self._due, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.last = time.monotonic()
        self._on_lag(max(0.0, loop.time() - self._due))
        self._schedule(loop)


class Watchdog:
    """A thread that logs a hanging step or event loop, with the loop's stack.

    Parameters
    ----------
    patience
        Seconds without a completed step. Also an upper bound for those without a turn of the loop.
    """

    def __init__(self, progress: Progress, heartbeat: Heartbeat, patience: float) -> None:
        self._progress = progress
        self._heartbeat = heartbeat
        self._loop_patience = min(LOOP_PATIENCE, patience)
        self._interval = min(1.0, self._loop_patience / 4)
        self._loop_thread = 0
        self._stopped = threading.Event()
        # Kind of report -> when the next one may be written.
        self._next_report = {"loop": 0.0, "step": 0.0}

    def start(self) -> None:
        """Watch the event loop of the calling thread until `stop`."""
        self._loop_thread = threading.get_ident()
        # A daemon, so that it keeps watching a process that hangs while it exits.
        threading.Thread(target=self._run, name="slipstream-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. The thread ends soon after."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        silent = now - self._heartbeat.last
        if silent > self._loop_patience:
            self._report(now, "loop", f"the event loop has not turned for {silent:.1f} s, it is in")
            return
        stall = self._progress.stall(now)
        if stall is not None:
            self._report(
                now,
                "step",
                f"no step has completed for {stall.seconds:.1f} s, what hangs is {stall.phase}; "
                "the event loop is in",
            )

    def _report(self, now: float, kind: str, what: str) -> None:
        if now < self._next_report[kind]:
            return
        self._next_report[kind] = now + REPORT_INTERVAL
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "no frame\n"
        log_lines(logger, logging.ERROR, what, stack.rstrip())
