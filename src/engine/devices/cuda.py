"""A CUDA device: a launch only enqueues a step, and another thread waits for its copy-out.

The *waiter thread* blocks on the event behind a step's copy-out. It releases the interpreter lock
meanwhile, so neither the event loop nor the next launch ever waits for the device.
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

# Streams of closed engines, for reuse. For every stream that has multiplied matrices torch keeps
# two cuBLAS workspaces of 32 MiB (Hopper) until the process ends. They cannot be freed while an
# engine's captured steps have their addresses. So successive engines reuse one stream.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class CudaSpan:
    """A step between two events on the steps' stream.

    The first event is recorded just before the step's arithmetic is launched, so that the time in
    which the device waits for the host's inputs does not count as busy.
    """

    def __init__(self, times: StepTimes, waiter: ThreadPoolExecutor) -> None:
        self._times = times
        self._waiter = waiter
        self._started = _recorded_event()
        self._finished: torch.cuda.Event | None = None
        # Keeps the device tensors alive until the copy-out has run.
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
    """See `Device`. Only steps use its stream."""

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
        times.device_start = time.monotonic()  # replaced by the events' time
        return CudaSpan(times, self._waiter)

    def synchronize(self) -> None:
        """See `Device`.

        It does not wait for the whole device: while another engine of this process captures, CUDA
        refuses that, and the capture fails.
        """
        default = torch.cuda.default_stream(self._device)
        for stream in (self._stream, default, torch.cuda.current_stream(self._device)):
            stream.synchronize()

    def failure(self) -> Exception | None:
        """See `Device`. After a fault in a kernel every later CUDA call fails."""
        try:
            if self._is_capturing():
                # Waiting for the stream would make the capture fail; a lost device fails here too.
                torch.cuda.mem_get_info(self._device)
            else:
                self._stream.synchronize()
        except RuntimeError as error:
            return error
        return None

    def _is_capturing(self) -> bool:
        with self.stream():
            return torch.cuda.is_current_stream_capturing()

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
