"""What every kind of mixer is to the engine: the base class of `attention` and its neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from src.engine.execution.group_attention import GroupAttention, LayerShape
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.models import Mixer
from src.ops.attention.libraries import AttentionShape
from src.ops.declaration import Backend
from src.ops.runtime.step import StepMixer

Metadata = TypeVar("Metadata")


class LayerMixer(Generic[Metadata]):
    """The mixer of one layer, with its memory. Each kind is a subclass, in a file of its own.

    ``Metadata`` is what the kind prepares of a step's rows before the layers run.

    Attributes
    ----------
    is_captured
        Whether its kernels can be captured in a graph.
    shares
        Layers that are equal in this, and of one kind, share their metadata.
    """

    is_captured: ClassVar[bool] = True
    shares: Hashable = None

    def __init__(
        self,
        mixer: Mixer,
        weights: Any,
        kv_cache: KVCache,
        backend: Backend | None,
        owner: GroupAttention | None = None,
    ) -> None:
        """Build the mixer of a layer.

        Parameters
        ----------
        backend
            Kernels of the ops, see `ForwardPass`.
        owner
            What computes attention of the layer's group in place of the ops.
        """
        raise NotImplementedError

    @classmethod
    def layer_shape(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> LayerShape | None:
        """What the layer asks of attention; None if it is no attention."""
        return None

    @classmethod
    def shape_for_libraries(
        cls, mixer: Mixer, weights: Any, block_size: int
    ) -> AttentionShape | None:
        """What an attention library has to support; None if libraries do not serve this kind."""
        return None

    @classmethod
    def lower(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepMixer | None:
        """Its instruction in the CPU's one-call step; None if that step does not support it.

        The weights and the cache's memory must stay where they are as long as it is used.
        """
        return None

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> Metadata:
        """What the layers that share it need of these rows, beside the rows.

        Parameters
        ----------
        lengths_b
            See `StepInputs`.
        """
        raise NotImplementedError

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """View the output buffer [T, *writes.shape] in the shape that `mix` takes.

        Separate from `mix`, so that the replay of a captured step need not make the view again.
        """
        raise NotImplementedError

    def mix(
        self, inputs: StepInputs, metadata: Metadata, given: Sequence[Tensor], out: Tensor
    ) -> None:
        """Write the KV of a step's tokens, and compute the output into ``out``, see `view_of`."""
        raise NotImplementedError

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """The output [S, ...] of the sampled tokens only, which are ``rows`` of one token each.

        The KV of every token is written, because later steps read it.
        """
        raise NotImplementedError
