"""The CPU kernels of every op, as a fraction of this machine's roofline (`extra_info`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.roofline import Roofline, measure
from src.ops import GUMBEL_ARGMAX, OPS, PAGED_ATTENTION, Op
from src.ops.cpu.build import ensure_built

_HEADS = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64}

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
}


@pytest.fixture(scope="module")
def roofline(one_thread: None) -> Roofline:
    return measure(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def kernels() -> str:
    status = ensure_built(wait=True)
    assert status != "reference", "no compiled kernels: nothing to measure"
    return status


def test_every_op_is_measured(benchmark: Any) -> None:
    assert {op.name for op, _ in CASES.values()} == {op.name for op in OPS}
    benchmark.pedantic(lambda: None)


@pytest.mark.parametrize("name", CASES)
def test_op(benchmark: Any, name: str, roofline: Roofline, kernels: str) -> None:
    op, case = CASES[name]
    arguments = op.build("cpu", **case)
    benchmark.group = op.name
    benchmark(op.overload, *arguments)
    cost = op.cost(*arguments)
    best = benchmark.stats.stats.min
    benchmark.extra_info |= {
        "kernels": kernels,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "GB/s": cost.bytes / best / 1e9,
        "GFLOP/s": cost.flops / best / 1e9,
        "fraction of roofline": roofline.seconds(cost) / best,
    }
    print(f"\n{name}: {100 * benchmark.extra_info['fraction of roofline']:.0f} % of the roofline")
