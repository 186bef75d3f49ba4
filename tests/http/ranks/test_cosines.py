"""`/score` and `/rerank` of a model that embeds: scores are cosines."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from src.core.errors import QueueFullError
from src.http.ranks import reranks as rerank_handlers
from src.http.ranks import scores as score_handlers
from tests.http.asking import post, refused
from tests.http.embeddings.conftest import embedding_client as embedding_client

pytestmark = pytest.mark.anyio

QUERY = "a quick fox"
DOCUMENTS = ["the lazy dog", "a quick fox", "jumps over", "the quick brown fox"]
LONG = "the quick brown fox jumps over the lazy dog " * 30
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")


async def cosines(client: httpx.AsyncClient, first: str, *others: str) -> list[float]:
    # A query has the checkpoint's prompt for queries before it; for documents it has none.
    query = await post(client, "/v1/embeddings", input=first, prompt_name="query")
    body = await post(client, "/v1/embeddings", input=others)
    one = query["data"][0]["embedding"]
    rest = [item["embedding"] for item in body["data"]]

    def cosine(other: list[float]) -> float:
        dot = sum(x * y for x, y in zip(one, other, strict=True))
        return dot / (math.hypot(*one) * math.hypot(*other))

    return [cosine(other) for other in rest]


def scores(body: dict[str, Any]) -> list[float]:
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert {item["object"] for item in body["data"]} == {"score"}
    return [item["score"] for item in body["data"]]


@pytest.mark.parametrize("path", [*SCORES, *RERANKS])
async def test_an_answer_that_there_is_no_room_for_leaves_no_work_behind(
    embedding_client: httpx.AsyncClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be computed is closed: else a warning tells of it, which fails the test."""

    def full(*_: Any, **named: Any) -> Any:
        raise QueueFullError("no room")

    for module in (score_handlers, rerank_handlers):
        monkeypatch.setattr(module, "held_numbers", full)
    pair = {"text_1": QUERY, "text_2": DOCUMENTS}
    fields = pair if path in SCORES else {"query": QUERY, "documents": DOCUMENTS}
    assert (await embedding_client.post(path, json=fields)).status_code == 429


@pytest.mark.parametrize("path", SCORES)
async def test_one_is_scored_with_each_and_many_with_as_many(
    embedding_client: httpx.AsyncClient, path: str
) -> None:
    client = embedding_client
    want = [pytest.approx(one, abs=1e-5) for one in await cosines(client, QUERY, *DOCUMENTS)]
    for first, second in (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ):
        body = await post(client, path, **{first: QUERY, second: DOCUMENTS})
        assert scores(body) == want
        assert body["object"] == "list"
        assert body["model"] == "tiny-bert"
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
        body = await post(client, path, **{first: [QUERY] * 4, second: DOCUMENTS})
        assert scores(body) == want
    assert scores(await post(client, path, text_1=[QUERY], text_2=DOCUMENTS[1])) == want[1:2]
    assert 0.5 < scores(body)[1] < 0.9999


@pytest.mark.parametrize("path", RERANKS)
async def test_the_best_documents_come_first(
    embedding_client: httpx.AsyncClient, path: str
) -> None:
    client = embedding_client
    want = await cosines(client, QUERY, *DOCUMENTS)
    order = sorted(range(4), key=lambda index: -want[index])
    objects = [{"text": text} for text in DOCUMENTS]
    for documents in (DOCUMENTS, objects, [*DOCUMENTS[:2], *objects[2:]]):
        body = await post(client, path, model="tiny-bert", query=QUERY, documents=documents)
        results = body["results"]
        assert [result["index"] for result in results] == order
        for result in results:
            index = result["index"]
            assert result["relevance_score"] == pytest.approx(want[index], abs=1e-5)
            if path == "/v2/rerank":
                assert "document" not in result
            else:
                assert result["document"] == {"text": DOCUMENTS[index]}
        assert body["meta"]["billed_units"] == {"search_units": 1}
        assert body["usage"]["total_tokens"] > 0
    body = await post(client, path, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [result["index"] for result in body["results"]] == order[:2]
    body = await post(client, path, query=QUERY, documents=DOCUMENTS, top_n=9)
    assert [result["index"] for result in body["results"]] == order
    for shown in (True, False):
        body = await post(client, path, query=QUERY, documents=DOCUMENTS, return_documents=shown)
        assert [("document" in result) for result in body["results"]] == [shown] * 4
    # Of equals the first one.
    body = await post(client, path, query=QUERY, documents=["fox", "dog", "fox", "fox"])
    assert [r["index"] for r in body["results"] if r["index"] != 1] == [0, 2, 3]


async def test_documents_are_cut_before_they_are_scored(
    embedding_client: httpx.AsyncClient,
) -> None:
    client = embedding_client
    for fields in ({"max_tokens_per_doc": 13}, {"truncate_prompt_tokens": 13}):
        ranks = await post(client, "/rerank", query=QUERY, documents=[LONG], **fields)
        cut = {} if "max_tokens_per_doc" in fields else fields
        first = await post(client, "/v1/embeddings", input=QUERY, prompt_name="query", **cut)
        second = await post(client, "/v1/embeddings", input=LONG, truncate_prompt_tokens=13)
        one, other = (body["data"][0]["embedding"] for body in (first, second))
        want = sum(x * y for x, y in zip(one, other, strict=True))
        assert ranks["results"][0]["relevance_score"] == pytest.approx(want, abs=1e-5)
        (score,) = scores(await post(client, "/score", text_1=QUERY, text_2=LONG, **fields))
        assert score == pytest.approx(want, abs=1e-5)


async def test_inference_gets_its_own_answer(embedding_client: httpx.AsyncClient) -> None:
    client = embedding_client

    async def made(**fields: Any) -> list[dict[str, Any]]:
        answer = await client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, **fields})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()
        return found

    body = await post(client, "/rerank", query=QUERY, documents=DOCUMENTS)
    want = [
        {"index": result["index"], "score": pytest.approx(result["relevance_score"], abs=1e-6)}
        for result in body["results"]
    ]
    assert await made() == want
    assert await made(raw_scores=True, return_text=False, truncate=True) == want
    assert await made(return_text=True) == [
        {**each, "text": DOCUMENTS[each["index"]]} for each in want
    ]


BAD_SCORES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "text_1", "missing"),
    ({"text_1": "a"}, "text_2", "missing"),
    ({"documents": ["a"]}, "queries", "missing"),
    ({"text_1": "a", "documents": "b"}, "documents", "the two sides are one of"),
    ({"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1", "the two sides are one of"),
    ({"text_1": [], "text_2": ["b"]}, "text_1", "must not be an empty list"),
    ({"text_1": "a", "text_2": []}, "text_2", "must not be an empty list"),
    ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "text_1 has 2 texts and text_2 1"),
    ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2", "2 texts and text_2 3"),
    ({"text_1": "", "text_2": ["c"]}, "text_1", "text_1 must not be empty"),
    ({"text_1": "a", "text_2": ["c", ""]}, "text_2", "text_2[1] must not be empty"),
    ({"text_1": "a", "text_2": ["c"] * 41}, "text_2", "at most 40 entries, got 41"),
    ({"queries": LONG, "documents": "b"}, "queries", "queries has"),
    ({"queries": LONG, "documents": ["b", "c"]}, "queries", "queries has"),
    ({"queries": ["a", LONG], "documents": ["b", "c"]}, "queries", "queries[1]: queries has"),
    ({"queries": "a", "documents": ["b", LONG]}, "documents", "documents[1]"),
    (
        {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 2},
        "truncate_prompt_tokens",
        "leaves no token of the text",
    ),
    ({"text_1": "a", "text_2": "b", "priority": 2**63}, "priority", "priority must be"),
    ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "not supported"),
    ({"text_1": "a", "text_2": "b", "prompt_name": "query"}, "prompt_name", "not supported"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_query": 9}, "max_tokens_per_query", "not supp"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 0}, "max_tokens_per_doc", ">= 1"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 131}, "max_tokens_per_doc", "130"),
    (
        {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 131},
        "truncate_prompt_tokens",
        "1 to 130",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_SCORES)
async def test_bad_pairs_are_400_and_name_their_field(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in SCORES:
        error = await refused(embedding_client, path, **fields)
        assert (error["param"], message in error["message"]) == (param, True), error
        # A single text has no index.
        assert message.startswith("queries[") or not error["message"].startswith("queries[")


DOCUMENT = {"query": "a", "documents": ["b"]}
TEXT = {"query": "a", "texts": ["b"]}
BAD_RANKS: list[tuple[dict[str, Any], str, str]] = [
    ({"query": "a"}, "documents", "missing"),
    ({"documents": ["b"]}, "query", "missing"),
    ({"texts": ["b"]}, "query", "missing"),
    ({**DOCUMENT, "texts": ["b"]}, "texts", "one of documents and texts"),
    ({"query": "", "documents": ["b"]}, "query", "query must not be empty"),
    ({"query": "a", "documents": []}, "documents", "must not be an empty list"),
    ({"query": "a", "texts": []}, "texts", "must not be an empty list"),
    ({"query": "a", "documents": ["b", {"text": ""}]}, "documents", "documents[1]"),
    ({"query": "a", "documents": ["b"] * 41}, "documents", "at most 40 entries, got 41"),
    ({"query": "a", "texts": ["b", LONG]}, "texts", "texts[1]"),
    ({"query": LONG, "texts": ["b", "c"]}, "query", "query has"),
    ({**DOCUMENT, "max_tokens_per_doc": 2}, "max_tokens_per_doc", "max_tokens_per_doc = 2 leaves"),
    ({**DOCUMENT, "top_n": 0}, "top_n", ">= 1"),
    ({**DOCUMENT, "max_tokens_per_doc": 0}, "max_tokens_per_doc", ">= 1"),
    ({**DOCUMENT, "max_tokens_per_doc": 131}, "max_tokens_per_doc", "130"),
    ({**DOCUMENT, "raw_scores": True}, "raw_scores", "may not be given with documents"),
    ({**TEXT, "top_n": 1}, "top_n", "may not be given with texts"),
    (
        {**TEXT, "truncate": True, "truncate_prompt_tokens": 9},
        "truncate_prompt_tokens",
        "may not be given with truncate",
    ),
    (
        {**TEXT, "raw_scores": True, "use_activation": True},
        "use_activation",
        "may not be given with raw_scores",
    ),
    ({**DOCUMENT, "rank_fields": ["title"]}, "rank_fields", "not supported"),
    ({**DOCUMENT, "max_chunks_per_doc": 3}, "max_chunks_per_doc", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_RANKS)
async def test_bad_documents_are_400_and_name_their_field(
    embedding_client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in RERANKS:
        error = await refused(embedding_client, path, **fields)
        assert (error["param"], message in error["message"]) == (param, True), error
        assert not error["message"].startswith("query[")


async def test_a_model_that_only_generates_refuses_to_score(client: httpx.AsyncClient) -> None:
    for path, fields in (
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = await refused(client, path, **fields)
        assert error["param"] == "model"
        assert "what it can do is generate" in error["message"]


async def test_what_a_model_does_not_do_is_400_and_names_what_it_does(
    embedding_client: httpx.AsyncClient,
) -> None:
    for path, fields in (
        ("/classify", {"input": "fox"}),
        ("/predict", {"inputs": "fox"}),
        ("/pooling", {"input": "fox", "task": "classify"}),
        ("/pooling", {"input": "fox", "task": "token_classify"}),
    ):
        error = await refused(embedding_client, path, **fields)
        assert error["param"] == "model"
        assert "embed" in error["message"]
    error = await refused(embedding_client, "/pooling", input="fox", task="plugin")
    assert error["param"] == "task"
    answer = await embedding_client.post(
        "/score", json={"text_1": "a", "text_2": "b", "model": "no"}
    )
    assert answer.status_code == 404
