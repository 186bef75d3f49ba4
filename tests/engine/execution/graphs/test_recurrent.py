"""Steps of models with recurrent states are captured as others are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine
from src.engine import startup
from tests.engine.execution.graphs.test_engine import CAPTURED, GREEDY, greedy, stats_of
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.fake_capture import FakeCapture

pytestmark = pytest.mark.anyio

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"scheduler__max_num_batched_tokens": 40},
    "chunked, depth 1": {"scheduler__max_num_batched_tokens": 8, "scheduler__pipeline_depth": 1},
}


@pytest.mark.parametrize(
    ("way", "family"),
    [("plain", "qwen3next"), ("chunked, depth 1", "granite_moehybrid"), ("plain", "lfm2")],
)
async def test_captured_steps_advance_the_states_of_their_rows(
    way: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    directory = make_checkpoint(tmp_path, family, tokenizer=True)
    prompts = random_prompts(6, longest=30, seed=4)
    async with AsyncEngine.open(small_config(directory, **CAPTURED | WAYS[way])) as engine:
        results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
        stats = stats_of(engine)
        assert_idle(engine)
    assert stats.steps["decode"] > 0
    assert stats.steps["mixed"] > 0
    reference = load_reference(directory)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, len(result.token_ids))
