"""Steps of models that transformers computes are captured where the model allows it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from src import AsyncEngine, SamplingParams
from src.engine import startup
from tests.architectures.check import largest_error
from tests.architectures.tiny import make_tiny
from tests.engine.execution.graphs.test_engine import CAPTURED, stats_of
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.fake_capture import FakeCapture

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-3
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"scheduler__max_num_batched_tokens": 40},
    "chunked, depth 1": {"scheduler__max_num_batched_tokens": 8, "scheduler__pipeline_depth": 1},
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    backend = FakeCapture()
    monkeypatch.setattr(startup, "capture_backend", lambda device: backend)
    # transformers asks torch.cuda, and asks the device for nothing during a capture.
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: backend.is_capturing)
    return backend


# Learned positions, parts of heads rotated, windows.
@pytest.mark.parametrize("architecture", ["gpt2", "phi", "starcoder2", "stablelm"])
@pytest.mark.parametrize("way", WAYS)
async def test_captured_steps_give_what_transformers_gives(
    way: str, architecture: str, tmp_path: Path, backend: FakeCapture
) -> None:
    make_tiny(tmp_path, architecture)
    prompts = random_prompts(6, longest=30, seed=4)
    async with AsyncEngine.open(small_config(tmp_path, **CAPTURED | WAYS[way])) as engine:
        assert engine.model_info.implementation == "transformers"
        results = await asyncio.gather(*(engine.generate(p, PARAMS) for p in prompts))
        stats = stats_of(engine)
        assert_idle(engine)
    assert stats.steps["decode"] > 0
    assert stats.steps["mixed"] > 0
    reference = load_reference(tmp_path)
    for prompt, result in zip(prompts, results, strict=True):
        assert largest_error(reference, prompt, result) < TOLERANCE


async def test_a_model_that_cannot_be_captured_is_served_without(
    tmp_path: Path, backend: FakeCapture, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamic RoPE asks the device for the longest position of a step."""
    directory = make_checkpoint(tmp_path, "llama", rope="dynamic", tokenizer=True)
    prompts = random_prompts(3, longest=20, seed=4)
    changes = CAPTURED | {"model__implementation": "transformers"}
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            results = await asyncio.gather(*(engine.generate(p, PARAMS) for p in prompts))
            assert stats_of(engine).steps.total() == 0
    assert any("run without graphs" in line for line in caplog.messages)
    reference = load_reference(directory)
    for prompt, result in zip(prompts, results, strict=True):
        assert largest_error(reference, prompt, result) < TOLERANCE
