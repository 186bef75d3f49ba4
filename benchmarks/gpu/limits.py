"""Theoretical limits of a device for a dense decoder, and goals for Llama 3.1 8B on an H200.

A decode step of B rows at a context of L reads every weight once and every row's keys and values,
and computes two operations per weight and row; a prompt of L tokens attends to L / 2 positions on
average:

    step >= max(weights / bandwidth, B * flops per token / rate) + B * L * KV bytes / bandwidth
    prompt >= L * (flops of the layers per token + flops per pair * L / 2) / rate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.shapes import SHAPES
from src.engine.sizing.roofline import Roofline

_BYTES = 2  # per bfloat16 element


@dataclass(frozen=True)
class ModelCost:
    """The cost of a shape in bfloat16.

    Attributes
    ----------
    weight_bytes
        Weights that a decode step reads; the embedding is not included, the LM head is.
    layer_flops, head_flops
        Per token, without attention.
    pair_flops
        Per pair of a token and an attended position, over all layers.
    kv_bytes
        Keys and values of one position, over all layers.
    """

    weight_bytes: float
    layer_flops: float
    head_flops: float
    pair_flops: float
    kv_bytes: float

    @classmethod
    def of(cls, shape: Mapping[str, Any]) -> ModelCost:
        """The cost of one of `SHAPES`."""
        hidden, layers, width = (
            shape["hidden_size"],
            shape["num_hidden_layers"],
            shape["head_dim"],
        )
        queries, keys = shape["num_attention_heads"], shape["num_key_value_heads"]
        attention = width * hidden * (2 * queries + 2 * keys)
        mlp = 3 * hidden * shape["intermediate_size"]
        in_layers, in_head = layers * (attention + mlp), shape["vocab_size"] * hidden
        return cls(
            weight_bytes=_BYTES * (in_layers + in_head),
            layer_flops=2 * in_layers,
            head_flops=2 * in_head,
            pair_flops=4 * layers * queries * width,
            kv_bytes=2 * _BYTES * layers * keys * width,
        )

    def decode_seconds(self, rows: int, context: float, roof: Roofline) -> float:
        """Minimal time of a step with ``rows`` rows at an average context of ``context``."""
        compute = rows * (self.layer_flops + self.head_flops) / roof.flops
        weights = self.weight_bytes / roof.bandwidth
        return max(weights, compute) + rows * context * self.kv_bytes / roof.bandwidth

    def prefill_flops(self, tokens: int) -> float:
        """FLOPs of a prompt of ``tokens`` tokens, without the LM head.

        Counted as usual, with every token in every layer. In fact, the last layer only needs keys
        and values of most tokens, some 3 % less in a model of 32 layers.
        """
        return tokens * (self.layer_flops + self.pair_flops * tokens / 2)

    def offline_seconds(self, rows: int, inputs: int, outputs: int, roof: Roofline) -> float:
        """Minimal time for ``rows`` prompts of ``inputs`` tokens to get ``outputs`` tokens each."""
        prefill = rows * self.prefill_flops(inputs) / roof.flops
        return prefill + outputs * self.decode_seconds(rows, inputs + outputs / 2, roof)


@dataclass(frozen=True)
class Goals:
    """Goals by figure; ``inter_token_ms`` is by number of rows, at a context of 1,024.

    Attributes
    ----------
    prefill_tflops
        For a prompt of 2,048 tokens.
    offline
        Output tokens per second of 256 rows, with 1,000 tokens in and 1,000 out.
    bubble
        Percentage of a decode step's time in which the device waits.
    cold, warm
        Seconds from process start to the first token.
    """

    inter_token_ms: Mapping[int, float]
    prefill_tflops: float
    offline: float
    bubble: float
    cold: float
    warm: float

    def on(self, roof: Roofline, cost: ModelCost) -> Goals:
        """The goals for another device: as far from its limits as these are from an H200's.

        Waiting and starts depend on the host, so they stay.
        """

        def slower(rows: int) -> float:
            here, there = (cost.decode_seconds(rows, 1024, each) for each in (roof, H200))
            return here / there

        here, there = (cost.offline_seconds(256, 1000, 1000, each) for each in (roof, H200))
        return replace(
            self,
            inter_token_ms={rows: ms * slower(rows) for rows, ms in self.inter_token_ms.items()},
            prefill_tflops=self.prefill_tflops * roof.flops / H200.flops,
            offline=self.offline * there / here,
        )


# What an H200 was measured to read and to multiply: the device of the goals.
H200: Final = Roofline(bandwidth=4.3e12, flops=790e12)
# Llama 3.1 8B in bfloat16 on one H200.
GOALS: Final = Goals(
    inter_token_ms={1: 4.2, 8: 4.6, 64: 6.9, 256: 16.0},
    prefill_tflops=0.7 * 790,
    offline=9000.0,
    bubble=2.0,
    cold=15.0,
    warm=5.0,
)


def cost_of(shape: str) -> ModelCost:
    """The cost of a named shape."""
    return ModelCost.of(SHAPES[shape])
