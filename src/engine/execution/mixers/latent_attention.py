"""Latent attention, over one cached vector per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.engine.devices.transfer import upload
from src.engine.execution.group_attention import AttentionCall, GroupAttention, LayerShape
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers.mixer import LayerMixer
from src.models import Mixer
from src.models.layers.latent_attention import LatentMixerSpec, LatentMixerWeights
from src.ops import latent_attention
from src.ops.attention.latent_expansion import LatentShape, plan_expansion
from src.ops.attention.spec import AttentionSpec
from src.ops.declaration import Backend
from src.ops.runtime.abi import LatentArgs, LatentLayer
from src.ops.runtime.step import StepMixer, constants, layer_spec


class LatentMetadata(NamedTuple):
    """What layers of one shape share in a step: the rows that a GPU expands.

    Attributes
    ----------
    plan
        See `src.ops.attention.latent_expansion`; ``None``: every row is absorbed, or the kernel
        decides.
    keys
        Number of expanded keys.
    own
        What the backend that owns the group has prepared.
    """

    plan: Tensor | None
    keys: int
    own: Any = None


class LatentAttention(LayerMixer[LatentMetadata]):
    """Latent attention of one layer, over one cached vector per token.

    Inputs are query [T, Q, nope + rope] and vectors [T, rank + rope].
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
        self._spec: LatentMixerSpec = mixer.spec
        self._weights: LatentMixerWeights = weights
        (self._cache,) = kv_cache.layers[mixer.layer].values()
        self._pages = None if owner is None else owner.pages((self._cache,))
        self._shape = LatentShape.of(weights.up, self._cache.shape[2], mixer.spec.value_dim)
        # An owner prepares for its group; the plan of rows to expand is of all groups.
        self.shares = (self._shape, None if owner is None else self._group)

    @classmethod
    def layer_shape(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> LayerShape | None:
        """See `LayerMixer`."""
        spec: LatentMixerSpec = mixer.spec
        (cache,) = kv_cache.layers[mixer.layer].values()
        return LayerShape(
            is_latent=True,
            num_heads=spec.num_heads,
            num_kv_heads=1,
            head_dim=weights.up.shape[1] - spec.value_dim + spec.rope_dim,
            value_dim=spec.value_dim,
            block_size=cache.shape[1],
            dtype=spec.dtype,
            cache_dtype=cache.dtype,
            features=frozenset(),
            rotates=False,
            deterministic=spec.deterministic,
        )

    @classmethod
    def lower(cls, mixer: Mixer, weights: Any, kv_cache: KVCache) -> StepMixer | None:
        """See `LayerMixer`."""
        spec: LatentMixerSpec = mixer.spec
        up = weights.up
        (cache,) = kv_cache.layers[mixer.layer].values()
        assert cache.is_contiguous()
        assert up.is_contiguous()
        shape = LatentShape.of(up, cache.shape[2], spec.value_dim)
        scores = layer_spec(AttentionSpec(spec.scale))
        num_blocks, block_size, _ = cache.shape
        args = constants(
            LatentArgs,
            cache=cache.data_ptr(),
            up=up.data_ptr(),
            spec=scores.address,
            heads=spec.num_heads,
            nope=shape.nope,
            rope=shape.rope,
            rank=shape.rank,
            value=shape.value,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        group = kv_cache.layout.group_of[mixer.layer]
        return StepMixer(
            function="latent_attention",
            record=LatentLayer(attention=args.address, group=group),
            holds=(cache, up, scores, args),
            width=spec.num_heads * spec.value_dim,
            group=group,
            block_size=block_size,
        )

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> LatentMetadata:
        """See `LayerMixer`: the rows to expand, for a GPU."""
        if self._owner is not None:
            return LatentMetadata(None, 0, self._owner.prepare(rows, lengths_b))
        device = self._cache.device
        if device.type != "cuda" or lengths_b is None or self._spec.deterministic:
            return LatentMetadata(None, 0)
        queries, keys = lengths_b
        expansion = plan_expansion(queries, keys, self._shape)
        if expansion is None:
            return LatentMetadata(None, 0)
        return LatentMetadata(upload(expansion.plan, torch.int32, device), expansion.keys)

    def view_of(self, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """See `LayerMixer`: [T, Q, value]."""
        return out.view(len(out), self._spec.num_heads, self._spec.value_dim)

    def mix(
        self, inputs: StepInputs, metadata: LatentMetadata, given: Sequence[Tensor], out: Tensor
    ) -> None:
        """See `LayerMixer`."""
        query, latent = given
        self._attend(inputs, metadata, query, latent, out)

    def mix_sampled(
        self, inputs: StepInputs, rows: AttentionRows, given: Sequence[Tensor]
    ) -> Tensor:
        """See `LayerMixer`."""
        (query, latent), kept, spec = given, inputs.sample_index_s, self._spec
        out = query.new_empty(len(query), spec.num_heads, spec.value_dim)
        nobody = inputs.without_rows()
        self._attend(nobody, self.prepare(nobody, None), query, latent, out)
        if len(kept):
            metadata = self.prepare(rows, None)
            self._attend(rows, metadata, query[kept], latent[kept], out[: len(kept)])
        return out[: len(kept)].flatten(1)

    def _attend(
        self,
        rows: AttentionRows,
        metadata: LatentMetadata,
        query: Tensor,
        latent: Tensor,
        out: Tensor,
    ) -> None:
        if self._owner is not None:
            self._owner.attend_latent(
                AttentionCall(
                    query=query,
                    key=latent,
                    value=None,
                    pages=self._pages,
                    rows=rows,
                    metadata=metadata.own,
                    out=out,
                    spec=AttentionSpec(self._spec.scale),
                    up=self._weights.up,
                    deterministic=self._spec.deterministic,
                )
            )
            return
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
            metadata.plan,
            metadata.keys,
            rows.verifies_b,
        )
