"""What the worker asks of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeVar

from src.core.plan import StepResult, StepTimes


class HostCopyable(Protocol):
    """Results on the device."""

    def to_host(self) -> Self:
        """Begin the copy to host memory, without waiting for it."""


Output = TypeVar("Output", bound=HostCopyable)


class StepSpan(Protocol):
    """One step between its begin and its delivery; made by `Device.begin`."""

    def computes(self) -> None:
        """What is launched from now on is the step's arithmetic: its inputs have been enqueued."""

    def copy_out(self, output: Output) -> Output:
        """End the step with the copy of its results to the host; returns where they will be.

        Nothing may be read there before :meth:`wait`, or in another function than ``read`` of
        :meth:`deliver`.
        """

    def wait(self) -> None:
        """Wait, in any thread, until the results are on the host."""

    def deliver(
        self, read: Callable[[], StepResult], post: Callable[[StepResult | Exception], None]
    ) -> None:
        """Once the results are on the host: fill in the step's times, and post what ``read`` gives.

        What goes wrong after this has returned is posted; what goes wrong before is raised.
        """


class Device(Protocol):
    """Where steps are computed. One thread launches steps; they end in the order of their launch.

    Attributes
    ----------
    is_host
        Whether the launching thread itself computes.
    """

    is_host: bool

    def stream(self) -> AbstractContextManager[object]:
        """What steps are launched in."""

    def begin(self, times: StepTimes) -> StepSpan:
        """Begin a step, whose ``times`` the device will fill in."""

    def synchronize(self) -> None:
        """Wait until everything that was launched, in any stream, has run."""

    def failure(self) -> Exception | None:
        """Why the device cannot be used any more, or ``None`` if it can."""

    def close(self) -> None:
        """Deliver what is left; nothing is launched any more. Blocks; may be called twice."""
