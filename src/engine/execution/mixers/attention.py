"""Attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from src.engine.execution.group_attention import (
    AttentionCall,
    GroupAttention,
    LayerShape,
    Rotation,
)
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers.mixer import LayerMixer
from src.models import Mixer
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.ops import paged_attention, rotate_and_cache, step_schedule
from src.ops.attention.cached_rows import kind_of, row_size
from src.ops.attention.libraries import AttentionShape
from src.ops.declaration import Backend
from src.ops.runtime.abi import AttentionArgs, AttentionLayer
from src.ops.runtime.step import StepMixer, constants, layer_spec


class PagedMetadata(NamedTuple):
    """What layers of one group and shape share in a step.

    Attributes
    ----------
    schedule
        See `src.ops.attention.decode_schedule`; ``None`` on the CPU.
    own
        What the backend that owns the group has prepared.
    """

    schedule: Tensor | None
    own: Any = None


class PagedAttention(LayerMixer[PagedMetadata]):
    """Attention of one layer over paged keys and values.

    Inputs are query [T, Q, D], key and value [T, K, D]. If the program leaves rotation to it
    (`AttentionMixerSpec.rotates`), queries are overwritten.
    """

    def __init__(
        self,
        mixer: Mixer,
        weights: Any,
        kv_cache: KVCache,
        backend: Backend | None,
        owner: GroupAttention | None = None,
    ) -> None:
        self._owner = owner
        # The layer's group, which selects its block tables.
        self._group = kv_cache.layout.group_of[mixer.layer]
        self._backend = backend
        self._attention = mixer.spec.attention(weights)
        self._spec: AttentionMixerSpec = mixer.spec
        self._weights: AttentionMixerWeights = weights
        self._keys, self._values = kv_cache.layers[mixer.layer].values()
        # An owner rotates itself, because it writes the cache.
        self._rotates_first = self._spec.rotates is not None and owner is None
        self._pages = None if owner is None else owner.pages((self._keys, self._values))
        # All that the decode schedule depends on, beside the rows.
        block_size, kv_heads = self._keys.shape[1:3]
        self.shares = (
            self._group,
            self._spec.window,
            self._spec.chunk,
            block_size,
            self._spec.num_heads // kv_heads,
            self._spec.head_dim,
            self._keys.element_size(),
        )

    @classmethod
    def shape_for_libraries(
        cls, mixer: Mixer, weights: Any, block_size: int
    ) -> AttentionShape | None:
        """See `LayerMixer`."""
        spec: AttentionMixerSpec = mixer.spec
        features = spec.attention(weights).features
        return AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=spec.dtype,
            features=features,
        )

    @classmethod
    def layer_shape(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> LayerShape | None:
        """See `LayerMixer`."""
        spec: AttentionMixerSpec = mixer.spec
        keys, _ = kv_cache.layers[mixer.layer].values()
        return LayerShape(
            is_latent=False,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.head_dim,
            block_size=keys.shape[1],
            dtype=spec.dtype,
            cache_dtype=keys.dtype,
            features=spec.attention(weights).features,
            rotates=spec.rotates is not None,
            deterministic=spec.deterministic,
        )

    @classmethod
    def lower(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepMixer | None:
        """See `LayerMixer`; attention that rotates is not supported."""
        spec: AttentionMixerSpec = mixer.spec
        if spec.rotates is not None:
            return None
        keys, values = kv_cache.layers[mixer.layer].values()
        assert keys.is_contiguous()
        assert values.is_contiguous()
        attention = spec.attention(weights)
        scores = layer_spec(attention)
        num_blocks, block_size, num_kv_heads, row = keys.shape
        args = constants(
            AttentionArgs,
            key_cache=keys.data_ptr(),
            value_cache=values.data_ptr(),
            spec=scores.address,
            num_heads=spec.num_heads,
            num_kv_heads=num_kv_heads,
            # A row of codes has a factor behind them.
            head_dim=row - row_size(0, keys.dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            cache_kind=kind_of(keys.dtype),
        )
        group = kv_cache.layout.group_of[mixer.layer]
        return StepMixer(
            function="attention",
            record=AttentionLayer(attention=args.address, group=group),
            holds=(keys, values, attention, scores, args),
            width=spec.num_heads * spec.head_dim,
            group=group,
            block_size=block_size,
        )

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> PagedMetadata:
        """See `LayerMixer`."""
        if self._owner is not None:
            return PagedMetadata(None, self._owner.prepare(rows, lengths_b))
        return PagedMetadata(
            step_schedule(
                self._keys,
                self._spec.num_heads,
                rows.block_tables_b[self._group],
                rows.query_start_loc,
                rows.seq_lens_b,
                self._attention,
            )
        )

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, Q, D]."""
        return out.view(given[0].shape)

    def mix(
        self, inputs: StepInputs, metadata: PagedMetadata, given: Sequence[Tensor], out: Tensor
    ) -> None:
        """See `LayerMixer`."""
        query, key, value = given
        if self._rotates_first:
            self._rotate_and_cache(inputs, query, key, value, out)
            self._attend(inputs, metadata, query, None, None, out)
        else:
            self._attend(inputs, metadata, query, key, value, out, inputs.positions_t)

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`."""
        (query, key, value), kept = given, inputs.sample_index_s
        written: tuple[Tensor | None, Tensor | None] = (None, None)
        out = query.new_empty(query.shape)
        positions = inputs.positions_t
        if self._rotates_first:
            self._rotate_and_cache(inputs, query, key, value, out)
            picked = query[kept]
        else:
            # An owner may rotate in place, and each query only once.
            picked, nobody = query[kept], inputs.without_rows()
            written = (key[kept], value[kept])
            self._attend(nobody, self.prepare(nobody, None), query, key, value, out, positions)
        if len(kept):
            metadata = self.prepare(rows, None)
            self._attend(rows, metadata, picked, *written, out[: len(kept)], positions[kept])
        return out[: len(kept)].flatten(1)

    def _attend(
        self,
        rows: AttentionRows,
        metadata: PagedMetadata,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        out: Tensor,
        positions: Tensor | None = None,
    ) -> None:
        if self._owner is not None:
            self._owner.attend(
                AttentionCall(
                    query=query,
                    key=key,
                    value=value,
                    pages=self._pages,
                    rows=rows,
                    metadata=metadata.own,
                    out=out,
                    spec=self._attention,
                    rotation=self._rotation(positions),
                    deterministic=self._spec.deterministic,
                )
            )
            return
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
            self._spec.deterministic,
            metadata.schedule,
            rows.verifies_b,
            0 if self._backend is None else self._backend.handle,
        )

    def _rotation(self, positions: Tensor | None) -> Rotation | None:
        """What the owner of the group has to do to queries and keys first."""
        spec, weights = self._spec, self._weights
        if spec.rotates is None:
            return None
        assert positions is not None
        assert weights.rope_table is not None
        return Rotation(
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=spec.rotates.eps,
            table=weights.rope_table,
            positions=positions,
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
