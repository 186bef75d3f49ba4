"""Models that give vectors, through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.errors import ConfigError, ModelLoadError
from src.engine.client import AsyncEngine
from tests.architectures.check import error_of_vector
from tests.architectures.tiny import make_tiny_encoder
from tests.engine.test_embeddings import ROUNDED, check, least_cosine, states, unit
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.encoders import (
    BOTH_WAYS,
    load_encoder_reference,
    make_encoder,
    save_dense,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

NEW = ("modernbert", *BOTH_WAYS)
MEAN = {"pooling_mode": "mean"}
WAYS = [
    pytest.param({}, id="eager"),
    pytest.param({"model__deterministic": True}, id="deterministic"),
    pytest.param(
        {"compile__enforce_eager": False, "compile__startup": "wait"},
        id="compiled",
        marks=[pytest.mark.compilers, pytest.mark.timeout(900)],
    ),
]


@pytest.mark.parametrize("changes", WAYS)
@pytest.mark.parametrize("name", NEW)
async def test_vectors_alone_and_packed_among_others(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    directory = make_encoder(tmp_path, name)
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling=MEAN, behind=["Normalize", "Dense", "Normalize"])
    gelu = "torch.nn.modules.activation.GELU"
    weights = save_dense(directory / "3_Dense", 64, 41, activation=gelu)
    weight, bias = (each.double() for each in weights.values())
    reference, prompts = load_encoder_reference(directory), random_prompts(24, longest=70, seed=5)
    config = small_config(directory, scheduler__max_num_batched_tokens=130, **changes)
    async with AsyncEngine.open(config) as engine:
        together = await engine.embed(prompts)
        alone = [(await engine.embed([prompt]))[0] for prompt in prompts[:6]]
        assert engine.model_info.tasks[0] == "embed"
        assert engine.stats.compiled == ("compile__startup" in changes)
        assert_idle(engine)
    for prompt, embedding in zip(prompts, together, strict=True):
        inner = weight @ unit(states(reference, prompt).mean(0)) + bias
        check(embedding.vector, unit(torch.nn.functional.gelu(inner)))
    for first, second in zip(alone, together[:6], strict=True):
        if "model__deterministic" in changes:
            assert first.vector == second.vector
        else:
            assert first.vector == pytest.approx(second.vector, abs=1e-5)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", ["modernbert", "gemma3_text"])
async def test_rounded_weights(tmp_path: Path, name: str, kind: str) -> None:
    directory = make_encoder(tmp_path, name)
    save_encoder_tokenizer(directory)
    reference, prompts = load_encoder_reference(directory), random_prompts(20, longest=60, seed=6)
    least = least_cosine(name, kind)
    async with AsyncEngine.open(small_config(directory, **ROUNDED[kind])) as engine:
        made = await engine.embed(prompts)
    wanted = torch.stack([unit(states(reference, prompt).mean(0)) for prompt in prompts])
    for index, embedding in enumerate(made):
        vector = torch.tensor(embedding.vector, dtype=torch.float64)
        cosines = torch.nn.functional.cosine_similarity(vector[None], wanted)
        assert cosines[index] > least
        assert int(cosines.argmax()) == index


async def test_the_files_of_embedding_gemma(tmp_path: Path) -> None:
    """Mean, two projections without biases, a normalization, and prompts of which none is given."""
    directory = make_encoder(tmp_path, "gemma3_text")
    save_encoder_tokenizer(directory)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    behind = ["Dense", "Dense", "Normalize"]
    save_modules(directory, pooling=MEAN, behind=behind, prompts=prompts, max_seq_length=100)
    weights = [
        save_dense(directory / name, *sizes, bias=False)["linear.weight"].double()
        for name, sizes in (("2_Dense", (64, 256)), ("3_Dense", (256, 64)))
    ]
    reference = load_encoder_reference(directory)
    async with AsyncEngine.open(small_config(directory)) as engine:
        for name, text in (("query", "fox"), ("document", "the lazy dog"), (None, "fox")):
            (made,) = await engine.embed([text], prompt_name=name)
            tokens = await engine.tokenize(prompts.get(name or "", "") + text)
            mean = states(reference, tokens).mean(0)
            check(made.vector, unit(weights[1] @ (weights[0] @ mean)))


@pytest.mark.parametrize("has_prefix", [True, False])
async def test_the_files_of_qwen3_embedding(tmp_path: Path, has_prefix: bool) -> None:
    """The last token's state, normalized; its tensors have no prefix, its class is a decoder's."""
    directory = make_checkpoint(tmp_path, "qwen3", tokenizer=True, tie=True)
    if not has_prefix:
        from safetensors.torch import load_file, save_file

        file = directory / "model.safetensors"
        tensors = load_file(file)
        save_file({name.removeprefix("model."): each for name, each in tensors.items()}, file)
    flags = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}
    query = "Instruct: find what answers the query\nQuery:"
    prompts = {"query": query, "document": ""}
    save_modules(directory, pooling=flags | {"include_prompt": True}, prompts=prompts)
    reference = load_reference(make_checkpoint(tmp_path / "same", "qwen3", tie=True)).model
    texts = random_prompts(8, longest=80, seed=4)
    async with AsyncEngine.open(
        small_config(directory, scheduler__max_num_batched_tokens=32)
    ) as engine:
        assert engine.model_info.tasks[:2] == ("generate", "embed")
        for text, made in zip(texts, await engine.embed(texts), strict=True):
            check(made.vector, unit(states(reference, text)[-1]))
        (named,) = await engine.embed(["fox"], prompt_name="query")
        tokens = await engine.tokenize(query + "fox")
        check(named.vector, unit(states(reference, tokens)[-1]))


# Each for something that the others lack: factored embeddings and one layer for all, embeddings of
# another size, positions behind a padding token's, RoPE, gated MLPs, norms before blocks, adapters
# by language, a mask of what is padding.
GENERIC = (
    *("albert", "electra", "camembert", "nomic_bert", "eurobert", "roberta-prelayernorm"),
    *("xmod", "esm"),
)


@pytest.mark.parametrize("name", GENERIC)
async def test_encoders_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModel

    make_tiny_encoder(tmp_path, name, has_head=name == "camembert")
    prompts = random_prompts(20, longest=60, seed=7)
    config = small_config(tmp_path, model__max_model_len=64, scheduler__max_num_batched_tokens=300)
    async with AsyncEngine.open(config) as engine:
        assert engine.model_info.implementation == "transformers"
        assert engine.model_info.tasks[0] == "embed"
        together = await engine.embed(prompts)
        (alone,) = await engine.embed(prompts[:1])
        assert_idle(engine)
    reference = AutoModel.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, embedding in zip(prompts, together, strict=True):
        assert error_of_vector(reference, prompt, embedding) < 1e-4
    assert alone.vector == pytest.approx(together[0].vector, abs=1e-5)


async def test_more_tokens_in_a_step_than_the_longest_text_has(tmp_path: Path) -> None:
    """Kinds of tokens are kept for the longest text alone."""
    make_tiny_encoder(tmp_path, "electra")
    config = small_config(tmp_path, scheduler__max_num_batched_tokens=1000)
    prompts = [list(range(3, 250)), *random_prompts(8, longest=200, seed=9)]
    async with AsyncEngine.open(config) as engine:
        assert engine.model_info.max_model_len == 256
        made = await engine.embed(prompts)
        (alone,) = await engine.embed(prompts[-1:])
    assert alone.vector == pytest.approx(made[-1].vector, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpnet", "position biases"),
        ("deberta-v2", "position biases|attention interface"),
        ("convbert", "attention interface"),
        # Three tokens beside each other make an embedding.
        ("mobilebert", "a text beside another does not get what it gets alone"),
        ("fnet", "attention interface|calls no attention"),
    ],
)
async def test_encoders_that_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    make_tiny_encoder(tmp_path, name)
    with pytest.raises(ModelLoadError, match=message):
        async with AsyncEngine.open(small_config(tmp_path)):
            pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "auto_map"),
        ({"architectures": ["AlbertForQuestionAnswering"]}, "has a head that is not served"),
    ],
)
async def test_what_an_encoder_of_transformers_does_not_do(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    make_tiny_encoder(tmp_path, "albert")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ModelLoadError, match=message):
        async with AsyncEngine.open(small_config(tmp_path)):
            pass


async def test_rounding_an_encoder_of_transformers_is_refused(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "albert")
    with pytest.raises((ModelLoadError, ConfigError), match="quantization"):
        async with AsyncEngine.open(small_config(tmp_path, model__quantization="int8")):
            pass
