"""The engine on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.ops import ROTATE_AND_CACHE
from tests.architectures.check import errors_of
from tests.architectures.tiny import make_tiny
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.no_waiting import watch_on_cuda
from tests.support.probe import Probe
from tests.support.rotation import rotates_in_mixers

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

GREEDY = SamplingParams(temperature=0, max_tokens=24)
CUDA = {"device__type": "cuda", "cache__block_size": 16, "cache__memory_fraction": 0.05}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("eager", [True, False])
async def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Path, reference: Any, depth: int, eager: bool
) -> None:
    prompts = random_prompts(12, longest=40)
    config = small_config(
        checkpoint,
        **CUDA,
        scheduler__pipeline_depth=depth,
        compile__enforce_eager=eager,
        compile__startup="wait",
    )
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 24)


@pytest.mark.parametrize("graphs", ["off", "wait"])
@pytest.mark.parametrize(
    "model",
    [
        {"architecture": "qwen3", "head_dim": 24},
        {"architecture": "qwen3", "head_dim": 128, "attention_bias": True},
        {"architecture": "llama", "rope": "llama3"},
        {"architecture": "mistral", "sliding_window": 8},
    ],
)
async def test_norms_rotation_and_cache_writes_of_one_kernel_are_those_of_transformers(
    model: dict[str, Any], graphs: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, **model)
    oracle, prompts = load_reference(directory), random_prompts(12, longest=40)
    config = small_config(
        directory,
        **CUDA,
        compile__enforce_eager=False,
        compile__startup="off",
        compile__cuda_graphs=graphs,
        compile__cuda_graph_max_tokens=64,
    )
    async with AsyncEngine.open(config) as engine:
        assert rotates_in_mixers(Probe(engine).model)
        results = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        assert_idle(engine)
    assert ROTATE_AND_CACHE.active("cuda").name == "triton"
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(oracle, prompt, 24)


async def test_seeded_requests_get_the_tokens_that_a_cpu_gives(checkpoint: Path) -> None:
    prompts = random_prompts(8, longest=30, seed=9)
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=i, max_tokens=16)
        for i in range(8)
    ]

    async def run(**changes: Any) -> list[list[int]]:
        async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
            results = await asyncio.gather(
                *(engine.generate(p, q) for p, q in zip(prompts, params, strict=True))
            )
        return [result.token_ids for result in results]

    on_cuda = await run(**CUDA)
    assert await run(**CUDA, scheduler__pipeline_depth=1) == on_cuda
    # Float near-ties may fall the other way on other hardware, and then the rest differs.
    on_cpu = await run()
    assert sum(a == b for a, b in zip(on_cuda, on_cpu, strict=True)) >= 6


async def test_no_step_waits_for_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the writing of rows to the launch of its copy-out, a synchronization is an error."""
    async with AsyncEngine.open(small_config(checkpoint, **CUDA)) as engine:
        # The first requests compile Triton's kernels, which waits.
        prompts = random_prompts(12, longest=40)
        every = SamplingParams(
            max_tokens=8,
            seed=1,
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={5: 1.0},
            bad_words=("the end",),
            min_tokens=4,
            logprobs=3,
        )
        await asyncio.gather(*(engine.generate(prompt, every) for prompt in prompts))
        seen = watch_on_cuda(monkeypatch)
        results = await asyncio.gather(*(engine.generate(prompt, every) for prompt in prompts))
        assert all(1 <= len(result.token_ids) <= 8 for result in results)
        assert seen
        assert_idle(engine)


async def test_the_log_says_what_attends(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "src.engine"):
        async with AsyncEngine.open(small_config(checkpoint, **CUDA)):
            pass
    chosen = next(line for line in caplog.messages if line.startswith("attention: "))
    # The checkpoint is in float32, which is no library's.
    assert chosen.startswith("attention: triton serves prefill and decode; flash_attention_3 takes")
    assert any("attention triton, context" in line for line in caplog.messages)


@pytest.mark.alone
async def test_the_largest_step_fits_beside_kv_memory_that_takes_the_rest(
    tmp_path: Path,
) -> None:
    # Wide, and of a large vocabulary: what a step takes is not little beside its weights.
    directory = make_checkpoint(
        tmp_path,
        tokenizer=True,
        vocab_size=128_000,
        hidden_size=2048,
        intermediate_size=16_384,
        num_hidden_layers=2,
        max_position_embeddings=16_384,
    )
    config = small_config(
        directory,
        device__type="cuda",
        cache__block_size=16,
        # More than the default, which has some to spare.
        cache__memory_fraction=0.98,
        scheduler__max_num_seqs=256,
        scheduler__max_num_batched_tokens=16_384,
        compile__enforce_eager=True,
    )
    demanding = SamplingParams(
        max_tokens=4, ignore_eos=True, top_p=0.9, top_k=50, frequency_penalty=0.5, logprobs=5
    )
    async with AsyncEngine.open(config) as engine:
        long = [5 + n % 250 for n in range(16_000)]
        await engine.generate(long, demanding)
        prompts = random_prompts(256, longest=64)
        results = await asyncio.gather(*(engine.generate(p, demanding) for p in prompts))
        assert all(len(result.token_ids) == 4 for result in results)
        assert_idle(engine)


def watch_compiled_code(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count calls of what Inductor has compiled, by thread."""
    from torch._inductor.output_code import CompiledFxGraph

    run, calls = CompiledFxGraph.__call__, Counter[int]()

    def counted(self: CompiledFxGraph, inputs: Any) -> Any:
        calls[threading.get_ident()] += 1
        return run(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", counted)
    return calls


@pytest.mark.parametrize("architecture", ["phi", "gpt2", "olmoe", "starcoder2"])
async def test_models_of_transformers_are_compiled_and_captured(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_calls = watch_compiled_code(monkeypatch)
    make_tiny(tmp_path, architecture)
    prompts = random_prompts(12, longest=40)
    # In other dtypes torch reads the offsets of experts on the host, which no capture allows.
    dtype = torch.bfloat16 if architecture == "olmoe" else torch.float32
    params = GREEDY.__replace__(logprobs=3) if dtype == torch.bfloat16 else GREEDY
    config = small_config(
        tmp_path,
        **CUDA,
        model__dtype=str(dtype).removeprefix("torch."),
        model__implementation="transformers",
        compile__enforce_eager=False,
        compile__cuda_graphs="wait",
    )
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert Probe(engine).code.graph_stats.steps["decode"] > 0
        assert_idle(engine)
    # While the layers are compiled, and on the thread of the device for what is captured.
    assert len(compiled_calls) > 1
    oracle = load_reference(tmp_path, dtype)
    if dtype == torch.float32:
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == greedy(oracle, prompt, 24)
        return
    # Where two experts are nearly as good, rounding decides, and then a token's numbers are others.
    both = zip(prompts, results, strict=True)
    errors = [error for prompt, result in both for error in errors_of(oracle, prompt, result)]
    assert median(errors) < 0.1
