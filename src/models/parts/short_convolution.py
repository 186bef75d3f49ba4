"""Writes a gated short convolution in attention's place."""

from __future__ import annotations

from collections.abc import Callable

from src.models.builder import Name
from src.models.config import ShortConvolutionConfig
from src.models.layers.short_convolution import (
    ShortConvolutionInSpec,
    ShortConvolutionInWeights,
    ShortConvolutionMixerSpec,
    ShortConvolutionMixerWeights,
    ShortConvolutionOutSpec,
    ShortConvolutionOutWeights,
    short_convolution_in,
    short_convolution_out,
)
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.weights.parameters import Placement
from src.models.weights.transforms import Taps

CHANNELS, FACTOR, CONVOLVED = "channels", "factor", "convolved"


def write_short_convolution(
    layer: LayerWriter, config: ShortConvolutionConfig, between: Callable[[], None] = lambda: None
) -> None:
    """Write a short convolution, which every rank has whole; see `PartWriter`."""
    builder, hidden, norm = layer.builder, layer.hidden, layer.config.attention_norm
    stored = layer.stored

    def bias(name: str, size: int, tensor: str) -> Name:
        return layer.vector(name, size, f"{tensor}.bias" if config.bias else None)

    builder.segment(
        short_convolution_in,
        ShortConvolutionInSpec(norm=layer.norm_spec(norm)),
        ShortConvolutionInWeights(
            norm=layer.block_norm("input_norm", norm),
            weight=layer.matrix(
                "in_weight", (3 * hidden, hidden), (Placement(f"{stored}{config.in_name}.weight"),)
            ),
            bias=bias("in_bias", 3 * hidden, config.in_name),
        ),
        (RESIDUAL,),
        (builder.step_tensor(CHANNELS, hidden), builder.step_tensor(FACTOR, hidden)),
    )
    between()
    taps = Placement(f"{stored}{config.convolution_name}.weight", transform=Taps())
    builder.mixer(
        "short_convolution",
        ShortConvolutionMixerSpec(
            channels=hidden,
            taps=config.taps,
            dtype=builder.dtype,
            deterministic=builder.deterministic,
        ),
        ShortConvolutionMixerWeights(
            weight=builder.parameter(
                layer.own + "taps", (config.taps, hidden), "vector", (taps,), fill=1.0 / config.taps
            ),
            bias=bias("taps_bias", hidden, config.convolution_name),
        ),
        (CHANNELS,),
        builder.step_tensor(CONVOLVED, hidden),
    )
    output = Placement(f"{stored}{config.output_name}.weight")
    builder.segment(
        short_convolution_out,
        ShortConvolutionOutSpec(
            post_norm=layer.norm_spec(layer.config.attention_post_norm),
            multiplier=layer.model.residual_multiplier,
        ),
        ShortConvolutionOutWeights(
            output_weight=layer.matrix("output_weight", (hidden, hidden), (output,)),
            output_bias=bias("output_bias", hidden, config.output_name),
            post_norm=layer.block_norm("attention_post_norm", layer.config.attention_post_norm),
        ),
        (CONVOLVED, FACTOR, RESIDUAL),
        (layer.residual,),
    )
