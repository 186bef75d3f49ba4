"""What the metrics say of texts that become vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.core.errors import PromptTooLongError
from src.engine.client import AsyncEngine
from tests.support.checkpoints import make_checkpoint
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
