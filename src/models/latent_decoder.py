"""Writes latent attention into a decoder's program; see `decoder.write_decoder`."""

from __future__ import annotations

from src.models.builder import Name, ProgramBuilder
from src.models.config import LatentAttentionConfig
from src.models.layers.latent_attention import (
    LatentInSpec,
    LatentInWeights,
    LatentMixerSpec,
    LatentMixerWeights,
    latent_in,
)
from src.models.layers.norms import NormSpec
from src.models.program import POSITIONS, StepTensor
from src.models.weights.parameters import Placement
from src.models.weights.transforms import ByHead, InHalves

QUERY, LATENT = "query", "latent"


class LatentWriter:
    """Writes what is before the output projection.

    Parameters
    ----------
    own, stored
        What names of the layer's parameters, and of its tensors in the checkpoint, begin with.
    hidden
        Size of the residual stream.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        config: LatentAttentionConfig,
        own: str,
        stored: str,
        hidden: int,
    ) -> None:
        self._builder, self._config = builder, config
        self._own, self._stored = own, stored
        self._hidden = hidden
        self._heads = builder.group.shard(config.num_heads)
        self._query_dim = config.nope_dim + config.rope_dim

    def write_in(
        self, residual: str, norm: Name, norm_spec: NormSpec | None, trained_positions: int
    ) -> None:
        """Write the segment that projects; ``norm`` is the parameter of its input's norm."""
        builder, config = self._builder, self._config
        builder.segment(
            latent_in,
            LatentInSpec(
                self._heads,
                config.nope_dim,
                config.rope_dim,
                config.rank,
                config.query_rank,
                norm_spec,
                config.inner_norm,
            ),
            LatentInWeights(
                norm,
                self._down("weight"),
                self._down("bias") if config.down_bias else None,
                *self._query(),
                self._inner_norm("latent_norm", config.rank, config.latent_norm_name),
                builder.rope_table(config.rope, config.rope_dim, trained_positions),
            ),
            (residual, POSITIONS),
            (
                builder.step_tensor(QUERY, self._heads, self._query_dim),
                builder.step_tensor(LATENT, config.rank + config.rope_dim),
            ),
        )

    def write_mixer(self, writes: str) -> int:
        """Write the mixer; returns the size of its output, the step tensor ``writes``."""
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
                self._heads,
                config.value_dim,
                config.rank,
                config.rope_dim,
                builder.dtype,
                config.scale,
                builder.deterministic,
            ),
            LatentMixerWeights(up),
            (QUERY, LATENT),
            StepTensor(writes, (size,), builder.dtype),
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
            (first + last,) if is_bias else (first + last, self._hidden),
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
