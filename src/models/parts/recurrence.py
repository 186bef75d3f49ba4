"""Writes a recurrent state in attention's place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from src.models.builder import Name
from src.models.config import RecurrenceConfig
from src.models.layers.recurrence import (
    RecurrenceInSpec,
    RecurrenceInWeights,
    RecurrenceMixerSpec,
    RecurrenceMixerWeights,
    RecurrenceOutSpec,
    RecurrenceOutWeights,
    delta_in,
    mamba_in,
    recurrence_out,
)
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.program import StepTensor
from src.models.weights.parameters import Placement
from src.models.weights.transforms import PartByPart, Taps

CHANNELS, GATE, DECAY, FACTOR, READ = "channels", "gate", "decay", "factor", "read"


def write_recurrence(
    layer: LayerWriter, config: RecurrenceConfig, between: Callable[[], None] = lambda: None
) -> None:
    """Write a recurrence, which every rank has whole; see `PartWriter`."""
    writer = _Writer(layer, config)
    writer.write_in()
    between()
    writer.write_mixer()
    writer.write_out()


class _Writer:
    def __init__(self, layer: LayerWriter, config: RecurrenceConfig) -> None:
        self._layer, self._builder, self._config = layer, layer.builder, config
        self._own = layer.own
        self._stored = f"{layer.stored}{config.name}."
        self._values = config.heads * config.dim
        self._mixer = RecurrenceMixerSpec(
            key_heads=config.key_heads,
            heads=config.heads,
            key_dim=config.key_dim,
            dim=config.dim,
            taps=config.taps,
            value_first=config.kind == "mamba",
            delta=config.kind == "delta",
            normalizes=config.kind == "delta",
            dtype=layer.builder.dtype,
            deterministic=layer.builder.deterministic,
        )

    def write_in(self) -> None:
        """Channels, gate, decay and factor of every token."""
        builder, config, channels = self._builder, self._config, self._mixer.channels
        layer, norm = self._layer, self._layer.config.attention_norm
        is_delta = config.kind == "delta"
        rows = channels + self._values + config.heads * (2 if is_delta else 1)
        shortest, longest = config.step_limits
        builder.segment(
            delta_in if is_delta else mamba_in,
            RecurrenceInSpec(
                norm=layer.norm_spec(norm),
                heads=config.heads,
                gate=self._values,
                channels=channels,
                shortest=shortest or None,
                longest=None if math.isinf(longest) else longest,
                deterministic=builder.deterministic,
            ),
            RecurrenceInWeights(
                layer.block_norm("input_norm", norm),
                builder.parameter(
                    self._own + "in_weight",
                    (rows, layer.hidden),
                    "matrix",
                    self._by_key_head() if is_delta else (self._placed("in_proj.weight"),),
                ),
                self._vector("in_bias", rows, "in_proj.bias") if config.bias else None,
                self._wide("log_decay", "A_log"),
                self._wide("step_bias", "dt_bias"),
            ),
            (RESIDUAL,),
            (
                builder.step_tensor(CHANNELS, channels),
                StepTensor(GATE, (self._values,), torch.float32),
                *(StepTensor(name, (config.heads,), torch.float32) for name in (DECAY, FACTOR)),
            ),
        )

    def _by_key_head(self) -> tuple[Placement, ...]:
        """The checkpoint has all parts of a key's head side by side."""
        config = self._config
        shared = config.heads // config.key_heads
        value = shared * config.dim
        wide = PartByPart(config.key_heads, (config.key_dim, config.key_dim, value, value))
        split = self._mixer.channels + self._values
        return (
            Placement(f"{self._stored}in_proj_qkvz.weight", (slice(0, split),), transform=wide),
            Placement(
                f"{self._stored}in_proj_ba.weight",
                (slice(split, split + 2 * config.heads),),
                transform=PartByPart(config.key_heads, (shared, shared)),
            ),
        )

    def write_mixer(self) -> None:
        """The convolution and the recurrence, which the engine computes."""
        builder, config, spec = self._builder, self._config, self._mixer
        builder.mixer(
            "recurrence",
            spec,
            RecurrenceMixerWeights(
                builder.parameter(
                    self._own + "taps",
                    (spec.taps, spec.channels),
                    "vector",
                    (Placement(f"{self._stored}conv1d.weight", transform=Taps()),),
                    fill=1.0 / spec.taps,
                ),
                self._vector("taps_bias", spec.channels, "conv1d.bias")
                if config.convolution_bias
                else None,
                self._wide("skip", "D") if config.kind == "mamba" else None,
            ),
            (CHANNELS, DECAY, FACTOR),
            builder.step_tensor(READ, self._values),
        )

    def write_out(self) -> None:
        """Norm, gate and projection of what was read."""
        builder, config = self._builder, self._config
        is_delta = config.kind == "delta"
        hidden = self._layer.hidden
        groups = config.heads if is_delta else config.key_heads
        size = config.dim if is_delta else self._values
        builder.segment(
            recurrence_out,
            RecurrenceOutSpec(
                eps=self._layer.model.norm.eps,
                groups=groups,
                gates_first=not is_delta,
                repeats=is_delta,
                post_norm=self._layer.norm_spec(self._layer.config.attention_post_norm),
                multiplier=self._layer.model.residual_multiplier,
            ),
            RecurrenceOutWeights(
                builder.vector(
                    self._own + "read_norm", size, f"{self._stored}norm.weight", fill=1.0
                ),
                builder.parameter(
                    self._own + "output_weight",
                    (hidden, self._values),
                    "matrix",
                    (self._placed("out_proj.weight"),),
                ),
                self._vector("output_bias", hidden, "out_proj.bias") if config.bias else None,
                self._layer.block_norm(
                    "attention_post_norm", self._layer.config.attention_post_norm
                ),
            ),
            (READ, GATE, RESIDUAL),
            (self._layer.residual,),
        )

    def _placed(self, tensor: str) -> Placement:
        return Placement(self._stored + tensor)

    def _vector(self, name: str, size: int, tensor: str) -> Name:
        return self._builder.vector(self._own + name, size, self._stored + tensor, fill=0.0)

    def _wide(self, name: str, tensor: str) -> Name:
        """A number of each head, in float32."""
        return self._builder.parameter(
            self._own + name,
            (self._config.heads,),
            "vector",
            (self._placed(tensor),),
            fill=0.0,
            dtype=torch.float32,
        )
