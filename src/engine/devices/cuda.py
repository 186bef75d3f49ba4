"""A CUDA device: a launch only enqueues, and a thread waits for the copy-out.

The *waiter thread* blocks on the event behind a step's copy-out with the interpreter lock released,
so neither the event loop nor the next launch ever waits for the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from src.core.plan import StepResult, StepTimes
from src.engine.devices.device import Output

# Of engines that were closed. For every stream that has multiplied matrices torch keeps two times
# 32 MiB for cuBLAS (Hopper) to the end of the process; they may not be taken from an engine, since
# its captured steps have their addresses. So engines that follow one another have one stream.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class CudaSpan:
    """Between two events on the steps' stream.

    The first is the last moment before the step's arithmetic is launched, so that a device that
    waits for a slow host to write rows and inputs is not busy meanwhile.
    """

    def __init__(self, times: StepTimes, waiter: ThreadPoolExecutor) -> None:
        self._times = times
        self._waiter = waiter
        self._started = _recorded_event()
        self._finished: torch.cuda.Event | None = None
        # Device memory stays, with the span, until the copy out of it has run.
        self._source: object = None

    def computes(self) -> None:
        """See `StepSpan`."""
        self._started.record()

    def copy_out(self, output: Output) -> Output:
        """See `StepSpan`."""
        on_host = output.to_host()
        self._finished = _recorded_event()
        self._source = output
        return on_host

    def wait(self) -> None:
        """See `StepSpan`."""
        self._end.synchronize()

    @property
    def _end(self) -> torch.cuda.Event:
        assert self._finished is not None, "nothing was copied out"
        return self._finished

    def deliver(
        self, read: Callable[[], StepResult], post: Callable[[StepResult | Exception], None]
    ) -> None:
        """See `StepSpan`."""
        self._waiter.submit(self._deliver, read, post)

    def _deliver(
        self, read: Callable[[], StepResult], post: Callable[[StepResult | Exception], None]
    ) -> None:
        try:
            self.wait()
            times = self._times
            times.device_end = time.monotonic()
            times.device_start = times.device_end - self._started.elapsed_time(self._end) / 1000
            result = read()
        except Exception as error:
            post(error)
        else:
            post(result)


class CudaDevice:
    """See `Device`. Its stream is the steps' alone."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._stream = _idle_streams[device].pop()
        except IndexError:
            self._stream = torch.cuda.Stream(device)
        self._is_closed = False
        self._waiter = ThreadPoolExecutor(1, "slipstream-waiter")

    def stream(self) -> AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._stream)

    def begin(self, times: StepTimes) -> CudaSpan:
        """See `Device`."""
        times.device_start = time.monotonic()  # until the events tell better
        return CudaSpan(times, self._waiter)

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self._device)

    def failure(self) -> Exception | None:
        """See `Device`: after a fault in a kernel every later call fails too."""
        try:
            self.synchronize()
        except RuntimeError as error:
            return error
        return None

    def close(self) -> None:
        """See `Device`."""
        self._waiter.shutdown(wait=True)
        if not self._is_closed:
            self._is_closed = True
            _idle_streams[self._device].append(self._stream)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event
