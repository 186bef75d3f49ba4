"""The interface that a device must offer for capture and replay."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Captured(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch it again with the same addresses: it reads inputs and writes outputs in place."""


class CaptureBackend(Protocol):
    """Captures what one thread launches in its current stream.

    All captures of one backend share a memory pool. A replay may overwrite the outputs of every
    other capture, except those captured in the same *series*. A series must be replayed in its
    order.

    Attributes
    ----------
    asserts
        Whether every replay must verify that no address has changed; for tests.
    """

    asserts: bool

    def begin_series(self) -> None:
        """Start a series: later captures may read tensors that earlier ones wrote."""

    def begin(self) -> None:
        """Begin a capture: launches are recorded, and need not run."""

    def end(self) -> Captured:
        """End the capture."""

    def abandon(self) -> None:
        """After an error: end and discard a capture, if one has begun."""

    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same memory without a reference, so the pool may reuse it for later captures."""

    def free_bytes(self) -> int:
        """Free memory of the device in bytes."""

    def release(self) -> None:
        """Return unused memory to the device."""

    def start_over(self) -> None:
        """Use a new pool for later captures; all earlier captures must be gone."""
