"""The protocol between the worker and a device."""

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
    """One step from its begin to its delivery; made by `Device.begin`."""

    def computes(self) -> None:
        """Say that the step's inputs have been enqueued and its arithmetic is launched next."""

    def copy_out(self, output: Output) -> Output:
        """End the step by copying its results to the host; returns the host tensors.

        They may be read only after `wait`, or in ``read`` of `deliver`.
        """

    def wait(self) -> None:
        """Wait, in any thread, until the results are on the host."""

    def deliver(
        self, read: Callable[[], StepResult], post: Callable[[StepResult | Exception], None]
    ) -> None:
        """Once the results are on the host, fill in the step's times and post ``read()``.

        Errors before this returns are raised; later errors are posted.
        """


class Device(Protocol):
    """A device that computes steps. One thread launches steps; they end in launch order.

    Attributes
    ----------
    is_host
        Whether the launching thread itself computes the steps.
    """

    is_host: bool

    def stream(self) -> AbstractContextManager[object]:
        """The context in which steps are launched."""

    def begin(self, times: StepTimes) -> StepSpan:
        """Begin a step, whose ``times`` the device will fill in."""

    def synchronize(self) -> None:
        """Wait until everything has run that was launched for steps, or outside of them.

        Call it outside of captures; those of other engines in the process may go on.
        """

    def failure(self) -> Exception | None:
        """Why the device cannot be used any more, or ``None`` if it can."""

    def close(self) -> None:
        """Deliver the remaining steps and stop. Blocks; may be called twice."""
