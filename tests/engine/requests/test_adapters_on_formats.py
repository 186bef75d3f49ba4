"""Adapters beside weights that a checkpoint has packed: PEFT's files mean what they always mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from src import AsyncEngine, SamplingParams
from tests.engine.requests.test_adapters import assert_as
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import random_prompts, small_config
from tests.support.gguf_files import Type, restore, write_gguf
from tests.support.quantized import gptq, write_quantized

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def gguf_file(directory: Path) -> tuple[Path, Path]:
    """A file of an architecture whose queries and keys the converter permutes."""
    plain = make_checkpoint(directory / "plain", "llama", tokenizer=True, num_hidden_layers=1)
    file = write_gguf(directory / "base.gguf", plain, "llama", lambda _: Type.Q8_0)
    return file, restore(file, plain, "llama", directory / "values")


def gptq_directory(directory: Path) -> tuple[Path, Path]:
    plain = make_checkpoint(directory / "plain", "llama", tokenizer=True, num_hidden_layers=1)
    return write_quantized(plain, directory / "packed", GPTQ, gptq()), plain


@pytest.mark.parametrize("make", [gguf_file, gptq_directory])
async def test_an_adapter_is_as_if_it_was_merged_into_the_values(
    tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    packed, values = make(tmp_path)
    path = make_adapter(tmp_path / "it", load_reference(values), seed=3, size=0.5)
    models = {None: load_reference(values), "it": merged(values, path)}
    config = small_config(
        packed,
        model__dtype="float32",
        lora__adapters={"it": str(path)},
        compile__enforce_eager=True,
    )
    prompts = random_prompts(4, longest=20, seed=5)
    async with AsyncEngine.open(config) as engine:
        jobs = [(prompt, name) for prompt in prompts for name in models]
        results = await asyncio.gather(
            *(engine.generate(prompt, GREEDY, lora=name) for prompt, name in jobs)
        )
    for (prompt, name), result in zip(jobs, results, strict=True):
        assert_as(models[name], prompt, result)
