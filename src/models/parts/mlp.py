"""Writes a gated MLP."""

from __future__ import annotations

from collections.abc import Callable

from src.models.builder import Name
from src.models.config import MLPConfig
from src.models.layers.mlp import MLPSpec, MLPWeights, mlp
from src.models.layers.norms import NormSpec
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.weights.parameters import Placement, rows_of


def write_mlp(
    layer: LayerWriter, config: MLPConfig, between: Callable[[], None] = lambda: None
) -> None:
    """Write an MLP; see `PartWriter`."""
    post_norm = layer.config.mlp_post_norm
    layer.builder.segment(
        mlp,
        mlp_spec(layer, config, mlp_norm_spec(layer), layer.norm_spec(post_norm)),
        mlp_weights(
            layer, config, "", mlp_norm(layer), layer.block_norm("mlp_post_norm", post_norm)
        ),
        (RESIDUAL,),
        (layer.residual,),
    )
    between()


def mlp_norm_spec(layer: LayerWriter) -> NormSpec | None:
    """The norm of what an MLP or experts read."""
    config = layer.config
    return layer.norm_spec(config.attention_norm if config.parallel else config.mlp_norm)


def mlp_norm(layer: LayerWriter) -> Name:
    """The weight of that norm; a parallel layer has one norm, which attention declares."""
    if layer.config.parallel:
        return None if layer.config.attention_norm is None else f"{layer.own}input_norm"
    return layer.block_norm("post_norm", layer.config.mlp_norm)


def mlp_spec(
    layer: LayerWriter,
    config: MLPConfig,
    norm: NormSpec | None = None,
    post_norm: NormSpec | None = None,
) -> MLPSpec:
    """The static part of an MLP with these norms."""
    return MLPSpec(
        norm=norm,
        post_norm=post_norm,
        activation=config.activation,
        multiplier=layer.model.residual_multiplier,
        group=layer.builder.group,
        deterministic=layer.builder.deterministic,
    )


def mlp_weights(
    layer: LayerWriter, config: MLPConfig, own: str, norm: Name = None, post_norm: Name = None
) -> MLPWeights:
    """Weights whose parameters' names begin with ``own``."""
    inner = layer.builder.group.shard(config.intermediate_size)
    names, sizes = config.gate_up_names, [inner, inner]
    bias = None
    if config.bias:
        rows = rows_of(layer.names(names, "bias"), sizes)
        bias = layer.fused_bias(f"{own}gate_up_bias", 2 * inner, rows)
    down = Placement(f"{layer.stored}{config.down_name}.weight", shard=1)
    return MLPWeights(
        norm=norm,
        gate_up_weight=layer.matrix(
            f"{own}gate_up_weight",
            (2 * inner, layer.hidden),
            rows_of(layer.names(names, "weight"), sizes),
        ),
        gate_up_bias=bias,
        down_weight=layer.matrix(f"{own}down_weight", (layer.hidden, inner), (down,)),
        down_bias=layer.vector(
            f"{own}down_bias",
            layer.hidden,
            f"{config.down_name}.bias" if config.bias else None,
        ),
        post_norm=post_norm,
    )
