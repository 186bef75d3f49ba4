"""A family's norm behind its mixer is computed, whatever the mixer is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.distributed import Group
from src.models.builder import ProgramBuilder
from src.models.decoder import write_decoder
from src.models.layers.norms import rms_norm
from src.models.layers.recurrence import recurrence_out
from src.models.layers.short_convolution import short_convolution_out
from src.models.program import Segment
from src.models.registry import load_config
from tests.support.checkpoints import make_checkpoint


class Watched(ProgramBuilder):
    """Keeps the segments that end a mixer's part."""

    def __init__(self) -> None:
        super().__init__(
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_positions=64,
            group=Group(),
            deterministic=False,
            rotates_in_op=False,
        )
        self.ends: list[Segment] = []

    def segment(self, function: Any, spec: Any, weights: Any, reads: Any, writes: Any) -> None:
        if function in (short_convolution_out, recurrence_out):
            self.ends.append(Segment(function, spec, weights, tuple(reads), tuple(writes)))
        super().segment(function, spec, weights, reads, writes)


@pytest.mark.parametrize("family", ["lfm2", "granite_moehybrid", "qwen3next"])
def test_a_norm_behind_a_mixer_is_computed(family: str, tmp_path: Path) -> None:
    config = load_config(make_checkpoint(tmp_path, family))
    layers = tuple(replace(layer, attention_post_norm="behind") for layer in config.layers)
    builder = Watched()
    write_decoder(builder, replace(config, layers=layers))
    assert builder.ends
    for end in builder.ends:
        weights = end.weights
        assert weights.post_norm is not None
        assert weights.post_norm.endswith("attention_post_norm")
        hidden = config.hidden_size
        source = torch.Generator().manual_seed(0)
        # What is added is the bias: nothing was read, and the product of zeros is zero.
        bias, norm = torch.randn(2, hidden, generator=source)
        read, gate = (torch.zeros(2, _width(end, config), dtype=torch.float32) for _ in range(2))
        residual = torch.randn(2, hidden, generator=source)
        given = weights._replace(
            output_weight=torch.zeros(hidden, read.shape[1]), output_bias=bias, post_norm=norm
        )
        if end.function is recurrence_out:
            size = read.shape[1] // end.spec.groups if end.spec.repeats else read.shape[1]
            given = given._replace(norm=torch.ones(size))
        added = rms_norm(bias.expand(2, -1), norm, end.spec.post_norm) * end.spec.multiplier
        torch.testing.assert_close(
            end.function(end.spec, given, read, gate, residual), residual + added
        )


def _width(end: Segment, config: Any) -> int:
    """Elements of a token that the segment reads."""
    if end.function is short_convolution_out:
        return int(config.hidden_size)
    recurrences = [each.attention for each in config.layers if hasattr(each.attention, "taps")]
    return int(recurrences[0].heads * recurrences[0].dim)
