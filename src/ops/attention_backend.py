"""An engine's own choice of what attends: an object that it owns, and whose handle its calls carry.

There is nothing to choose for a whole process: engines beside each other, with other models and
other settings, each pass the handle of what they have opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from src.ops.attention_spec import FEATURES, AttentionSpec
from src.ops.declaration import Backend, Kernel
from src.ops.paged_attention import PAGED_ATTENTION


class AttentionKernel(NamedTuple):
    """A kernel of paged attention.

    Attributes
        run: Takes the op's arguments, but for `backend`.
        honours: Fields of [`AttentionSpec`][src.ops.attention_spec.AttentionSpec], beside `scale`,
            that it makes something of. It is never given a call that uses others.
    """

    name: str
    run: Callable[..., None]
    honours: frozenset[str] = FEATURES


class AttentionBackend(Backend):
    """Kernels of paged attention, of which the first serves that honours all that a call asks for.

    Parameters
        kernels: In the order of preference. The reference, which honours everything, comes last.
    """

    def __init__(self, *kernels: AttentionKernel) -> None:
        self.kernels = (*kernels, AttentionKernel("reference", PAGED_ATTENTION.reference))
        super().__init__(Kernel(self.kernels[0].name, self._run))

    def kernel_for(self, spec: AttentionSpec) -> AttentionKernel:
        """What serves a layer."""
        features = spec.features
        return next(kernel for kernel in self.kernels if features <= kernel.honours)

    def _run(self, *args: Any) -> None:
        spec = AttentionSpec.of(*args[_SINKS : _SINKS + 2])
        self.kernel_for(spec).run(*args)


_SINKS = [argument.name for argument in PAGED_ATTENTION.overload._schema.arguments].index("sinks")
