"""Prompts that are seen and not pooled (`include_prompt: false`), as in sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.core.errors import InvalidRequestError
from src.engine.client import AsyncEngine
from tests.engine.test_embeddings import TOLERANCE, check, states
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import assert_idle, small_config

pytestmark = pytest.mark.anyio

PROMPTS = {
    "query": "Represent the question for retrieving the documents that answer it: ",
    "passage": "the lazy text: ",
    # A special token at its end is taken for one that the tokenizer has put there.
    "turn": "a turn <|im_end|>",
    "none": "",
    "part": "quic",
}
TEXTS = ["fox", "the quick brown fox jumps over the lazy dog", "jumps over " * 6]
BOTH_WAYS = [False, True]


def make_model(directory: Path, kind: str, mode: str, default: str | None = None) -> Path:
    if kind == "encoder":
        make_encoder(directory, "bert", max_position_embeddings=300)
        save_encoder_tokenizer(directory)
    else:
        make_checkpoint(directory, "qwen3", tokenizer=True)
    save_modules(
        directory,
        pooling={"pooling_mode": mode, "include_prompt": False},
        normalizes=False,
        prompts=PROMPTS,
        default_prompt=default,
    )
    return directory


def reference_of(directory: Path, kind: str) -> Any:
    is_encoder = kind == "encoder"
    return load_encoder_reference(directory) if is_encoder else load_reference(directory).model


def pooled(engine: AsyncEngine, reference: Any, prompt: str, text: str, mode: str) -> Tensor:
    """The formula of sentence-transformers' `Pooling`, from its mask on.

    The prompt's length is that of `Transformer._get_prompt_length`: all of its tokens, except a
    special one at the end.
    """
    encode = engine.tokenizer.encode
    hidden = states(reference, encode(prompt + text))
    prompt_len = 0
    if prompt:
        alone = encode(prompt)
        prompt_len = len(alone) - (alone[-1] in engine.tokenizer.special_ids)
    mask = torch.ones(len(hidden), dtype=torch.double)
    mask[:prompt_len] = 0
    if mode == "cls":
        return hidden[mask.argmax()]
    if mode == "lasttoken":
        return hidden[len(mask) - 1 - mask.flip(0).argmax()]
    return (hidden * mask[:, None]).sum(0) / mask.sum().clamp(min=1e-9)


@pytest.mark.parametrize("is_deterministic", BOTH_WAYS)
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
async def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, kind: str, mode: str, is_deterministic: bool
) -> None:
    """Of a decoder in steps of 16 tokens: whole ones have the prompt alone, another has its end."""
    directory = make_model(tmp_path, kind, mode)
    reference = reference_of(directory, kind)
    most = {"encoder": 400, "decoder": 16}[kind]
    config = small_config(
        directory,
        scheduler__max_num_batched_tokens=most,
        model__deterministic=is_deterministic,
    )
    async with AsyncEngine.open(config) as engine:
        if kind == "decoder":
            assert len(engine.tokenizer.encode(PROMPTS["query"])) > 2 * most
        for name in (None, *PROMPTS):
            prompt = "" if name is None else PROMPTS[name]
            together = await engine.embed(TEXTS, prompt_name=name)
            for text, made in zip(TEXTS, together, strict=True):
                check(made.vector, pooled(engine, reference, prompt, text, mode))
                assert made.prompt_tokens == len(engine.tokenizer.encode(prompt + text))
            if is_deterministic:
                (alone,) = await engine.embed(TEXTS[1:2], prompt_name=name)
                assert alone.vector == together[1].vector
        assert_idle(engine)


async def test_a_default_prompt_token_ids_and_vectors_of_tokens(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "encoder", "mean", default="passage")
    reference = reference_of(directory, "encoder")
    async with AsyncEngine.open(small_config(directory)) as engine:
        text, encode = TEXTS[1], engine.tokenizer.encode
        whole = encode(PROMPTS["passage"] + text)
        (by_default,) = await engine.embed([text])
        check(by_default.vector, pooled(engine, reference, PROMPTS["passage"], text, "mean"))
        (unnamed,) = await engine.embed([text], prompt_name="none")
        check(unnamed.vector, pooled(engine, reference, "", text, "mean"))
        # Nothing is put before token ids, so that nothing of them is left out.
        of_ids = await engine.embed([whole, text])
        check(of_ids[0].vector, states(reference, whole).mean(0))
        assert of_ids[1].vector == pytest.approx(by_default.vector, abs=TOLERANCE)
        # Without special tokens none is taken off the prompt's end.
        (bare,) = await engine.embed([text], add_special_tokens=False)
        own = encode(PROMPTS["passage"], add_special_tokens=False)
        hidden = states(reference, encode(PROMPTS["passage"] + text, add_special_tokens=False))
        check(bare.vector, hidden[len(own) :].mean(0))
        # Each token has its own vector, those of prompts too.
        (tokens,) = await engine.encode([text], task="token_embed")
        got = torch.tensor(tokens.values.tolist(), dtype=torch.double)
        torch.testing.assert_close(got, states(reference, whole), rtol=TOLERANCE, atol=TOLERANCE)


async def test_cosines_of_queries_and_passages(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "encoder", "mean")
    reference = reference_of(directory, "encoder")
    async with AsyncEngine.open(small_config(directory)) as engine:
        (made,) = await engine.score([(TEXTS[0], TEXTS[1])])
        query = pooled(engine, reference, PROMPTS["query"], TEXTS[0], "mean")
        passage = pooled(engine, reference, PROMPTS["passage"], TEXTS[1], "mean")
        want = float(torch.nn.functional.cosine_similarity(query, passage, dim=0))
        assert made.score == pytest.approx(want, abs=TOLERANCE)


async def test_a_cut_leaves_a_token_behind_the_prompt(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "encoder", "mean")
    reference = reference_of(directory, "encoder")
    async with AsyncEngine.open(small_config(directory)) as engine:
        encode = engine.tokenizer.encode
        alone, whole = encode(PROMPTS["query"]), encode(PROMPTS["query"] + TEXTS[1])
        # [CLS] and the prompt are left out; a token of the text and [SEP] are pooled.
        least = len(alone) + 1
        (made,) = await engine.embed([TEXTS[1]], truncate=least, prompt_name="query")
        kept = [*whole[: least - 1], whole[-1]]
        check(made.vector, states(reference, kept)[len(alone) - 1 :].mean(0))
        for truncate in (least - 1, least - 2, 2, 1):
            with pytest.raises(InvalidRequestError, match="leaves no token of the text") as caught:
                await engine.embed([TEXTS[1]], truncate=truncate, prompt_name="query")
            assert caught.value.param == "truncate_prompt_tokens"
        # The prompt's end and the text are one token, so that no token is the text's alone.
        with pytest.raises(InvalidRequestError, match="leaves the first 5 out") as caught:
            await engine.embed(["fox", "k"], prompt_name="part")
        assert caught.value.param == "input"
        assert "input[1]" in caught.value.message
        assert_idle(engine)
