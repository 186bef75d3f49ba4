"""What an engine does of which nobody has said who drafts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from src import AsyncEngine, SamplingParams
from src.core.config import (
    CacheSection,
    CompileSection,
    Config,
    DeviceSection,
    ModelSection,
    SpeculationSection,
)
from tests.engine.speculation.test_exactness import answer, ask
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_settings
from tests.support.engines import assert_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

# One token is far likelier than all others, so texts repeat themselves.
LIKELY = {5: 60.0}


@pytest.mark.usefixtures("steady")
async def test_a_cpu_drafts_and_answers_as_it_does_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=2, tokenizer=True)
    config = Config(
        model=ModelSection(path=str(path), deterministic=True, dtype="float32"),
        device=DeviceSection(type="cpu", num_threads=1),
        cache=CacheSection(block_size=4),
        compile=CompileSection(**compile_settings()),
    )
    asked = [
        ([5, 5, 6, 5, 5], SamplingParams(temperature=0, logit_bias=LIKELY, **each))
        for each in (
            {"max_tokens": 150, "logprobs": 2, "ignore_eos": True},
            {"max_tokens": 20, "stop": ("zz",), "ignore_eos": True},
        )
    ] + [([7, 8, 9] * 4, SamplingParams(seed=3, max_tokens=60, logprobs=1, ignore_eos=True))]
    off = msgspec.structs.replace(config, speculation=SpeculationSection(method="off"))
    found, steps = [], []
    caplog.set_level(logging.INFO)
    for each in (off, config):
        async with AsyncEngine.open(each) as engine:
            # Alone, and then beside others.
            results = [*await ask(engine, asked[:1]), *await ask(engine, asked)]
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            assert_idle(engine)
            records = list(engine.timeline)
        found.append([answer(result) for result in results])
        steps.append(len(records))
        accepted = sum(record.accepted_tokens for record in records)
        assert (accepted > 0) == (each is config)
    assert found[1] == found[0]
    assert steps[1] < steps[0]
    assert "speculation: prediction, suffix, up to 16 tokens" in caplog.text
