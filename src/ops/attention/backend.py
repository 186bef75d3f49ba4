"""An engine's own choice of attention kernels; the engine's calls carry its handle.

There is no process-wide choice: engines in one process, with different models and settings, each
pass the handle of the backend that they opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from src.ops.attention.call import PagedAttention
from src.ops.attention.paged_attention import PAGED_ATTENTION
from src.ops.attention.spec import FEATURES
from src.ops.declaration import Backend, Kernel


class AttentionKernel(NamedTuple):
    """A kernel of paged attention.

    Attributes
    ----------
    run
        Takes the op's flat arguments, as a `Kernel` does.
    honours
        Fields of `AttentionSpec`, beside `scale`, that it supports. It is never given a call that
        uses others.
    """

    name: str
    run: Callable[..., None]
    honours: frozenset[str] = FEATURES


class AttentionBackend(Backend):
    """Kernels of paged attention; the first that supports all features of a call serves it.

    Parameters
    ----------
    kernels
        In order of preference. The reference, which supports everything, comes last.
    """

    def __init__(self, *kernels: AttentionKernel) -> None:
        self.kernels = (*kernels, AttentionKernel("reference", PAGED_ATTENTION.reference))
        first = self.kernels[0]
        # A spec is made of a call's numbers only where it decides something.
        run = first.run if first.honours >= FEATURES else self._run
        super().__init__(Kernel(first.name, run))

    def kernel_for(self, features: frozenset[str]) -> AttentionKernel:
        """The kernel that serves a layer whose spec has these features."""
        return next(kernel for kernel in self.kernels if features <= kernel.honours)

    def _run(self, *args: Any) -> None:
        call = PagedAttention.of_flat(*args)
        self.kernel_for(call.spec.features).run(*args)
