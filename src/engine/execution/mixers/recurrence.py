"""A convolution and a recurrent state, which are kept of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from src.engine.execution.group_attention import GroupAttention
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers.convolution import convolution_constants
from src.engine.execution.mixers.mixer import LayerMixer
from src.models import Mixer
from src.models.layers.recurrence import RecurrenceMixerSpec, RecurrenceMixerWeights
from src.ops import causal_convolution, linear_recurrence
from src.ops.declaration import Backend
from src.ops.runtime.abi import RecurrenceArgs, RecurrenceLayer
from src.ops.runtime.calls import address_of
from src.ops.runtime.step import StepMixer, constants


class Recurrence(LayerMixer[None]):
    """The convolution and the recurrent state of one layer.

    Inputs are channels [T, C], decay and factor [T, H]; each row's states are in the slot of its
    number.
    """

    def __init__(
        self,
        mixer: Mixer,
        weights: Any,
        kv_cache: KVCache,
        backend: Backend | None,
        owner: GroupAttention | None = None,
    ) -> None:
        self._spec: RecurrenceMixerSpec = mixer.spec
        self._weights: RecurrenceMixerWeights = weights
        self._inputs, self._states = kv_cache.layers[mixer.layer].values()

    @classmethod
    def lower(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepMixer | None:
        """See `LayerMixer`."""
        spec: RecurrenceMixerSpec = mixer.spec
        own: RecurrenceMixerWeights = weights
        inputs, states = kv_cache.layers[mixer.layer].values()
        assert own.skip is None or own.skip.is_contiguous()
        convolution = convolution_constants(spec, own.weight, own.bias, inputs, silu=True)
        recurrence = constants(
            RecurrenceArgs,
            skip=address_of(own.skip),
            states=states.data_ptr(),
            state_stride=states.stride(0),
            key_heads=spec.key_heads,
            heads=spec.heads,
            key_dim=spec.key_dim,
            dim=spec.dim,
            num_slots=len(states),
            delta=spec.delta,
            normalizes=spec.normalizes,
        )
        query, key, value = spec.parts(torch.arange(spec.channels)[None])
        record = RecurrenceLayer(
            convolution=convolution.address,
            recurrence=recurrence.address,
            query=int(query[0, 0, 0]),
            key=int(key[0, 0, 0]),
            value=int(value[0, 0, 0]),
        )
        return StepMixer(
            function="recurrence",
            record=record,
            holds=(own, inputs, states, convolution, recurrence),
            width=spec.heads * spec.dim,
        )

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> None:
        """See `LayerMixer`: the rows are all that it needs."""

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, H, P]."""
        return out.view(len(out), self._spec.heads, self._spec.dim)

    def mix(self, inputs: StepInputs, metadata: None, given: Sequence[Tensor], out: Tensor) -> None:
        """See `LayerMixer`."""
        (channels, decay, factor), weights = given, self._weights
        rows = (inputs.rows_b, inputs.query_start_loc)
        convolved = channels.new_empty(channels.shape)
        causal_convolution(channels, weights.weight, weights.bias, self._inputs, *rows, convolved)
        linear_recurrence(
            *self._spec.parts(convolved),
            decay,
            factor,
            weights.skip,
            self._states,
            *rows,
            out,
            delta=self._spec.delta,
            normalizes=self._spec.normalizes,
        )

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`. Every token is computed, since the states need all of them."""
        channels = given[0]
        out = channels.new_empty(len(channels), self._spec.heads, self._spec.dim)
        self.mix(inputs, None, given, out)
        return out[inputs.sample_index_s].flatten(1)
