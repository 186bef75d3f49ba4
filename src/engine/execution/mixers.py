"""Computes the mixers of a program: one class per kind, one object per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.models import Mixer
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.ops import paged_attention, rotate_and_cache, step_schedule
from src.ops.declaration import Backend


class LayerMixer(Protocol):
    """The mixer of one layer, with its KV memory."""

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """View the output buffer [T, *writes.shape] in the shape that `mix` takes.

        Separate from `mix`, so that the replay of a captured step need not make the view again.
        """

    def mix(self, inputs: StepInputs, given: Sequence[Tensor], out: Tensor) -> None:
        """Write the KV of a step's tokens, and compute the output into ``out``, see `view_of`."""

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """The output [S, ...] of the sampled tokens only.

        The KV of every token is written, because later steps read it.
        """


class PagedAttention:
    """Attention of one layer over paged keys and values.

    Inputs are query [T, Q, D], key and value [T, K, D]. If the program leaves rotation to it
    (`AttentionMixerSpec.rotates`), queries are overwritten.
    """

    def __init__(
        self, mixer: Mixer, weights: Any, kv_cache: KVCache, backend: Backend | None
    ) -> None:
        self._backend = backend
        self._attention = mixer.spec.attention(weights)
        self._spec: AttentionMixerSpec = mixer.spec
        self._weights: AttentionMixerWeights = weights
        self._keys = kv_cache.keys[mixer.layer]
        self._values = kv_cache.values[mixer.layer]
        # The layer's group, which selects its block tables.
        self._group = kv_cache.layout.group_of[mixer.layer]

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
        """The decode schedule of this group; the step's first layer of the group computes it."""
        group = self._group
        if group not in rows.decode_schedules:
            rows.decode_schedules[group] = step_schedule(
                self._keys,
                self._spec.num_heads,
                rows.block_tables_b[group],
                rows.query_start_loc,
                rows.seq_lens_b,
                self._attention,
            )
        return rows.decode_schedules[group]


# Kind of mixer -> its class, called with the mixer, its weights, KV memory and attention backend.
MIXERS: Mapping[str, Callable[[Mixer, Any, KVCache, Backend | None], LayerMixer]] = {
    "attention": PagedAttention
}
