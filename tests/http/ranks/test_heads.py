"""`/classify`, `/predict`, `/pooling`, `/score` and `/rerank` of models with heads."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from src.core.config import Config, ModelSection
from src.http import create_app
from src.text.tokenizer import Tokenizer
from tests.http.asking import client_of, post, refused
from tests.http.embeddings.conftest import embedding_client as embedding_client
from tests.support.checkpoints import make_checkpoint
from tests.support.classifiers import (
    TOKEN,
    load_classifier_reference,
    make_classifier,
    reference_logits,
    with_words,
)

pytestmark = pytest.mark.anyio

TEXTS = ["the quick brown fox", "a lazy dog"]
LONG = "the quick brown fox jumps over the lazy dog " * 30
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
LABELS = ["kind 0", "kind 1", "kind 2"]
CHAT = [{"role": "user", "content": "fox " * 150}]


@asynccontextmanager
async def serving(
    config: Config, directory: Path, **fields: Any
) -> AsyncIterator[httpx.AsyncClient]:
    model = ModelSection(path=str(directory), served_model_name=("tiny",), **fields)
    app = create_app(msgspec.structs.replace(config, model=model), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        async with client_of(app) as client:
            yield client


def scale_head(directory: Path, factor: float, bias: float) -> None:
    """Multiply the last layer's matrix, and give its numbers this much more."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["classifier.weight"] *= factor
    tensors["classifier.bias"] += bias
    save_file(tensors, file, {"format": "pt"})


class Served:
    """A model behind the server, and what transformers says by the same files."""

    def __init__(self, client: httpx.AsyncClient, directory: Path, *ending: str) -> None:
        self.client = client
        self.tokenizer = Tokenizer.from_directory(directory)
        self._reference = load_classifier_reference(directory, *ending)

    def logits(self, text: str) -> torch.Tensor:
        found: torch.Tensor = reference_logits(self._reference, self.tokenizer.encode(text))
        return found

    def pair(self, first: str, second: str) -> float:
        both = self.tokenizer.encode_pair(first, second)
        return float(reference_logits(self._reference, both.ids, list(both.types))[0])


@pytest.fixture(scope="module")
async def classifier(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Served]:
    directory = make_classifier(tmp_path_factory.mktemp("classes") / "tiny", "bert")
    async with serving(config, directory) as client:
        yield Served(client, directory)


@pytest.fixture(scope="module")
async def ranker(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Served]:
    directory = make_classifier(tmp_path_factory.mktemp("ranks") / "tiny", "bert", labels=1)
    async with serving(config, directory) as client:
        yield Served(client, directory)


def near(values: Any) -> Any:
    return pytest.approx([float(value) for value in values], abs=1e-4)


async def test_labels_are_those_that_transformers_gives(classifier: Served) -> None:
    client, ids = classifier.client, classifier.tokenizer.encode
    want = [classifier.logits(text) for text in TEXTS]
    for given in (TEXTS, [ids(text) for text in TEXTS]):
        body = await post(client, "/classify", model="tiny", input=given)
        assert [item["index"] for item in body["data"]] == [0, 1]
        for item, logits in zip(body["data"], want, strict=True):
            assert item["probs"] == near(logits.softmax(0))
            assert item["label"] == LABELS[int(logits.argmax())]
            assert item["num_classes"] == 3
        assert body["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in TEXTS)
    body = await post(client, "/classify", input=TEXTS[0], activation=True, softmax=True)
    assert body["data"][0]["probs"] == near(want[0].softmax(0))
    body = await post(client, "/classify", input=TEXTS[0], use_activation=False)
    assert body["data"][0]["probs"] == near(want[0])
    body = await post(client, "/classify", input=LONG, truncate_prompt_tokens=9)
    assert body["usage"]["prompt_tokens"] == 9
    chat = [{"role": "user", "content": "a quick fox"}]
    assert len((await post(client, "/classify", messages=chat))["data"]) == 1


async def test_predictions_are_the_labels_likeliest_first(classifier: Served) -> None:
    async def made(inputs: Any, **fields: Any) -> Any:
        answer = await classifier.client.post("/predict", json={"inputs": inputs, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def expected(text: str, *, raw: bool = False) -> list[dict[str, Any]]:
        logits = classifier.logits(text)
        values = logits if raw else logits.softmax(0)
        order = sorted(range(3), key=lambda label: -float(values[label]))
        return [
            {"score": pytest.approx(float(values[label]), abs=1e-4), "label": LABELS[label]}
            for label in order
        ]

    assert await made(TEXTS[0]) == expected(TEXTS[0])
    assert await made([TEXTS[0]]) == expected(TEXTS[0])
    assert await made([[text] for text in TEXTS]) == [expected(text) for text in TEXTS]
    assert await made(TEXTS[0], raw_scores=True) == expected(TEXTS[0], raw=True)
    assert len(await made(LONG, truncate=True, truncation_direction="Right")) == 3


async def test_scores_of_a_cross_encoder(ranker: Served) -> None:
    client, query = ranker.client, "a quick fox"
    logits = [ranker.pair(query, text) for text in TEXTS]
    want = [torch.tensor(logit).sigmoid() for logit in logits]
    body = await post(client, "/score", text_1=query, text_2=TEXTS)
    assert [item["score"] for item in body["data"]] == near(want)
    raw = {"use_activation": False}
    body = await post(client, "/v1/score", queries=[query] * 2, documents=TEXTS, **raw)
    assert [item["score"] for item in body["data"]] == near(logits)
    order = sorted(range(2), key=lambda index: -logits[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = await post(client, path, query=query, documents=TEXTS)
        assert [result["index"] for result in body["results"]] == order
        found = [result["relevance_score"] for result in body["results"]]
        assert found == near(want[index] for index in order)
    answer = await client.post("/rerank", json={"query": query, "texts": TEXTS, "raw_scores": True})
    assert [(rank["index"], pytest.approx(rank["score"], abs=1e-4)) for rank in answer.json()] == [
        (index, pytest.approx(logits[index], abs=1e-4)) for index in order
    ]


async def test_scores_that_are_equal_in_float32_keep_their_order(
    config: Config, tmp_path: Path, anyio_backend: str
) -> None:
    """Weights of the head are so large that sigmoids are 1, and so small that they are 0."""
    documents = [" ".join(WORDS[start : start + 3]) for start in range(6)]
    for factor, bias in ((40.0, 600.0), (40.0, -600.0)):
        directory = make_classifier(tmp_path / f"{bias}", "bert", labels=1)
        scale_head(directory, factor, bias)
        async with serving(config, directory) as client:
            served = Served(client, directory)
            raw = [served.pair("a quick fox", text) for text in documents]
            assert all(abs(one) > 110 and (one > 0) == (bias > 0) for one in raw)
            order = sorted(range(len(raw)), key=lambda index: -raw[index])
            assert order != sorted(order)
            body = await post(client, "/rerank", query="a quick fox", documents=documents)
            assert [result["index"] for result in body["results"]] == order
            assert len({result["relevance_score"] for result in body["results"]}) == 1
            fields = {"query": "a quick fox", "texts": documents}
            ranks = (await client.post("/rerank", json=fields)).json()
            assert [rank["index"] for rank in ranks] == order


async def test_labels_that_are_equal_in_float32_keep_their_order(
    config: Config, tmp_path: Path, anyio_backend: str
) -> None:
    directory = make_classifier(
        tmp_path / "tiny", "bert", labels=9, problem_type="multi_label_classification"
    )
    scale_head(directory, 40.0, 600.0)
    async with serving(config, directory) as client:
        logits = Served(client, directory).logits(TEXTS[0])
        order = logits.argsort(descending=True).tolist()
        answer = await client.post("/predict", json={"inputs": TEXTS[0]})
        assert [each["label"] for each in answer.json()] == [f"kind {index}" for index in order]
        assert {each["score"] for each in answer.json()} == {1.0}
        body = await post(client, "/classify", input=TEXTS[0])
        assert body["data"][0]["label"] == f"kind {order[0]}"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"query": LONG, "documents": ["b"]}, "documents", "both texts together have"),
        ({"query": "a", "documents": ["b", LONG]}, "documents", "documents[1]"),
        # Of more characters than the context can spell.
        ({"query": "fox " * 9000, "documents": ["b", "c"]}, "query", "the query has 36000 char"),
        (
            {"query": "a", "documents": ["b", "fox " * 9000]},
            "documents",
            "the documents has 36000 char",
        ),
        (
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 999},
            "max_tokens_per_doc",
            "999",
        ),
        (
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 999},
            "truncate_prompt_tokens",
            "must be -1 or from 1 to 130, got 999",
        ),
        (
            {"query": "fox", "documents": ["b"], "truncate_prompt_tokens": 4},
            "truncate_prompt_tokens",
            "leaves no token of one of both texts: 3 are special ones",
        ),
    ],
)
async def test_bad_pairs_of_a_cross_encoder_are_400_and_name_their_field(
    ranker: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    error = await refused(ranker.client, "/rerank", **fields)
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/classify", {}, "input", "missing"),
        ("/classify", {"input": []}, "input", "must not be an empty list"),
        ("/classify", {"input": ["a", ""]}, "input", "input[1]"),
        ("/classify", {"input": [LONG]}, "input", "this model takes up to"),
        ("/classify", {"input": [5], "add_special_tokens": True}, "add_special_tokens", "ids"),
        (
            "/classify",
            {"input": "fox", "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "no",
        ),
        ("/classify", {"messages": CHAT}, "messages", "messages has"),
        ("/classify", {"input": "a", "prompt_name": "query"}, "prompt_name", "not supported"),
        ("/pooling", {"input": "a", "prompt_name": "query"}, "prompt_name", "not supported"),
        ("/pooling", {"messages": CHAT}, "messages", "messages has"),
        ("/classify", {"input": "a", "normalize": True}, "normalize", "not supported"),
        ("/classify", {"input": "a", "activation": False}, "activation", "not supported"),
        ("/classify", {"input": "a", "softmax": False}, "softmax", "not supported"),
        ("/pooling", {"input": "a", "activation": False}, "activation", "not supported"),
        ("/pooling", {"input": "a", "softmax": False}, "softmax", "not supported"),
        ("/score", {"text_1": "a", "text_2": "b", "activation": False}, "activation", "not supp"),
        ("/rerank", {"query": "a", "documents": ["b"], "softmax": False}, "softmax", "not supp"),
        (
            "/predict",
            {"inputs": "a", "truncation_direction": "Left"},
            "truncation_direction",
            "not supp",
        ),
        ("/predict", {"inputs": "a", "prompt_name": "query"}, "prompt_name", "not supported"),
        ("/predict", {}, "inputs", "missing"),
        ("/predict", {"inputs": []}, "inputs", "must not be an empty list"),
        ("/predict", {"inputs": ["a", "b"]}, "inputs", "/score"),
        ("/predict", {"inputs": [["a", "b"]]}, "inputs", "/score"),
        ("/predict", {"inputs": [[]]}, "inputs", "got 0"),
        ("/predict", {"inputs": ["a", ["b"]]}, "inputs", "mixed list"),
        ("/predict", {"inputs": [["a"], [""]]}, "inputs", "inputs[1]"),
        ("/pooling", {"input": "a", "task": "embed"}, "model", "what it can do is classify"),
        ("/pooling", {"input": "a", "dimensions": 4}, "dimensions", "task = embed"),
        ("/v1/embeddings", {"input": "a"}, "model", "what it can do is classify"),
        ("/score", {"text_1": "a", "text_2": "b"}, "model", "what it can do is classify"),
    ],
)
async def test_bad_texts_are_400_and_name_their_field(
    classifier: Served, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = await refused(classifier.client, path, **fields)
    assert (error["param"], message in error["message"]) == (param, True), error


async def test_pooling_gives_labels_of_texts(classifier: Served) -> None:
    want = [classifier.logits(text).softmax(0) for text in TEXTS]
    for fields in ({}, {"task": "classify"}):
        body = await post(classifier.client, "/pooling", input=TEXTS, **fields)
        assert {item["object"] for item in body["data"]} == {"pooling"}
        for item, probs in zip(body["data"], want, strict=True):
            assert item["data"] == near(probs)
    coded = await post(classifier.client, "/pooling", input=TEXTS, encoding_format="base64")
    for item, probs in zip(coded["data"], want, strict=True):
        assert list(struct.unpack("<3f", base64.b64decode(item["data"]))) == near(probs)


async def test_pooling_gives_labels_of_tokens(
    config: Config, tmp_path: Path, anyio_backend: str
) -> None:
    directory = make_classifier(tmp_path / "tiny", "bert", TOKEN)
    limits = msgspec.structs.replace(config.http, max_embedding_values=3 * 30)
    async with serving(msgspec.structs.replace(config, http=limits), directory) as client:
        served = Served(client, directory, TOKEN)
        body = await post(client, "/pooling", input=TEXTS, task="token_classify")
        for item, text in zip(body["data"], TEXTS, strict=True):
            want = served.logits(text).softmax(1)
            assert len(item["data"]) == len(want) == len(served.tokenizer.encode(text))
            for row, probs in zip(item["data"], want, strict=True):
                assert row == near(probs)
        # How many numbers an answer has is known once its texts are tokens.
        error = await refused(client, "/pooling", input=[[5] * 20, [5] * 11])
        assert error["param"] == "input"
        assert "more than 90 numbers" in error["message"]
        assert len((await post(client, "/pooling", input=[[5] * 20, [5] * 10]))["data"]) == 2


async def test_pooling_gives_vectors(embedding_client: httpx.AsyncClient) -> None:
    client = embedding_client
    plain = await post(client, "/v1/embeddings", input=TEXTS)
    for fields in ({}, {"task": "embed"}, {"use_activation": True}):
        body = await post(client, "/pooling", input=TEXTS, **fields)
        for item, other in zip(body["data"], plain["data"], strict=True):
            assert item["data"] == near(other["embedding"])
    raw = await post(client, "/pooling", input=TEXTS, use_activation=False)
    one = raw["data"][0]["data"]
    assert sum(value * value for value in one) > 1.1
    tokens = await post(client, "/pooling", input=TEXTS, task="token_embed")
    for item, other in zip(tokens["data"], raw["data"], strict=True):
        assert all(len(row) == len(one) for row in item["data"])
        assert all(sum(value * value for value in row) == pytest.approx(1) for row in item["data"])
        # The vector of a text is the mean of its tokens' before these were scaled: it lies in the
        # space of theirs, and weights that are all over 0 make it of them.
        rows = torch.tensor(item["data"], dtype=torch.float64)
        mean = torch.tensor(other["data"], dtype=torch.float64)
        weights = torch.linalg.lstsq(rows.T, mean.unsqueeze(1)).solution
        torch.testing.assert_close((rows.T @ weights)[:, 0], mean, rtol=1e-4, atol=1e-4)
        assert (weights > 0).all()
    asked = {"input": TEXTS, "task": "token_embed", "use_activation": False}
    for item, other in zip(
        (await post(client, "/pooling", **asked))["data"], raw["data"], strict=True
    ):
        rows = torch.tensor(item["data"], dtype=torch.float64)
        mean = torch.tensor(other["data"], dtype=torch.float64)
        torch.testing.assert_close(rows.mean(0), mean, rtol=1e-4, atol=1e-4)
    asked["use_activation"] = True
    again = (await post(client, "/pooling", **asked))["data"]
    for item, other in zip(again, tokens["data"], strict=True):
        assert [near(row) for row in item["data"]] == other["data"]


async def test_models_say_what_they_do(classifier: Served, ranker: Served) -> None:
    for served, tasks in ((classifier, ["classify"]), (ranker, ["classify", "score"])):
        (card,) = (await served.client.get("/v1/models")).json()["data"]
        assert card["tasks"] == tasks
        info = (await served.client.get("/info")).json()
        names = {
            str(number): name
            for number, name in enumerate(LABELS[: 3 if "score" not in tasks else 1])
        }
        labels = {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
        kind = "reranker" if "score" in tasks else "classifier"
        assert info["model_type"] == {kind: labels}


@pytest.mark.parametrize("by", ["model.tasks", "modules.json"])
async def test_a_decoder_that_scores_by_yes_and_no_is_a_reranker(
    config: Config, tmp_path: Path, by: str
) -> None:
    directory = with_words(make_checkpoint(tmp_path, "qwen3", max_position_embeddings=256))
    fields: dict[str, Any] = {"tasks": ("score",)} if by == "model.tasks" else {}
    if by == "modules.json":
        package = "sentence_transformers"
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": f"{package}.base.modules.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Own", "type": f"{package}.cross_encoder.LogitScore"},
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Own").mkdir()
        own = {"true_token_id": 7, "false_token_id": 9, "module_input_name": "causal_logits"}
        (directory / "1_Own" / "config.json").write_text(json.dumps(own))
    async with serving(config, directory, **fields) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert "score" in card["tasks"]
        assert "embed" not in card["tasks"]
        info = (await client.get("/info")).json()
        label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        assert info["model_type"] == {"reranker": label}
