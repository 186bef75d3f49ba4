"""Vectors of every family that generates, in chunks and from the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from src.engine.client import AsyncEngine
from tests.support.checkpoints import CLASSES, load_reference, make_checkpoint
from tests.support.encoders import save_modules
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", CLASSES)
async def test_vectors_are_the_last_hidden_states_of_transformers(
    tmp_path: Path, name: str
) -> None:
    directory = make_checkpoint(tmp_path, name, tokenizer=True, **SHORT_SIGHTED[name])
    save_modules(directory, pooling={"pooling_mode": "lasttoken"}, normalizes=False)
    body, prompts = load_reference(directory).model, random_prompts(8, longest=40, seed=4)
    # Most texts take several steps, with others beside them.
    config = small_config(directory, scheduler__max_num_batched_tokens=9)
    async with AsyncEngine.open(config) as engine:
        made = await engine.embed(prompts)
        first = engine.metrics.value("vllm:prefix_cache_hits_total")
        again = await engine.embed(prompts[::-1])
        cached = engine.metrics.value("vllm:prefix_cache_hits_total") - first
        of_tokens = await engine.encode(prompts, task="token_embed")
        assert_idle(engine)
    assert cached > sum(map(len, prompts)) / 2
    for prompt, one, other, tokens in zip(prompts, made, again[::-1], of_tokens, strict=True):
        with torch.inference_mode():
            want = body(torch.tensor([prompt])).last_hidden_state[0].double()
        for vector in (one.vector, other.vector):
            got = torch.tensor(vector, dtype=torch.float64)
            torch.testing.assert_close(got, want[-1], rtol=TOLERANCE, atol=TOLERANCE)
        got = torch.tensor(tokens.values.tolist(), dtype=torch.float64).view_as(want)
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
