"""What a device must offer for its work to be captured and replayed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Captured(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Launch it again, on the same memory: inputs are read, and outputs written, in place."""


class CaptureBackend(Protocol):
    """Captures what one thread launches in its current stream.

    All captures of one backend share a pool of memory: what is replayed may overwrite the outputs
    of every other capture, but for those that were captured in one *series* with it. A series is
    replayed in its order.

    Attributes
    ----------
    asserts
        Whether whoever replays is to prove each time that nothing has moved: in tests.
    """

    asserts: bool

    def begin_series(self) -> None:
        """What is captured from now on hands tensors on from one capture to the next."""

    def begin(self) -> None:
        """Begin a capture: what is launched is recorded, and need not run."""

    def end(self) -> Captured:
        """End it."""

    def abandon(self) -> None:
        """After a fault: end a capture that may have begun, and forget it."""

    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same memory, which the pool may nevertheless give to captures after this one."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""

    def start_over(self) -> None:
        """Every capture is gone: those from now on share a pool of their own."""
