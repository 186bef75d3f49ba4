"""Programs of a tiny model that no family has: a second residual stream, and late reads.

Segments are in a module of their own, because other processes compile them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.models.builder import ProgramBuilder
from src.models.config import ModelConfig
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.program import HIDDEN, INPUT_IDS, LOGITS, POSITIONS, StepTensor
from src.models.weights.parameters import Placement

STREAMS, QUERIES = ("left", "right"), ("query", "key", "value")


class Heads(NamedTuple):
    """Shape of a layer's attention."""

    count: int
    kv_count: int
    dim: int


def start(spec: None, weights: tuple[Tensor], input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two streams [T, H] of token ids."""
    left = functional.embedding(input_ids, weights[0])
    return left, left.flip(-1)


def project(
    spec: Heads, weights: tuple[Tensor], left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values from both streams."""
    fused = functional.linear(torch.tanh(left + right), weights[0])
    heads = fused.unflatten(-1, (spec.count + 2 * spec.kv_count, spec.dim))
    query, key, value = heads.split((spec.count, spec.kv_count, spec.kv_count), dim=1)
    return query.contiguous(), key.contiguous(), value.contiguous()


def join(
    spec: None, weights: tuple[Tensor], attended: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the attention output to both streams."""
    added = functional.linear(attended, weights[0])
    return left + added, right + torch.tanh(added)


def finish(
    spec: None, weights: tuple[()], left: Tensor, right: Tensor, positions: Tensor
) -> Tensor:
    """Hidden states, which also depend on positions."""
    return left + right * torch.cos(positions.to(left.dtype))[:, None]


def finish_with(
    spec: None, weights: tuple[()], left: Tensor, right: Tensor, positions: Tensor, early: Tensor
) -> Tensor:
    """The same, plus a tensor that the first attention's segment wrote."""
    return finish(None, (), left, right, positions) + early


def head(spec: None, weights: tuple[Tensor], hidden: Tensor) -> Tensor:
    """Logits."""
    return functional.linear(hidden, weights[0]).to(torch.float32)


def write_two_streams(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Two streams; the second one and the positions are read after the last mixer."""
    _write(builder, config, keeps_early=False)


def write_late_reader(builder: ProgramBuilder, config: ModelConfig) -> None:
    """The same, and a tensor written after the first mixer is read after the last one."""
    _write(builder, config, keeps_early=True)


def _write(builder: ProgramBuilder, config: ModelConfig, *, keeps_early: bool) -> None:
    hidden = config.hidden_size

    def matrix(name: str, rows: int) -> tuple[Any, ...]:
        return (builder.parameter(name, (rows, hidden), "vector", (Placement(name),)),)

    streams = [builder.step_tensor(name, hidden) for name in STREAMS]
    builder.segment(start, None, matrix("embedding", config.vocab_size), (INPUT_IDS,), streams)
    for number, layer in enumerate(config.layers):
        its = layer.attention
        heads = Heads(its.num_heads, its.num_kv_heads, its.head_dim)
        assert heads.count * heads.dim == hidden
        counts = zip(QUERIES, (heads.count, heads.kv_count, heads.kv_count), strict=True)
        projected = [builder.step_tensor(name, count, heads.dim) for name, count in counts]
        rows = (heads.count + 2 * heads.kv_count) * heads.dim
        builder.segment(project, heads, matrix(f"{number}.qkv", rows), STREAMS, projected)
        is_early = keeps_early and number == 0
        attended = "early" if is_early else "attended"
        builder.mixer(
            "attention",
            AttentionMixerSpec(
                *heads, builder.dtype, heads.dim**-0.5, None, None, None, builder.deterministic
            ),
            AttentionMixerWeights(None, None, None),
            QUERIES,
            builder.step_tensor(attended, hidden),
        )
        builder.segment(join, None, matrix(f"{number}.out", hidden), (attended, *STREAMS), streams)
    builder.segment(
        finish_with if keeps_early else finish,
        None,
        (),
        (*STREAMS, POSITIONS, *(("early",) if keeps_early else ())),
        (builder.step_tensor(HIDDEN, hidden),),
    )
    logits = StepTensor(LOGITS, (config.vocab_size,), torch.float32)
    builder.head(head, None, matrix("head", config.vocab_size), (HIDDEN,), (logits,))
