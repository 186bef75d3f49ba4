"""Every mode of the engine gives the bundled model's golden answers, those of transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, ChatOptions, FinishReason, SamplingParams
from tests.support.engines import assert_idle, small_config

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[2] / "configs" / "demo"
GOLDEN = [json.loads(line) for line in (DEMO / "golden.jsonl").read_text().splitlines()]

MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "two threads": {"device__num_threads": 2},
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 24, "scheduler__max_num_seqs": 16},
    "preempted": {"cache__num_blocks": 128, "model__max_model_len": 480},
    "uncached": {"cache__enable_prefix_caching": False},
    "compiled": {"compile__enforce_eager": False, "compile__startup": "wait"},
}


@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_gives_the_golden_answers(mode: str) -> None:
    changes = {"scheduler__max_num_seqs": 64, **MODES[mode]}
    # Asked once, memory for a quarter of them is sometimes enough.
    cases = GOLDEN * 4 if mode == "preempted" else GOLDEN
    async with AsyncEngine.open(small_config(DEMO, **changes)) as engine:

        async def answer(case: dict[str, Any]) -> Any:
            return await engine.generate(
                case["messages"] if "messages" in case else case["prompt"],
                SamplingParams(temperature=0, max_tokens=len(case["token_ids"])),
                chat=ChatOptions(tools=case.get("tools") or None),
            )

        results = await asyncio.gather(*(answer(case) for case in cases))
        if mode == "preempted":
            assert engine.stats.preemptions > 0
        assert_idle(engine)
    for case, result in zip(cases, results, strict=True):
        assert result.token_ids == case["token_ids"], case
        assert result.text == case["text"]
        assert result.finish_reason is FinishReason.STOP


async def test_the_model_s_own_default_is_greedy() -> None:
    async with AsyncEngine.open(small_config(DEMO)) as engine:
        assert engine.model_info.default_sampling == {"temperature": 0.0}
        result = await engine.generate([{"role": "user", "content": "What is 17 + 25?"}])
    assert result.text == "17 + 25 = 42."
