"""Labels and scores all ways: with adapters, compiled, to the same bits, traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from src.core.errors import InvalidRequestError, ModelNotFoundError
from src.engine.client import AsyncEngine
from src.observability.tracing import providers
from tests.support.adapters import make_adapter, merged_into
from tests.support.classifiers import (
    load_classifier_reference,
    make_classifier,
    reference_logits,
)
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
EAGER = {"compile__enforce_eager": True}
COMPILED = {"compile__enforce_eager": False, "compile__startup": "wait"}


def check(got: Any, want: torch.Tensor) -> None:
    made = torch.from_numpy(np.asarray(got, np.float64).copy())
    torch.testing.assert_close(made, want, rtol=TOLERANCE, atol=TOLERANCE)


BERT_MODULES = ("query", "key", "value", "dense")


@pytest.mark.parametrize("name", ["bert", "qwen3"])
async def test_labels_with_adapters_are_those_of_the_merged_model(
    tmp_path: Path, name: str
) -> None:
    directory = make_classifier(tmp_path / "base", name)
    reference = load_classifier_reference(directory)
    # The pooler is of the head, which takes no adapter.
    within = {"within": "layer"} if name == "bert" else {}
    fields = {"targets": BERT_MODULES} if name == "bert" else {}
    adapter = make_adapter(tmp_path / "adapter", reference, task_type="SEQ_CLS", **within, **fields)
    prompts = random_prompts(12, longest=40, seed=5)
    with_adapter = merged_into(load_classifier_reference(directory), adapter)
    config = small_config(directory, lora__adapters={"mine": str(adapter)}, **EAGER)
    async with AsyncEngine.open(config) as engine:
        mine = await engine.classify(prompts, use_activation=False, lora="mine")
        plain = await engine.classify(prompts, use_activation=False)
        again = await engine.classify(prompts, use_activation=False, lora="mine")
        with pytest.raises(ModelNotFoundError, match="no adapter `other` is loaded"):
            await engine.classify(prompts, lora="other")
        wrong: Any = 5
        with pytest.raises(InvalidRequestError, match="lora: expected str"):
            await engine.classify(prompts, lora=wrong)
        assert_idle(engine)
    for prompt, one, other, third in zip(prompts, mine, plain, again, strict=True):
        check(one.probs, reference_logits(with_adapter, prompt))
        check(other.probs, reference_logits(reference, prompt))
        check(third.probs, reference_logits(with_adapter, prompt))


async def test_vectors_with_an_adapter_of_a_model_without_its_head(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "base", "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"}, normalizes=False)
    adapter = make_adapter(
        tmp_path / "adapter",
        load_encoder_reference(directory),
        targets=BERT_MODULES,
        within="encoder.layer",
        task_type="FEATURE_EXTRACTION",
    )
    changed = merged_into(load_encoder_reference(directory), adapter)
    prompts = random_prompts(6, longest=40)
    config = small_config(directory, lora__adapters={"mine": str(adapter)}, **EAGER)
    async with AsyncEngine.open(config) as engine:
        made = await engine.embed(prompts, lora="mine")
    for prompt, embedding in zip(prompts, made, strict=True):
        with torch.inference_mode():
            states = changed(torch.tensor([prompt])).last_hidden_state[0].double()
        check(embedding.vector, states.mean(0))


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
async def test_labels_are_the_same_bits_however_texts_are_batched(
    tmp_path: Path, name: str
) -> None:
    directory = make_classifier(tmp_path, name)
    prompts = random_prompts(24, longest=60, seed=4)
    found = []
    for budget, rows in ((130, 8), (200, 3)) if name != "qwen3" else ((9, 8), (200, 3)):
        config = small_config(
            directory,
            model__deterministic=True,
            scheduler__max_num_batched_tokens=budget,
            scheduler__max_num_seqs=rows,
        )
        async with AsyncEngine.open(config) as engine:
            together = await engine.classify(prompts, use_activation=False)
            alone = [
                (await engine.classify([prompt], use_activation=False))[0] for prompt in prompts
            ]
        found += [[each.numbers for each in together], [each.numbers for each in alone]]
    assert all(numbers == found[0] for numbers in found)


@pytest.mark.compilers
@pytest.mark.parametrize("name", ["bert", "distilbert", "llama"])
@pytest.mark.parametrize("labels", [1, 3])
async def test_compiled_code_gives_the_same_labels(tmp_path: Path, name: str, labels: int) -> None:
    directory = make_classifier(tmp_path, name, labels=labels)
    reference, prompts = load_classifier_reference(directory), random_prompts(12, longest=40)
    async with AsyncEngine.open(small_config(directory, **COMPILED)) as engine:
        assert engine.stats.compiled
        made = await engine.classify(prompts, use_activation=False)
        if labels == 1 and name == "bert":
            (pair,) = await engine.score([("fox", "engine")], use_activation=False)
            ids = engine.tokenizer.encode_pair("fox", "engine")
            check([pair.score], reference_logits(reference, ids.ids, ids.types))
    for prompt, result in zip(prompts, made, strict=True):
        check(result.probs, reference_logits(reference, prompt))


async def test_a_span_of_a_call_has_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(providers, "span_exporters", lambda settings: [memory])
    directory = make_classifier(tmp_path, "bert", labels=1)
    async with AsyncEngine.open(small_config(directory)) as engine:
        await engine.score([("fox", "engine"), ("fox", "hill")], request_id="mine")
        with pytest.raises(InvalidRequestError):
            await engine.classify([""])
    spans = {span.name: span for span in memory.get_finished_spans()}
    name = directory.name
    scored, failed = spans[f"score {name}"], spans[f"classify {name}"]
    assert scored.attributes["slipstream.task"] == "score"
    assert scored.attributes["slipstream.texts"] == 2
    assert scored.attributes["gen_ai.response.id"] == "mine"
    assert scored.attributes["gen_ai.usage.input_tokens"] > 6
    assert failed.attributes["error.type"] == "InvalidRequestError"
