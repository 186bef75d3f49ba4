"""Families and formats of weights on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from src import AsyncEngine, SamplingParams
from tests.architectures.check import errors_of
from tests.models.test_quantized_checkpoints import ROUNDED, WEIGHT_ONLY
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED
from tests.support.probe import Probe
from tests.support.quantized import write_quantized

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
CAPTURED = {
    "device__type": "cuda",
    "cache__block_size": 16,
    "cache__memory_fraction": 0.03,
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 32,
    # Prompts come in chunks, beside rows that decode.
    "scheduler__max_num_batched_tokens": 48,
}
COMPILED = CAPTURED | {"compile__startup": "wait"}
# Whose calls have parts of their own.
OWN_CALLS = ("cohere", "deepseekv2", "deepseekv3", "gpt_oss", "granite_moehybrid", "qwen3_moe",
             "qwen3next")  # fmt: skip
# Releases of transformers before 5.24 compute something else: gpt-oss's limit of activations is in
# their code, and the norm of Granite's Mamba layers is not one of groups.
IS_OLD = Version(transformers.__version__) < Version("5.24")
OTHERS = ("gpt_oss", "granite_moehybrid") if IS_OLD else ()
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
WEIGHTS = ("awq", "gptq-order-zeros", "packed-8-bits", "int8", "fp8-rows", "nvfp4")
INPUTS = ("fp8", "fp8-static", "fp8-blocks", "fbgemm", "w8a8-fp8", "w8a8-int8")


async def served(
    directory: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **changes: Any
) -> list[Any]:
    """The answers of an engine, in which captured steps of both kinds ran."""
    async with AsyncEngine.open(small_config(directory, **changes)) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        stats = Probe(engine).code.graph_stats
        # A step that is in flight when the last answer is complete may still name its row.
        while engine.stats.num_running:
            await asyncio.sleep(0.001)
        assert_idle(engine)
    assert stats.steps["decode"] > 0
    assert stats.steps["mixed"] > 0
    return results


def largest_median(reference: Any, prompts: list[list[int]], results: list[Any]) -> float:
    """Of the medians of log-probabilities' errors of each answer."""
    both = zip(prompts, results, strict=True)
    return max(median(errors_of(reference, prompt, result)) for prompt, result in both)


@pytest.mark.parametrize("family", [name for name in SHORT_SIGHTED if name not in OTHERS])
async def test_every_family_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family, tokenizer=True, **SHORT_SIGHTED[family])
    prompts = random_prompts(8, longest=70, seed=4)
    results = await served(directory, prompts, **CAPTURED)
    oracle = load_reference(directory)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(oracle, prompt, 12)


@pytest.mark.parametrize("family", [name for name in OWN_CALLS if name not in OTHERS])
async def test_compiled_families_of_calls_of_their_own(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint(tmp_path, family, tokenizer=True, dtype=torch.bfloat16)
    prompts = random_prompts(8, longest=70, seed=4)
    with caplog.at_level(logging.WARNING, "src"):
        results = await served(directory, prompts, **COMPILED)
    assert not [line for line in caplog.messages if "uncompiled" in line]
    assert largest_median(load_reference(directory, torch.bfloat16), prompts, results) < 0.1


@pytest.mark.parametrize("form", WEIGHTS)
async def test_compiled_quantized_weights(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_checkpoint(
        tmp_path / "plain", "qwen2", tokenizer=True, dtype=torch.bfloat16, **SHAPE
    )
    directory = write_quantized(plain, tmp_path / "quantized", *WEIGHT_ONLY[form][:2])
    prompts = random_prompts(8, longest=70, seed=4)
    with caplog.at_level(logging.WARNING, "src"):
        results = await served(directory, prompts, **COMPILED)
    assert not [line for line in caplog.messages if "uncompiled" in line]
    assert largest_median(load_reference(plain, torch.bfloat16), prompts, results) < 0.1


@pytest.mark.parametrize("form", INPUTS)
async def test_compiled_weights_with_rounded_inputs(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are as near to exact products of rounded inputs as transformers is in bfloat16."""
    section, pack, _, rounded = ROUNDED[form]
    plain = make_checkpoint(
        tmp_path / "plain", "qwen2", tokenizer=True, dtype=torch.bfloat16, **SHAPE
    )
    directory = write_quantized(plain, tmp_path / "quantized", section, pack)
    prompts = random_prompts(8, longest=70, seed=4)
    shown = GREEDY.__replace__(prompt_logprobs=0)
    with caplog.at_level(logging.WARNING, "src"):
        results = await served(directory, prompts, shown, **COMPILED)
    assert not [line for line in caplog.messages if "uncompiled" in line]

    def given(dtype: torch.dtype) -> list[torch.Tensor]:
        reference = load_reference(plain, dtype)
        for name, module in reference.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(
                    lambda _, inputs: (rounded(inputs[0].float()).to(dtype),)
                )
        found = []
        for prompt in prompts:
            with torch.inference_mode():
                every = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
            found.append(every[:-1].gather(1, torch.tensor([prompt[1:]]).T)[:, 0])
        return found

    both = given(torch.float32), given(torch.bfloat16)
    for result, exact, like_us in zip(results, *both, strict=True):
        got = torch.tensor([entry.logprob for entry in result.prompt_logprobs[1:]])
        # A value between two steps falls to either side, which is most of both.
        assert (got - exact).abs().mean() < 1.5 * (like_us - exact).abs().mean() + 0.05
