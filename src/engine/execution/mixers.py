"""Computes the mixers of a program: one class per kind, one object per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from src.engine.devices.transfer import upload
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.models import Mixer
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.layers.latent_attention import LatentMixerSpec, LatentMixerWeights
from src.models.layers.recurrence import RecurrenceMixerSpec, RecurrenceMixerWeights
from src.ops import (
    causal_convolution,
    latent_attention,
    linear_recurrence,
    paged_attention,
    rotate_and_cache,
    step_schedule,
)
from src.ops.attention_libraries import AttentionShape
from src.ops.attention_spec import AttentionSpec
from src.ops.cpu.step import StepAttention
from src.ops.declaration import Backend
from src.ops.latent_expansion import LatentShape, plan_expansion


class LayerMixer:
    """The mixer of one layer, with its KV memory. Each kind is a subclass."""

    def __init__(
        self, mixer: Mixer, weights: Any, kv_cache: KVCache, backend: Backend | None
    ) -> None:
        # The layer's group, which selects its block tables.
        self._group = kv_cache.layout.group_of[mixer.layer]

    @classmethod
    def shape_for_libraries(
        cls, mixer: Mixer, weights: Any, block_size: int
    ) -> AttentionShape | None:
        """What an attention library has to support; None if libraries do not serve this kind."""
        return None

    @classmethod
    def step_attention(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepAttention | None:
        """Its entry in the CPU's one-call step; None if that step does not support it."""
        return None

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """View the output buffer [T, *writes.shape] in the shape that `mix` takes.

        Separate from `mix`, so that the replay of a captured step need not make the view again.
        """
        raise NotImplementedError

    def mix(self, inputs: StepInputs, given: Sequence[Tensor], out: Tensor) -> None:
        """Write the KV of a step's tokens, and compute the output into ``out``, see `view_of`."""
        raise NotImplementedError

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """The output [S, ...] of the sampled tokens only.

        The KV of every token is written, because later steps read it.
        """
        raise NotImplementedError


class PagedAttention(LayerMixer):
    """Attention of one layer over paged keys and values.

    Inputs are query [T, Q, D], key and value [T, K, D]. If the program leaves rotation to it
    (`AttentionMixerSpec.rotates`), queries are overwritten.
    """

    def __init__(
        self, mixer: Mixer, weights: Any, kv_cache: KVCache, backend: Backend | None
    ) -> None:
        super().__init__(mixer, weights, kv_cache, backend)
        self._backend = backend
        self._attention = mixer.spec.attention(weights)
        self._spec: AttentionMixerSpec = mixer.spec
        self._weights: AttentionMixerWeights = weights
        self._keys, self._values = kv_cache.layers[mixer.layer].values()
        # All that the decode schedule depends on, beside the rows.
        block_size, kv_heads = self._keys.shape[1:3]
        self._scheduled_as = (
            *(self._group, self._spec.window, self._spec.chunk, block_size),
            *(self._spec.num_heads // kv_heads, self._spec.head_dim, self._keys.element_size()),
        )

    @classmethod
    def shape_for_libraries(
        cls, mixer: Mixer, weights: Any, block_size: int
    ) -> AttentionShape | None:
        """See `LayerMixer`."""
        spec: AttentionMixerSpec = mixer.spec
        features = spec.attention(weights).features
        return AttentionShape(
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.dtype, features)
        )

    @classmethod
    def step_attention(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepAttention | None:
        """See `LayerMixer`; attention that rotates is not supported."""
        spec: AttentionMixerSpec = mixer.spec
        if spec.rotates is not None:
            return None
        keys, values = kv_cache.layers[mixer.layer].values()
        group = kv_cache.layout.group_of[mixer.layer]
        return StepAttention(keys, values, spec.attention(weights), spec.num_heads, group)

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, Q, D]."""
        return out.view(given[0].shape)

    def mix(self, inputs: StepInputs, given: Sequence[Tensor], out: Tensor) -> None:
        """See `LayerMixer`."""
        query, key, value = given
        if self._spec.rotates is not None:
            self._rotate_and_cache(inputs, query, key, value, out)
            self._attend(inputs, query, None, None, out)
        else:
            self._attend(inputs, query, key, value, out)

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`."""
        (query, key, value), kept = given, inputs.sample_index_s
        written: tuple[Tensor | None, Tensor | None] = (None, None)
        out = query.new_empty(query.shape)
        if self._spec.rotates is not None:
            self._rotate_and_cache(inputs, query, key, value, out)
        else:
            self._attend(inputs.without_rows(), query, key, value, out)
            written = (key[kept], value[kept])
        if len(kept):
            self._attend(rows, query[kept], *written, out[: len(kept)])
        return out[: len(kept)].flatten(1)

    def _attend(
        self,
        rows: AttentionRows,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        out: Tensor,
    ) -> None:
        spec = self._spec
        paged_attention(
            query,
            key,
            value,
            self._keys,
            self._values,
            rows.block_tables_b[self._group],
            rows.query_start_loc,
            rows.seq_lens_b,
            rows.slot_mappings_t[self._group],
            out,
            self._attention,
            rows.max_query_len,
            rows.max_seq_len,
            spec.deterministic,
            self._schedule(rows),
            0 if self._backend is None else self._backend.handle,
        )

    def _rotate_and_cache(
        self, inputs: StepInputs, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        spec, weights = self._spec, self._weights
        assert spec.rotates is not None
        assert weights.rope_table is not None
        rotate_and_cache(
            query,
            key,
            value,
            weights.q_norm,
            weights.k_norm,
            spec.rotates.eps,
            weights.rope_table,
            inputs.positions_t,
            inputs.slot_mappings_t[self._group],
            self._keys,
            self._values,
            out,
        )

    def _schedule(self, rows: AttentionRows) -> Tensor | None:
        """The decode schedule; the step's first layer of this group and shape computes it."""
        group, known = self._group, rows.decode_schedules
        if self._scheduled_as not in known:
            known[self._scheduled_as] = step_schedule(
                self._keys,
                self._spec.num_heads,
                rows.block_tables_b[group],
                rows.query_start_loc,
                rows.seq_lens_b,
                self._attention,
            )
        return known[self._scheduled_as]


class Recurrence(LayerMixer):
    """The convolution and the recurrent state of one layer.

    Inputs are channels [T, C], decay and factor [T, H]; each row's states are in the slot of its
    number.
    """

    def __init__(
        self, mixer: Mixer, weights: Any, kv_cache: KVCache, backend: Backend | None
    ) -> None:
        self._spec: RecurrenceMixerSpec = mixer.spec
        self._weights: RecurrenceMixerWeights = weights
        self._inputs, self._states = kv_cache.layers[mixer.layer].values()

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, H, P]."""
        return out.view(len(out), self._spec.heads, self._spec.dim)

    def mix(self, inputs: StepInputs, given: Sequence[Tensor], out: Tensor) -> None:
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
        self.mix(inputs, given, out)
        return out[inputs.sample_index_s].flatten(1)


class LatentAttention(LayerMixer):
    """Latent attention of one layer, over one cached vector per token.

    Inputs are query [T, Q, nope + rope] and vectors [T, rank + rope].
    """

    def __init__(
        self, mixer: Mixer, weights: Any, kv_cache: KVCache, backend: Backend | None
    ) -> None:
        super().__init__(mixer, weights, kv_cache, backend)
        self._spec: LatentMixerSpec = mixer.spec
        self._weights: LatentMixerWeights = weights
        (self._cache,) = kv_cache.layers[mixer.layer].values()
        self._shape = LatentShape.of(weights.up, self._cache.shape[2], mixer.spec.value_dim)

    @classmethod
    def step_attention(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepAttention | None:
        """See `LayerMixer`."""
        spec: LatentMixerSpec = mixer.spec
        (cache,) = kv_cache.layers[mixer.layer].values()
        group = kv_cache.layout.group_of[mixer.layer]
        attention = AttentionSpec(spec.scale)
        return StepAttention(
            *(cache, None, attention, spec.num_heads, group, weights.up, spec.value_dim)
        )

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, Q, value]."""
        return out.view(len(out), self._spec.num_heads, self._spec.value_dim)

    def mix(self, inputs: StepInputs, given: Sequence[Tensor], out: Tensor) -> None:
        """See `LayerMixer`."""
        query, latent = given
        self._attend(inputs, query, latent, out)

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`."""
        (query, latent), kept, spec = given, inputs.sample_index_s, self._spec
        out = query.new_empty(len(query), spec.num_heads, spec.value_dim)
        self._attend(inputs.without_rows(), query, latent, out)
        if len(kept):
            self._attend(rows, query[kept], latent[kept], out[: len(kept)])
        return out[: len(kept)].flatten(1)

    def _attend(self, rows: AttentionRows, query: Tensor, latent: Tensor, out: Tensor) -> None:
        expansion, expanded_keys = self._expansion(rows)
        latent_attention(
            query,
            latent,
            self._cache,
            self._weights.up,
            rows.block_tables_b[self._group],
            rows.query_start_loc,
            rows.seq_lens_b,
            rows.slot_mappings_t[self._group],
            out,
            self._spec.scale,
            rows.max_query_len,
            rows.max_seq_len,
            self._spec.deterministic,
            expansion,
            expanded_keys,
        )

    def _expansion(self, rows: AttentionRows) -> tuple[Tensor | None, int]:
        """The rows to expand, for a GPU; the step's first layer of this shape plans them."""
        device = self._cache.device
        if device.type != "cuda" or rows.lengths_b is None or self._spec.deterministic:
            return None, 0
        if self._shape not in rows.expansions:
            queries, keys = rows.lengths_b
            plan = plan_expansion(queries, keys, self._shape)
            rows.expansions[self._shape] = (
                (None, 0) if plan is None else (upload(plan.plan, torch.int32, device), plan.keys)
            )
        return rows.expansions[self._shape]


# Kind of mixer -> its class.
MIXERS: Mapping[str, type[LayerMixer]] = {
    "attention": PagedAttention,
    "latent_attention": LatentAttention,
    "recurrence": Recurrence,
}
