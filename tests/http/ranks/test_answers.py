"""Answers of all tasks: how many numbers one may have, and that they count until they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from src.core.config import Config
from src.core.outputs import Classification
from src.http.ranks.classes import _predictions
from src.http.server.held_answers import HeldAnswers
from tests.http.asking import post, refused
from tests.http.embeddings.conftest import embedding_client as embedding_client
from tests.http.ranks.test_heads import serving
from tests.support.classifiers import TOKEN, make_classifier

pytestmark = pytest.mark.anyio

LABELS, VALUES = 3, 30
TEXTS = [[5 + index] * 4 for index in range(10)]
WORDS = ["fox"] * VALUES


async def served(
    config: Config, directory: Path, *ending: str, labels: int = LABELS
) -> AsyncIterator[httpx.AsyncClient]:
    limits = msgspec.structs.replace(config.http, max_embedding_values=VALUES)
    made = make_classifier(directory / "tiny", "bert", *ending, labels=labels)
    async with serving(msgspec.structs.replace(config, http=limits), made) as client:
        yield client


@pytest.fixture(scope="module")
async def classifier(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(config, tmp_path_factory.mktemp("answers")):
        yield client


@pytest.fixture(scope="module")
async def ranker(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(config, tmp_path_factory.mktemp("answers"), labels=1):
        yield client


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of all answers that were counted; in the end nothing is."""
    sizes: list[int] = []
    left = []
    holding = HeldAnswers.holding

    @contextmanager
    def noted(self: HeldAnswers, size: int, owner: str, most: int) -> Iterator[None]:
        with holding(self, size, owner, most):
            sizes.append(size)
            yield
        left.append(size)

    monkeypatch.setattr(HeldAnswers, "holding", noted)
    yield sizes
    assert sorted(left) == sorted(sizes)


@pytest.mark.parametrize(
    ("path", "field", "texts"),
    [
        ("/classify", "input", TEXTS),
        ("/pooling", "input", TEXTS),
        ("/predict", "inputs", [["fox"]] * 10),
    ],
)
async def test_labels_of_texts_have_a_bound_and_count_until_they_are_sent(
    classifier: httpx.AsyncClient, held: list[int], path: str, field: str, texts: list[Any]
) -> None:
    error = await refused(classifier, path, **{field: [*texts, texts[0]]})
    assert error["param"] == field
    assert "11 texts are 33 numbers, an answer may have at most 30" in error["message"]
    assert held == []
    answer = await classifier.post(path, json={field: texts})
    assert answer.status_code == 200, answer.text
    assert held == [10 * 256 + (4 + 22) * VALUES]


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/score", {"text_1": "fox"}, "text_2"),
        ("/rerank", {"query": "fox", "return_documents": False}, "documents"),
        ("/rerank", {"query": "fox"}, "texts"),
    ],
)
async def test_scores_have_the_same_bound(
    ranker: httpx.AsyncClient, held: list[int], path: str, fields: dict[str, Any], field: str
) -> None:
    error = await refused(ranker, path, **fields, **{field: [*WORDS, "fox"]})
    assert error["param"] == field
    assert "31 texts are 31 numbers" in error["message"]
    answer = await ranker.post(path, json={**fields, field: WORDS})
    assert answer.status_code == 200, answer.text
    assert held == [VALUES * (256 + 4 + 22)]


async def test_results_of_tokens_count_once_there_are_tokens(
    config: Config, tmp_path: Path, held: list[int]
) -> None:
    async for client in served(config, tmp_path, TOKEN):
        body = await post(client, "/pooling", input=[[5] * 4, [6] * 3])
        assert [len(item["data"]) for item in body["data"]] == [4, 3]
        assert held == [2 * 256 + 7 * LABELS * (4 + 22)]


async def test_many_small_answers_are_made_at_the_same_time(
    embedding_client: httpx.AsyncClient, held: list[int]
) -> None:
    """As many as would not fit, were each as large as an answer may be."""

    async def asked(task: str) -> int:
        answer = await embedding_client.post("/pooling", json={"input": "fox", "task": task})
        return answer.status_code

    tasks = ["embed", "token_embed"] * 12
    assert await asyncio.gather(*map(asked, tasks)) == [200] * len(tasks)
    assert len(held) == len(tasks)


def test_predictions_of_many_labels_come_in_pieces() -> None:
    rng = np.random.default_rng(0)
    # Many are equal: those keep the order of the labels.
    numbers = rng.integers(0, 50, 5000).astype(np.float32)
    labels = tuple(f'kind "{number}"' for number in range(5000))
    found = Classification(
        request_id="",
        labels=labels,
        numbers=numbers.tobytes(),
        raw=numbers.tobytes(),
        prompt_tokens=1,
    )
    pieces = list(_predictions(found))
    made = msgspec.json.decode(b"".join(pieces))
    order = sorted(range(5000), key=lambda label: (-numbers[label], label))
    assert made == [{"score": float(numbers[label]), "label": labels[label]} for label in order]
    assert max(piece.count(b"score") for piece in pieces) <= 2048
