"""Rotation by an op instead of segments, as on CUDA: forced here, where its reference serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from src import AsyncEngine, SamplingParams
from src.compile.just_in_time import CompiledFunction
from src.engine import startup
from src.models import load_model
from src.models.program import INPUT_IDS, POSITIONS, run_chain
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.fake_capture import FakeCapture
from tests.support.rotation import mixers_rotate

pytestmark = pytest.mark.anyio

SCORED = SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1)
CAPTURED = {
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 40,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "rope": "llama3"},
    "qwen3": {"architecture": "qwen3", "head_dim": 24},
    "qwen3-yarn": {"architecture": "qwen3", "rope": "yarn", "attention_bias": True},
    "mistral-window": {"architecture": "mistral", "sliding_window": 8},
}
Rotate = Callable[[], list[int]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
async def test_an_eager_engine_has_the_same_bits(
    model: str, dtype: str, tmp_path: Path, reference_attention: None, rotate_in_op: Rotate
) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, **MODELS[model])
    changes = {
        "compile__enforce_eager": True,
        "model__dtype": dtype,
        "scheduler__max_num_batched_tokens": 24,
    }

    async def run() -> list[Any]:
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            # One after the other: reference attention rounds by how prompts were cut into chunks.
            results = [
                await engine.generate(prompt, SCORED) for prompt in random_prompts(4, longest=40)
            ]
        return [(result.completions, result.prompt_logprobs) for result in results]

    expected = await run()
    calls = rotate_in_op()
    assert await run() == expected
    assert calls


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
async def test_captured_steps_give_the_same_tokens(
    model: str,
    depth: int,
    tmp_path: Path,
    reference_attention: None,
    rotate_in_op: Rotate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, **MODELS[model])
    prompts = random_prompts(8, longest=40)
    params = SamplingParams(temperature=0, max_tokens=16)

    async def run(**changes: Any) -> list[list[int]]:
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            assert_idle(engine)
        return [result.token_ids for result in results]

    expected = await run()
    calls = rotate_in_op()
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    assert await run(**CAPTURED, scheduler__pipeline_depth=depth) == expected
    # Padded to the ladder's rungs, and nothing else.
    assert calls
    assert set(calls) <= {1, 2, 4, 8, 16, 24, 32, 40} | set(range(41, 400))


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_calls_leave_slices_of_one_projection(tmp_path: Path) -> None:
    with mixers_rotate():
        model = load_model(make_checkpoint(tmp_path, "qwen3"))
    torch._dynamo.reset()
    counters.clear()
    for call in model.program.calls[:2]:
        names = call.chain.reads
        compiled = CompiledFunction(run_chain, range(2, 2 + len(names)), 64)
        for tokens in (7, 1, 2, 33):
            ids, positions = torch.arange(3, 3 + tokens), torch.arange(tokens)
            known = {INPUT_IDS: ids, POSITIONS: positions}
            given = [known[name] if name in known else torch.randn(tokens, 64) for name in names]
            arguments = (call.chain, model.bound[call.slot], *given)
            got, expected = compiled(*arguments), run_chain(*arguments)
            torch.testing.assert_close(got, expected)
            ours, theirs = (dict(zip(call.chain.writes, r, strict=True)) for r in (got, expected))
            base = ours["query"].untyped_storage().data_ptr()
            for name in ("query", "key", "value"):
                assert ours[name].stride()[1:] == theirs[name].stride()[1:]
                assert ours[name].untyped_storage().data_ptr() == base
    assert counters["stats"]["unique_graphs"] == 2
