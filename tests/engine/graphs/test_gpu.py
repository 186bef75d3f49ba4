"""Captured steps on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.compile.graphs.cuda import CudaCapture
from src.core.settings import CHECKOUT
from src.engine import startup
from src.engine.execution.graphs import DecodeGraph, GraphStats, MixedGraph
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.no_waiting import watch_on_cuda
from tests.support.probe import Probe

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

GREEDY = SamplingParams(temperature=0, max_tokens=24)
CUDA = {
    "device__type": "cuda",
    "cache__block_size": 16,
    "cache__memory_fraction": 0.05,
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 64,
}


@pytest.fixture(autouse=True)
def nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay proves that what its graph has the address of is still there."""
    monkeypatch.setattr(
        startup, "capture_backend", lambda device: CudaCapture(device, asserts=True)
    )


def stats_of(engine: AsyncEngine) -> GraphStats:
    return Probe(engine).code.graph_stats


@pytest.mark.parametrize("startup_mode", ["off", "wait"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Path, reference: Any, depth: int, startup_mode: str
) -> None:
    prompts = random_prompts(12, longest=40)
    changes = CUDA | {"compile__startup": startup_mode, "scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        stats = stats_of(engine)
        assert_idle(engine)
    assert stats.captured == {"decode": 4, "mixed": 7}
    assert stats.steps["decode"] > 0
    assert stats.steps["mixed"] > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 24)


async def test_seeded_requests_get_the_tokens_that_they_get_without(checkpoint: Path) -> None:
    prompts = random_prompts(8, longest=30, seed=9)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=16, top_p=0.9 if i % 2 else 1.0)
        for i in range(8)
    ]

    async def run(**changes: Any) -> list[list[int]]:
        async with AsyncEngine.open(small_config(checkpoint, **CUDA | changes)) as engine:
            results = await asyncio.gather(
                *(engine.generate(p, q) for p, q in zip(prompts, params, strict=True))
            )
        return [result.token_ids for result in results]

    with_graphs = await run()
    assert await run(scheduler__pipeline_depth=1) == with_graphs
    # Padding may bring another kernel for a product, and float near-ties fall the other way.
    without = await run(compile__cuda_graphs="off")
    assert sum(a == b for a, b in zip(with_graphs, without, strict=True)) >= 6


@pytest.mark.alone
async def test_idle_time_captures_the_rest(checkpoint: Path) -> None:
    config = small_config(checkpoint, **CUDA | {"compile__cuda_graphs": "background"})
    async with AsyncEngine.open(config) as engine:
        await engine.generate([5, 6, 7], GREEDY)
        async with asyncio.timeout(60):
            while stats_of(engine).captured.total() < 11:
                await asyncio.sleep(0.05)
        # Weights, KV memory and states are there already: what is left is no more than this.
        assert stats_of(engine).bytes < 2**30
        await engine.generate([5, 6, 7], GREEDY)
        assert_idle(engine)


async def test_no_captured_step_waits_for_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(8, longest=40)
    async with AsyncEngine.open(small_config(checkpoint, **CUDA)) as engine:
        await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        seen = watch_on_cuda(monkeypatch)
        results = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        assert seen
        assert stats_of(engine).steps["decode"] > 0
        assert all(1 <= len(result.token_ids) <= 24 for result in results)


@pytest.mark.parametrize("graph_class", [DecodeGraph, MixedGraph])
async def test_a_replay_takes_no_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, graph_class: Any
) -> None:
    run: Callable[..., Any] = graph_class.run
    grown: list[int] = []

    def measured(self: Any, *arguments: Any) -> Any:
        before = torch.cuda.memory_reserved()
        result = run(self, *arguments)
        grown.append(torch.cuda.memory_reserved() - before)
        return result

    prompts = random_prompts(8, longest=40)
    async with AsyncEngine.open(small_config(checkpoint, **CUDA)) as engine:
        await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        monkeypatch.setattr(graph_class, "run", measured)
        # Other prompts, since cached ones would leave nothing to compute; and more than rows, so
        # that some are computed beside rows that decode, in steps that are small enough.
        prompts = random_prompts(16, longest=40, seed=3)
        await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
    assert grown
    # Attention between pieces has its own temporaries, from what the allocator keeps.
    assert max(grown) == 0 if graph_class is DecodeGraph else sum(map(bool, grown)) <= 2


@pytest.mark.alone
async def test_memory_comes_back_when_an_engine_closes(checkpoint: Path) -> None:
    free = []
    for _ in range(3):
        async with AsyncEngine.open(small_config(checkpoint, **CUDA)) as engine:
            await engine.generate([5, 6, 7], GREEDY)
        free.append(torch.cuda.mem_get_info()[0])
    # Its stream's workspaces too serve the next one, unless another thread starts it.
    assert free[2] >= free[1] - 72 * 2**20


def test_a_pool_can_be_had_anew_when_its_graphs_are_gone() -> None:
    backend = CudaCapture(torch.device("cuda"))
    given = torch.ones(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for factor in (2, 3):
            given * factor  # so that the kernel is there
            backend.begin()
            result = given * factor
            captured = backend.end()
            captured.replay()
            torch.cuda.synchronize()
            assert result[-1].item() == factor
            del captured, result
            backend.start_over()


def test_borrowed_memory_is_the_same_memory() -> None:
    backend = CudaCapture(torch.device("cuda"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        wide = torch.arange(24, device="cuda").view(4, 6).to(dtype)
        strided = wide[:, 2:5]
        borrowed = backend.borrowed(strided)
        assert (borrowed.dtype, borrowed.stride()) == (dtype, strided.stride())
        assert borrowed.data_ptr() == strided.data_ptr()
        wide.zero_()
        assert not borrowed.any()


def test_an_abandoned_capture_leaves_the_device_usable() -> None:
    """In a process of its own: what stays behind would fail another test in its name."""
    program = inspect.getsource(break_a_capture) + f"{break_a_capture.__name__}()"
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True, timeout=120)


def break_a_capture() -> None:
    import torch

    from src.compile.graphs.cuda import CudaCapture

    backend = CudaCapture(torch.device("cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        given = torch.ones(1 << 20, device="cuda")
        (given * 2).sum().item()  # so that the kernels are there
        for _ in range(2):
            backend.begin()
            doubled = given * 2
            try:
                doubled.sum().item()
            except RuntimeError:
                backend.abandon()
            else:
                raise AssertionError("a capture was waited for")
            del doubled
            torch.cuda.synchronize()
            assert (given * 2)[-1].item() == 2.0
            backend.start_over()
        backend.begin()
        tripled = given * 3
        captured = backend.end()
        captured.replay()
        torch.cuda.synchronize()
        assert tripled[-1].item() == 3.0
