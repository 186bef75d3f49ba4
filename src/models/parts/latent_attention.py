"""Writes latent attention."""

from __future__ import annotations

from collections.abc import Callable

from src.models.builder import Name
from src.models.config import LatentAttentionConfig
from src.models.layers.latent_attention import (
    LatentInSpec,
    LatentInWeights,
    LatentMixerSpec,
    LatentMixerWeights,
    latent_in,
)
from src.models.parts.attention import ATTENDED, write_attention_out
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.program import POSITIONS
from src.models.weights.parameters import Placement
from src.models.weights.transforms import ByHead, InHalves

QUERY, LATENT = "query", "latent"


def write_latent_attention(
    layer: LayerWriter, config: LatentAttentionConfig, between: Callable[[], None] = lambda: None
) -> None:
    """Write latent attention; see `PartWriter`."""
    writer = _Writer(layer, config)
    writer.write_in()
    between()
    write_attention_out(layer, config, writer.write_mixer())


class _Writer:
    """Writes what is before the output projection."""

    def __init__(self, layer: LayerWriter, config: LatentAttentionConfig) -> None:
        self._layer, self._builder, self._config = layer, layer.builder, config
        self._own, self._stored = layer.own, layer.stored
        self._heads = layer.builder.group.shard(config.num_heads)
        self._query_dim = config.nope_dim + config.rope_dim

    def write_in(self) -> None:
        """Write the segment that projects."""
        builder, config, layer = self._builder, self._config, self._layer
        norm = layer.block_norm("input_norm", layer.config.attention_norm)
        trained = layer.model.max_position_embeddings
        builder.segment(
            latent_in,
            LatentInSpec(
                num_heads=self._heads,
                nope_dim=config.nope_dim,
                rope_dim=config.rope_dim,
                rank=config.rank,
                query_rank=config.query_rank,
                norm=layer.norm_spec(layer.config.attention_norm),
                inner_norm=config.inner_norm,
            ),
            LatentInWeights(
                norm,
                self._down("weight"),
                self._down("bias") if config.down_bias else None,
                *self._query(),
                self._inner_norm("latent_norm", config.rank, config.latent_norm_name),
                builder.rope_table(config.rope, config.rope_dim, trained),
            ),
            (RESIDUAL, POSITIONS),
            (
                builder.step_tensor(QUERY, self._heads, self._query_dim),
                builder.step_tensor(LATENT, config.rank + config.rope_dim),
            ),
        )

    def write_mixer(self) -> int:
        """Write the mixer; returns the size of its output."""
        builder, config = self._builder, self._config
        size = self._heads * config.value_dim
        rows = config.nope_dim + config.value_dim
        up = builder.parameter(
            self._own + "latent_up",
            (self._heads, rows, config.rank),
            "latent",
            (Placement(f"{self._stored}{config.up_name}.weight", shard=0, transform=ByHead(rows)),),
        )
        builder.mixer(
            "latent_attention",
            LatentMixerSpec(
                num_heads=self._heads,
                value_dim=config.value_dim,
                rank=config.rank,
                rope_dim=config.rope_dim,
                dtype=builder.dtype,
                scale=config.scale,
                deterministic=builder.deterministic,
            ),
            LatentMixerWeights(up),
            (QUERY, LATENT),
            builder.step_tensor(ATTENDED, size),
        )
        return size

    def _order(self, head_dim: int) -> InHalves | None:
        """How rows of heads with a rotated part at their end are reordered."""
        rotated = self._config.rope_dim
        if not self._config.interleaved:
            return None
        return InHalves(head_dim, rotated, start=head_dim - rotated)

    def _down(self, kind: str) -> Name:
        """The fused first projection, or its bias."""
        config = self._config
        first = config.query_rank or self._heads * self._query_dim
        last = config.rank + config.rope_dim
        query = Placement(
            f"{self._stored}{config.query_names[0]}.{kind}",
            (slice(0, first),),
            None if config.query_rank else 0,
            None if config.query_rank else self._order(self._query_dim),
        )
        latent = Placement(
            f"{self._stored}{config.down_name}.{kind}",
            (slice(first, first + last),),
            transform=self._order(last),
        )
        is_bias = kind == "bias"
        return self._builder.parameter(
            f"{self._own}latent_down_{kind}",
            (first + last,) if is_bias else (first + last, self._layer.hidden),
            "vector" if is_bias else "matrix",
            (query, latent),
            fill=0.0 if is_bias else None,
        )

    def _query(self) -> tuple[Name, Name]:
        """The norm and the projection of the vector that queries are made of."""
        config = self._config
        if config.query_rank is None:
            return None, None
        placement = Placement(
            f"{self._stored}{config.query_names[1]}.weight",
            shard=0,
            transform=self._order(self._query_dim),
        )
        shape = (self._heads * self._query_dim, config.query_rank)
        return (
            self._inner_norm("query_norm", config.query_rank, config.query_norm_name),
            self._builder.parameter(self._own + "query_weight", shape, "matrix", (placement,)),
        )

    def _inner_norm(self, name: str, size: int, tensor: str) -> Name:
        stored = f"{self._stored}{tensor}.weight"
        return self._builder.vector(
            self._own + name, size, stored, fill=self._config.inner_norm.neutral
        )
