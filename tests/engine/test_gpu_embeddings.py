"""Vectors on a CUDA device: `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.classifiers import (
    SEQUENCE,
    TOKEN,
    load_classifier_reference,
    make_classifier,
    reference_logits,
    with_words,
)
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_dense,
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


def check(got: Any, want: torch.Tensor, tolerance: float = 1e-3) -> None:
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


@pytest.mark.parametrize("ending", [SEQUENCE, TOKEN])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
async def test_labels_of_texts_and_of_tokens(tmp_path: Path, name: str, ending: str) -> None:
    directory = make_classifier(tmp_path, name, ending)
    reference = load_classifier_reference(directory, ending)
    prompts = random_prompts(30, longest=90)
    config = small_config(directory, **CUDA, scheduler__max_num_batched_tokens=256)
    async with AsyncEngine.open(config) as engine:
        if ending == TOKEN:
            encoded = await engine.encode(prompts, task="token_classify", use_activation=False)
            made = [each.values.tolist() for each in encoded]
        else:
            made = [each.probs for each in await engine.classify(prompts, use_activation=False)]
        assert_idle(engine)
    for prompt, numbers in zip(prompts, made, strict=True):
        want = reference_logits(reference, prompt)
        got = torch.tensor(numbers, dtype=torch.float64).view_as(want)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("graphs", ["off", "wait"])
async def test_scores_by_yes_and_no_beside_streams_of_text(tmp_path: Path, graphs: str) -> None:
    directory = with_words(make_checkpoint(tmp_path, "qwen3", max_position_embeddings=1024))
    whole, asked = load_reference(directory), random_prompts(6, longest=20, seed=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    config = small_config(
        directory,
        **CUDA,
        compile__enforce_eager=False,
        compile__startup="off",
        compile__cuda_graphs=graphs,
        model__tasks=("generate", "score"),
        scheduler__max_num_batched_tokens=64,
    )
    pairs = [("a small engine", text) for text in ("the long train", "fox", "12 plus 30 makes 42")]
    async with AsyncEngine.open(config) as engine:
        texts = asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
        made = await engine.score(pairs * 8, use_activation=False)
        results = await texts
        yes, no = (engine.tokenizer.token_to_id(word) for word in ("yes", "no"))
        tokenizer, recipe = engine.tokenizer, engine.model_info.scoring
        assert_idle(engine)
    assert recipe is not None
    assert recipe.built_in is not None
    before, between, behind = recipe.built_in
    for prompt, result in zip(asked, results, strict=True):
        assert result.token_ids == greedy(whole, prompt, 12)
    for (query, document), score in zip(pairs * 8, made, strict=True):
        ids = tokenizer.encode(f"{before}{query}{between}{document}{behind}", False)
        with torch.inference_mode():
            logits = whole(torch.tensor([ids])).logits[0, -1]
        want = float(logits[yes] - logits[no])
        assert score.score == pytest.approx(want, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_vectors_of_tokens_and_projections_behind_the_pooling(
    tmp_path: Path, name: str
) -> None:
    encodes = name == "encoder"
    if encodes:
        save_encoder_tokenizer(make_encoder(tmp_path, "bert"))
    else:
        make_checkpoint(tmp_path, "qwen3", tokenizer=True)
    save_modules(tmp_path, pooling={"pooling_mode": "mean"}, behind=["Dense"])
    tanh = "torch.nn.modules.activation.Tanh"
    weights = save_dense(tmp_path / "2_Dense", 64, 96, activation=tanh)
    weight, bias = (each.double() for each in weights.values())
    body = load_encoder_reference(tmp_path) if encodes else load_reference(tmp_path).model
    prompts = random_prompts(30, longest=90, seed=3)
    budget = 256 if encodes else 64
    config = small_config(tmp_path, **CUDA, scheduler__max_num_batched_tokens=budget)
    async with AsyncEngine.open(config) as engine:
        made = await engine.embed(prompts)
        of_tokens = await engine.encode(prompts, task="token_embed", use_activation=False)
        assert_idle(engine)
    for prompt, embedding, tokens in zip(prompts, made, of_tokens, strict=True):
        hidden = states(body, prompt)
        check(embedding.vector, (weight @ hidden.mean(0) + bias).tanh())
        got = torch.tensor(tokens.values.tolist(), dtype=torch.float64).view_as(hidden)
        torch.testing.assert_close(got, hidden, rtol=1e-3, atol=1e-3)
