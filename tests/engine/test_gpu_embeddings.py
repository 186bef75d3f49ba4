"""Vectors on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import assert_idle, greedy, random_prompts, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

CUDA = {
    "device__type": "cuda",
    "cache__block_size": 16,
    "cache__memory_fraction": 0.03,
    "compile__cuda_graph_max_tokens": 32,
}


@torch.inference_mode()
def states(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).last_hidden_state[0].double()


def check(got: list[float], want: torch.Tensor, tolerance: float = 1e-3) -> None:
    vector = torch.tensor(got, dtype=torch.float64)
    torch.testing.assert_close(vector, want, rtol=tolerance, atol=tolerance)
    assert torch.nn.functional.cosine_similarity(vector, want, dim=0) > 1 - 1e-5


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "gemma3_text"])
async def test_vectors_of_an_encoder_are_those_of_transformers(
    tmp_path: Path, name: str, eager: bool
) -> None:
    directory = make_encoder(tmp_path, name)
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"}, normalizes=False)
    reference, prompts = load_encoder_reference(directory), random_prompts(40, longest=90)
    config = small_config(
        directory,
        **CUDA,
        compile__enforce_eager=eager,
        compile__startup="wait",
        scheduler__max_num_batched_tokens=256,
    )
    async with AsyncEngine.open(config) as engine:
        for prompt, embedding in zip(prompts, await engine.embed(prompts), strict=True):
            check(embedding.vector, states(reference, prompt).mean(0))
        assert_idle(engine)


@pytest.mark.parametrize("graphs", ["off", "wait"])
@pytest.mark.parametrize("pooling", ["cls", "mean", None])
async def test_a_decoder_embeds_beside_streams_of_text(
    tmp_path: Path, pooling: str | None, graphs: str
) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", tokenizer=True)
    if pooling is not None:
        save_modules(directory, pooling={"pooling_mode": pooling}, normalizes=False)
    whole = load_reference(directory)
    prompts, asked = random_prompts(20, longest=60, seed=3), random_prompts(6, longest=20, seed=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    config = small_config(
        directory,
        **CUDA,
        compile__enforce_eager=False,
        compile__startup="off",
        compile__cuda_graphs=graphs,
        scheduler__max_num_batched_tokens=64,
    )
    async with AsyncEngine.open(config) as engine:
        texts = asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
        embeddings = await engine.embed(prompts)
        results = await texts
        assert_idle(engine)
    for prompt, result in zip(asked, results, strict=True):
        assert result.token_ids == greedy(whole, prompt, 12)
    for prompt, embedding in zip(prompts, embeddings, strict=True):
        hidden = states(whole.model, prompt)
        want = {"cls": hidden[0], "mean": hidden.mean(0), None: hidden[-1]}[pooling]
        check(embedding.vector, want)
