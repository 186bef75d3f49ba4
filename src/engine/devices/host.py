"""The host as the device: the thread that launches a step also computes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from src.core.plan import StepResult, StepTimes
from src.engine.devices.device import Output


class HostSpan:
    """A step on the host. Its results need no copy."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        times.device_start = time.monotonic()

    def computes(self) -> None:
        """See `StepSpan`: the host computes from the beginning."""

    def copy_out(self, output: Output) -> Output:
        """See `StepSpan`."""
        return output

    def wait(self) -> None:
        """See `StepSpan`."""

    def deliver(
        self, read: Callable[[], StepResult], post: Callable[[StepResult | Exception], None]
    ) -> None:
        """See `StepSpan`."""
        result = read()
        self._times.device_end = time.monotonic()
        post(result)


class HostDevice:
    """See `Device`."""

    is_host = True

    def stream(self) -> AbstractContextManager[object]:
        """See `Device`."""
        return nullcontext()

    def begin(self, times: StepTimes) -> HostSpan:
        """See `Device`."""
        return HostSpan(times)

    def synchronize(self) -> None:
        """See `Device`."""

    def failure(self) -> Exception | None:
        """See `Device`."""
        return None

    def close(self) -> None:
        """See `Device`."""
