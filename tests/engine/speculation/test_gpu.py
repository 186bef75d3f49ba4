"""Drafts of a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.compile.graphs.cuda import CudaCapture
from src.engine import startup
from src.engine.speculation import Widths, on_device
from src.engine.speculation.device_check import why_not
from src.engine.speculation.on_device import Bounds
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.no_waiting import watch_on_cuda
from tests.support.probe import Probe

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
CUDA: dict[str, Any] = {
    "device__type": "cuda",
    "cache__block_size": 16,
    "cache__memory_fraction": 0.05,
    "speculation__method": "ngram",
    "speculation__prompt_lookup_min": 1,
}
CAPTURED: dict[str, Any] = {
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 64,
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is verified, whatever that costs; and nothing that a graph reads is moved."""
    monkeypatch.setattr(on_device, "Widths", lambda: Widths(always=True))
    monkeypatch.setattr(
        startup, "capture_backend", lambda device: CudaCapture(device, asserts=True)
    )


def prompts() -> list[list[int]]:
    return [(prompt * 5)[:40] for prompt in random_prompts(8, longest=9, seed=4)]


@pytest.mark.parametrize("bounds", [Bounds(3, 24), Bounds(1, 5, "ngram", 4)])
def test_the_kernels_find_and_accept_what_they_are_to(bounds: Bounds) -> None:
    assert why_not(bounds, torch.device("cuda", 0)) is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("captured", [True, False])
async def test_tokens_with_drafts_are_those_of_transformers(
    checkpoint: Path, reference: Any, depth: int, captured: bool
) -> None:
    changes = CUDA | (CAPTURED if captured else {}) | {"scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
        results = await asyncio.gather(*(engine.generate(each, GREEDY) for each in prompts()))
        probe = Probe(engine)
        counts = probe.worker.draft_counts
        assert counts is not None
        assert counts.drafted > counts.accepted > 0
        assert (probe.code.graph_stats.steps["verify"] > 0) == captured
        await probe.idle()
        assert_idle(engine)
    for prompt, result in zip(prompts(), results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 40, end=None)


async def test_no_step_with_drafts_waits_for_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of rows that ask for more than a token drawn by temperature and seed."""
    caplog.set_level(logging.WARNING)
    every = SamplingParams(
        temperature=0.3, seed=1, top_k=20, presence_penalty=0.1, logprobs=3, max_tokens=30
    )
    wishes = [GREEDY, every] * 4
    async with AsyncEngine.open(small_config(checkpoint, **CUDA, **CAPTURED)) as engine:
        for watches in (False, True):
            # The first requests compile kernels, which waits.
            seen = watch_on_cuda(monkeypatch) if watches else None
            calls = (engine.generate(*each) for each in zip(prompts(), wishes, strict=True))
            await asyncio.gather(*calls)
        assert seen
        assert_idle(engine)
    assert "nothing drafts" not in caplog.text
