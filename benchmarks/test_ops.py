"""The CPU kernels of every op, as a fraction of this machine's roofline (`extra_info`)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from src.engine.sizing.roofline import Roofline
from src.ops import (
    CAUSAL_CONVOLUTION,
    EXPERTS,
    GUMBEL_ARGMAX,
    LINEAR,
    LINEAR_RECURRENCE,
    LORA,
    OPS,
    PAGED_ATTENTION,
    Op,
)
from src.ops.build.kernels import ensure_built

_HEADS = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
_MIXED = {
    "experts": 64,
    "chosen": 8,
    "hidden": 1024,
    "intermediate": 512,
    "dtype": torch.bfloat16,
}
_WIDE = {"inputs": 2048, "outputs": 8192, "dtype": torch.bfloat16}
_STATES = {"key_heads": 16, "heads": 32, "key_dim": 128, "dim": 128, "dtype": torch.bfloat16}
_CHANNELS = {"channels": 8192, "dtype": torch.bfloat16}
# Larger than any cache: a real model's step finds no data of the previous step in a cache.
_BEYOND_CACHES = 128 * 2**20
_MOST_COPIES = 64

CASES: dict[str, tuple[Op, dict[str, Any]]] = {
    "decode, 1 row of 4096": (PAGED_ATTENTION, {"rows": [(1, 4096)], **_HEADS}),
    "decode, 32 rows of 512": (PAGED_ATTENTION, {"rows": [(1, 512)] * 32, **_HEADS}),
    "decode, 32 rows of 512, bfloat16": (
        PAGED_ATTENTION,
        {"rows": [(1, 512)] * 32, "dtype": torch.bfloat16, **_HEADS},
    ),
    "prefill of 512": (PAGED_ATTENTION, {"rows": [(512, 512)], **_HEADS}),
    "chunk of 128 after 1024": (PAGED_ATTENTION, {"rows": [(128, 1152)], **_HEADS}),
    "sample 1 of 128256": (GUMBEL_ARGMAX, {"rows": 1, "vocab_size": 128_256, "temperature": 1.0}),
    "sample 32 of 32000": (GUMBEL_ARGMAX, {"rows": 32, "vocab_size": 32_000, "temperature": 1.0}),
    "greedy 32 of 32000": (GUMBEL_ARGMAX, {"rows": 32, "vocab_size": 32_000, "temperature": 0.0}),
    "1 token, bfloat16": (LINEAR, {"tokens": 1, **_WIDE}),
    "1 token, bfloat16 in strips": (LINEAR, {"tokens": 1, "weight": "strips of same", **_WIDE}),
    "1 token, int8": (LINEAR, {"tokens": 1, "weight": "int8", **_WIDE}),
    "1 token, int4": (LINEAR, {"tokens": 1, "weight": "int4/32", **_WIDE}),
    "1 token, int8, rounded": (LINEAR, {"tokens": 1, "weight": "strips of int8", **_WIDE}),
    "1 token, int4, rounded": (LINEAR, {"tokens": 1, "weight": "strips of int4/32", **_WIDE}),
    "32 tokens, bfloat16": (LINEAR, {"tokens": 32, **_WIDE}),
    "32 tokens, bfloat16 in strips": (LINEAR, {"tokens": 32, "weight": "strips of same", **_WIDE}),
    "256 tokens, bfloat16": (LINEAR, {"tokens": 256, **_WIDE}),
    "256 tokens, bfloat16 in strips": (
        LINEAR,
        {"tokens": 256, "weight": "strips of same", **_WIDE},
    ),
    "1 token, 8 of 64 experts": (EXPERTS, {"tokens": 1, **_MIXED}),
    "1 token, 8 of 64 experts in strips": (
        EXPERTS,
        {"tokens": 1, "weight": "strips of same", **_MIXED},
    ),
    "256 tokens, 8 of 64 experts": (EXPERTS, {"tokens": 256, **_MIXED}),
    "32 tokens, 4 adapters of rank 16": (
        LORA,
        {
            "slots": [token % 4 for token in range(32)],
            "inputs": 2048,
            "parts": [2048, 512, 512],
            "ranks": [[16, 16, 16]] * 4,
            "room": 16,
            "dtype": torch.bfloat16,
        },
    ),
    "states of 32 rows": (LINEAR_RECURRENCE, {"rows": (1,) * 32, **_STATES}),
    "states of a chunk of 256": (LINEAR_RECURRENCE, {"rows": (256,), **_STATES}),
    "convolution of 32 rows": (CAUSAL_CONVOLUTION, {"rows": (1,) * 32, **_CHANNELS}),
    "convolution of a chunk of 256": (CAUSAL_CONVOLUTION, {"rows": (256,), **_CHANNELS}),
}


@pytest.fixture(scope="module")
def kernels() -> str:
    status = ensure_built(wait=True)
    assert status != "reference", "no compiled kernels: nothing to measure"
    return status


def test_every_op_is_measured(benchmark: Any, kernels: str) -> None:
    # Ops without a CPU kernel are measured in benchmarks/gpu/kernels.py.
    compiled = {op.name for op in OPS if op.active("cpu").name == kernels}
    assert {op.name for op, _ in CASES.values()} == compiled
    benchmark.pedantic(lambda: None)


def copies(arguments: tuple[Any, ...], num_bytes: int) -> list[tuple[Any, ...]]:
    """Enough copies of the arguments that a call finds none of them in a cache."""
    count = min(_MOST_COPIES, 1 + _BEYOND_CACHES // num_bytes)
    return [
        tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", CASES)
def test_op(benchmark: Any, name: str, roofline: Roofline, kernels: str) -> None:
    op, case = CASES[name]
    arguments = op.build("cpu", **case)
    cost = op.cost(*arguments)
    places = itertools.cycle(copies(arguments, cost.bytes))
    benchmark.group = op.name
    benchmark(lambda: op.overload(*next(places)))
    median = benchmark.stats.stats.median
    on_memory = cost.bytes / roofline.bandwidth > cost.flops / roofline.flops
    benchmark.extra_info |= {
        "case": name,
        "op": op.name,
        "kernels": kernels,
        "bound by": "memory" if on_memory else "arithmetic",
        "GB/s": cost.bytes / median / 1e9,
        "GFLOP/s": cost.flops / median / 1e9,
        "machine GB/s": roofline.bandwidth / 1e9,
        "machine GFLOP/s": roofline.flops / 1e9,
        "fraction of roofline": roofline.seconds(cost) / median,
    }
    print(f"\n{name}: {100 * benchmark.extra_info['fraction of roofline']:.0f} % of the roofline")
