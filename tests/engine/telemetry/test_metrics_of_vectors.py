"""What the metrics say of texts that become vectors."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from src.core.errors import PromptTooLongError
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.observability.timeline_figures import figures
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import make_encoder, save_encoder_tokenizer
from tests.support.engines import small_config

pytestmark = pytest.mark.anyio

PROMPT = list(range(3, 43))


async def test_their_tokens_count_as_those_of_prompts_and_nothing_as_output(
    tmp_path: Path,
) -> None:
    path = make_checkpoint(tmp_path / "tiny", "qwen3", tokenizer=True)
    async with AsyncEngine.open(small_config(path)) as engine:
        value = engine.metrics.value
        await engine.embed([PROMPT])
        assert value("vllm:prompt_tokens_total") == len(PROMPT)
        assert value("vllm:prompt_tokens_cached_total") == 0
        (again,) = await engine.embed([PROMPT])
        with pytest.raises(PromptTooLongError):
            await engine.embed([[5] * 257])
        hit = again.cached_tokens
        assert hit > 0
        by_source = "vllm:prompt_tokens_by_source_total"
        assert value("vllm:prompt_tokens_total") == 2 * len(PROMPT)
        assert value("vllm:prompt_tokens_cached_total") == hit
        assert value(by_source, source="local_cache_hit") == hit
        assert value(by_source, source="local_compute") == 2 * len(PROMPT) - hit
        assert value("vllm:request_success_total", finished_reason="stop") == 2
        assert value("vllm:request_prefill_kv_computed_tokens_sum") == 2 * len(PROMPT) - hit
        for name in ("request_prompt_tokens", "e2e_request_latency_seconds"):
            assert value(f"vllm:{name}_count") == 2
        for name in (
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "time_to_first_token_seconds",
            "request_decode_time_seconds",
        ):
            assert value(f"vllm:{name}_count") == 0, name
        await engine.generate(PROMPT)
        assert value("vllm:request_generation_tokens_count") == 1
        assert value("vllm:request_params_n_count") == 1


async def test_everything_that_watches_an_encoder_counts_its_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_encoder(tmp_path / "tiny", "bert")
    save_encoder_tokenizer(path)
    caplog.set_level(logging.INFO, logger="src.requests")
    settings = {"observability__log_requests": True, "scheduler__max_num_seqs": 2}
    async with AsyncEngine.open(small_config(path, **settings)) as engine:
        seen: list[tuple[int, int]] = []

        async def watch() -> None:
            while True:
                seen.append((engine.stats.num_running, engine.stats.num_waiting))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await engine.embed([PROMPT] * 5)
        watching.cancel()
        # What `/load` is made of.
        assert max(running for running, _ in seen) == 2
        assert max(waiting for _, waiting in seen) > 0
        value = engine.metrics.value
        assert value("vllm:request_queue_time_seconds_count") == 5
        assert value("vllm:request_success_total", finished_reason="stop") == 5
        # No token has keys and values that last.
        assert value("vllm:prefix_cache_queries_total") == 0
        assert value("vllm:kv_cache_usage_perc") == 0
        view = engine.inspector.timeline()
        assert sum(step.pooled_rows for step in view.steps) == 5
        assert sum(step.sampled_rows for step in view.steps) == 0
        assert [track.task for track in view.requests] == ["embed"] * 5
        found = figures(view.steps, view.requests)
        assert (found.output_tokens, found.whole, found.ttft) == (0, None, None)
        assert found.tasks["embed"].count == 5
        pool = await engine.inspector.pool()
        assert (pool.held, pool.cached) == (0, 0)
    lines = [record.getMessage() for record in caplog.records if record.name == "src.requests"]
    assert len(lines) == 5
    assert all(f"in {len(PROMPT)} (cached 0), task embed, queue" in line for line in lines)
    assert not any("ttft" in line for line in lines)


async def test_a_step_of_both_tells_tokens_from_vectors(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", "qwen3", tokenizer=True)
    async with AsyncEngine.open(small_config(path)) as engine:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        await asyncio.gather(engine.generate(PROMPT, params), engine.embed([PROMPT[1:]] * 3))
        view = engine.inspector.timeline()
        assert sum(step.sampled_rows for step in view.steps) == 6
        assert sum(step.pooled_rows for step in view.steps) == 3
        assert engine.metrics.value("vllm:time_to_first_token_seconds_count") == 1
