"""A draft model out of a GGUF file guesses what its checkpoint does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from src import AsyncEngine, SamplingParams
from tests.engine.drafters.test_exactness import counted
from tests.engine.speculation.test_exactness import answer, config
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("always")
async def test_the_model_itself_in_another_format_is_always_right(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", tokenizer=True, num_hidden_layers=2)
    file = write_gguf(tmp_path / "draft.gguf", checkpoint, "llama")
    prompt = [5, 9, 60, 7, 33, 8, 12]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await engine.generate(prompt, params)
    drafting = {
        "speculation__method": "draft",
        "speculation__model": str(file),
        "speculation__num_speculative_tokens": 5,
    }
    async with AsyncEngine.open(config(checkpoint, **drafting)) as engine:
        result = await engine.generate(prompt, params)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
        drafted, accepted = counted(engine)
    assert answer(result) == answer(expected)
    # Behind the token that ends a request guesses are not looked at.
    assert drafted - accepted <= 5
    assert accepted >= len(result.token_ids) // 2
