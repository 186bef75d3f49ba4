"""Heads of encoders that transformers computes, through the engine, against transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.errors import InvalidRequestError, ModelLoadError
from src.engine.client import AsyncEngine
from tests.architectures.tiny import make_tiny_classifier
from tests.support.classifiers import (
    SEQUENCE,
    TOKEN,
    load_classifier_reference,
    reference_logits,
)
from tests.support.encoders import save_encoder_tokenizer
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
# Through the model's own pooler, a head with a layer, no kinds of tokens, and rotary positions.
FAMILIES = ("albert", "camembert", "electra", "ernie", "esm", "nomic_bert", "xlm-roberta-xl")


def small(directory: Path) -> Any:
    return small_config(directory, model__max_model_len=100)


@pytest.mark.parametrize("name", FAMILIES)
async def test_labels_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    make_tiny_classifier(tmp_path, name)
    reference, prompts = load_classifier_reference(tmp_path), random_prompts(12, longest=60)
    async with AsyncEngine.open(small(tmp_path)) as engine:
        assert engine.model_info.implementation == "transformers"
        assert engine.model_info.tasks == ("classify",)
        raw = await engine.classify(prompts, use_activation=False)
        made = await engine.classify(prompts)
        assert_idle(engine)
        with pytest.raises(InvalidRequestError, match="what it can do is classify"):
            await engine.embed(prompts)
    for prompt, numbers, probs in zip(prompts, raw, made, strict=True):
        want = reference_logits(reference, prompt)
        assert numbers.probs.tolist() == pytest.approx(want.tolist(), abs=TOLERANCE)
        assert probs.probs.tolist() == pytest.approx(want.softmax(0).tolist(), abs=TOLERANCE)
        assert probs.label == f"LABEL_{int(want.argmax())}"


@pytest.mark.parametrize("name", ["electra", "camembert"])
async def test_labels_of_tokens(tmp_path: Path, name: str) -> None:
    make_tiny_classifier(tmp_path, name, of_tokens=True)
    reference, prompts = load_classifier_reference(tmp_path, TOKEN), random_prompts(5, longest=40)
    async with AsyncEngine.open(small(tmp_path)) as engine:
        made = await engine.encode(prompts, task="token_classify", use_activation=False)
    for prompt, result in zip(prompts, made, strict=True):
        want = reference_logits(reference, prompt)
        assert result.shape == tuple(want.shape)
        found = torch.frombuffer(bytearray(result.numbers), dtype=torch.float32)
        assert found.tolist() == pytest.approx(want.flatten().tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["albert", "electra"])
async def test_a_cross_encoder_reads_the_kinds_of_tokens(tmp_path: Path, name: str) -> None:
    make_tiny_classifier(tmp_path, name, labels=1)
    save_encoder_tokenizer(tmp_path)
    reference = load_classifier_reference(tmp_path)
    pairs = [("a quick fox", "the lazy dog"), ("dog", "jumps over the fox"), ("a", "a")]
    async with AsyncEngine.open(small(tmp_path)) as engine:
        assert engine.model_info.tasks == ("classify", "score")
        made, alone, again = await asyncio.gather(
            engine.score(pairs, use_activation=False),
            engine.classify([first for first, _ in pairs], use_activation=False),
            engine.score(pairs, use_activation=False),
        )
        tokenizer = engine.tokenizer
    for (first, second), score, text, same in zip(pairs, made, alone, again, strict=True):
        ids, types, _ = tokenizer.encode_pair(first, second)
        assert any(types)
        want = float(reference_logits(reference, ids, types))
        assert score.score == pytest.approx(want, abs=TOLERANCE)
        assert same.score == pytest.approx(want, abs=TOLERANCE)
        # Others of the same steps have one kind of tokens.
        want_alone = float(reference_logits(reference, tokenizer.encode(first)))
        assert text.probs[0] == pytest.approx(want_alone, abs=TOLERANCE)
        assert abs(want - float(reference_logits(reference, ids))) > 1e-3


async def test_heads_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_classifier(tmp_path / "eurobert", "eurobert")
    make_tiny_classifier(tmp_path / "electra", "electra")
    config = tmp_path / "electra" / "config.json"
    plain = json.loads(config.read_text())
    cases = [
        (tmp_path / "eurobert", {}, "EuroBertForSequenceClassification: its head does not read"),
        (
            config.parent,
            {"architectures": ["ElectraForMultipleChoice"]},
            "without one, ElectraModel is",
        ),
        (config.parent, {"architectures": [f"Albert{SEQUENCE}"]}, "has a head that is not served"),
        (config.parent, {"id2label": {"0": 7, "1": "a", "2": "b"}}, "id2label"),
    ]
    for directory, changes, message in cases:
        if changes:
            config.write_text(json.dumps(plain | changes))
        with pytest.raises(ModelLoadError, match=message):
            async with AsyncEngine.open(small(directory)):
                pass
