"""A short convolution, whose last inputs are kept of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from src.engine.execution.group_attention import GroupAttention
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers.convolution import convolution_constants
from src.engine.execution.mixers.mixer import LayerMixer
from src.models import Mixer
from src.models.layers.short_convolution import (
    ShortConvolutionMixerSpec,
    ShortConvolutionMixerWeights,
)
from src.ops import causal_convolution
from src.ops.declaration import Backend
from src.ops.runtime.step import StepMixer


class ShortConvolution(LayerMixer[None]):
    """The convolution of one layer.

    Input is channels [T, C]; each row's last inputs are in the slot of its number.
    """

    def __init__(
        self,
        mixer: Mixer,
        weights: Any,
        kv_cache: KVCache,
        backend: Backend | None,
        owner: GroupAttention | None = None,
    ) -> None:
        self._weights: ShortConvolutionMixerWeights = weights
        (self._inputs,) = kv_cache.layers[mixer.layer].values()

    @classmethod
    def lower(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepMixer | None:
        """See `LayerMixer`."""
        spec: ShortConvolutionMixerSpec = mixer.spec
        own: ShortConvolutionMixerWeights = weights
        (inputs,) = kv_cache.layers[mixer.layer].values()
        record = convolution_constants(spec, own.weight, own.bias, inputs, silu=False)
        return StepMixer(
            function="short_convolution", record=record, holds=(own, inputs), width=spec.channels
        )

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> None:
        """See `LayerMixer`: the rows are all that it needs."""

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, C]."""
        return out

    def mix(self, inputs: StepInputs, metadata: None, given: Sequence[Tensor], out: Tensor) -> None:
        """See `LayerMixer`."""
        causal_convolution(
            given[0],
            self._weights.weight,
            self._weights.bias,
            self._inputs,
            inputs.rows_b,
            inputs.query_start_loc,
            out,
            silu=False,
        )

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`. Every token is computed; what is kept needs the last of them."""
        out = given[0].new_empty(given[0].shape)
        self.mix(inputs, None, given, out)
        return out[inputs.sample_index_s]
