"""Whatever fields a client sends to the endpoints of vectors, scores and labels: an answer, or a
refusal that names a field of the request, and never a failure of ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio.from_thread
import anyio.to_thread
import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from src.core.config import Config, ModelSection
from src.engine.client import AsyncEngine
from src.http import create_app
from src.http.endpoints import ENDPOINTS
from tests.http.asking import client_of
from tests.http.server.test_fuzz import TEXTS, VALUES
from tests.http.waiting import until
from tests.support.classifiers import TOKEN, make_classifier
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]

OVER_HTTP = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Case(NamedTuple):
    """An endpoint, a model that serves it, and a good request."""

    model: str
    path: str
    good: dict[str, Any]


PAIR = {"text_1": "hello", "text_2": ["hello", "fox"]}
RANKED = {"query": "fox", "documents": ["hello", {"text": "fox"}]}
CASES = (
    *(Case(model, "/v1/embeddings", {"input": "hello"}) for model in ("encoder", "text")),
    Case("encoder", "/v2/embed", {"texts": ["hello", "fox"]}),
    *(Case("encoder", path, {"inputs": ["hello", "fox"]}) for path in ("/embed", "/")),
    *(Case(model, "/score", PAIR) for model in ("encoder", "ranker")),
    Case("ranker", "/v1/score", {"queries": ["fox"], "documents": "hello"}),
    *(Case(model, "/rerank", RANKED) for model in ("encoder", "ranker")),
    Case("ranker", "/rerank", {"query": "fox", "texts": ["hello", "fox"]}),
    Case("ranker", "/v1/rerank", RANKED),
    Case("encoder", "/v2/rerank", RANKED),
    Case("labels", "/classify", {"input": ["hello", "fox"]}),
    Case("ranker", "/classify", {"input": "hello"}),
    Case("labels", "/predict", {"inputs": [["hello"], ["fox"]]}),
    Case("ranker", "/predict", {"inputs": "hello"}),
    *(Case("text", "/pooling", {"input": "hello", "task": task}) for task in ("token_embed", None)),
    Case("labels", "/pooling", {"input": "hello"}),
    Case("tokens", "/pooling", {"input": ["hello", "fox"], "task": "token_classify"}),
)
IDS = st.integers(-2, 600) | st.sampled_from([2**31, 2**63, 10**30])
NAMES = st.sampled_from(
    ["float", "base64", "ubinary", "END", "NONE", "embed", "classify", "token_embed", "query", "no"]
)
# Much of it has the right kind, so that more than the kinds are looked at.
ODD = st.one_of(
    VALUES,
    TEXTS | NAMES,
    st.lists(TEXTS | NAMES, max_size=4),
    st.lists(IDS, max_size=5),
    st.lists(st.lists(IDS, max_size=3), max_size=3),
    st.lists(st.lists(TEXTS, max_size=3), max_size=3),
    st.sampled_from(["fox " * 3000, ["fox"] * 2100, ["fox " * 200] * 3, [[5] * 2000]]),
    st.sampled_from([-1, 0, 1, 2, 5, 10**6, True, False, 0.001, 1e-300]),
)
REQUESTS: dict[str, type[msgspec.Struct]] = {
    entry.path: entry.request
    for entry in ENDPOINTS
    if entry.tag in ("Embeddings", "Ranks") and entry.request is not None
}


def test_no_endpoint_is_left_out() -> None:
    assert {case.path for case in CASES} == set(REQUESTS)


@pytest.fixture(scope="module")
async def served(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[dict[str, tuple[httpx.AsyncClient, AsyncEngine]]]:
    """Model -> a client of a server that has it, and its engine."""
    folder = tmp_path_factory.mktemp("fuzz")
    encoder = make_encoder(folder / "encoder", "bert")
    save_encoder_tokenizer(encoder)
    save_modules(encoder, pooling={"pooling_mode": "mean"}, prompts={"query": "query: "})
    directories = {
        "encoder": encoder,
        "labels": make_classifier(folder / "labels", "bert"),
        "ranker": make_classifier(folder / "ranker", "bert", labels=1),
        "tokens": make_classifier(folder / "tokens", "bert", TOKEN),
    }
    sections = {
        name: ModelSection(path=str(path), served_model_name=("tiny",))
        for name, path in directories.items()
    }
    async with AsyncExitStack() as stack:
        found = {}
        for name, section in {"text": config.model, **sections}.items():
            own = msgspec.structs.replace(config, model=section)
            app = create_app(own, owns_process=False)
            await stack.enter_async_context(app.router.lifespan_context(app))
            engine = app.state.server._engine
            await engine.wait_ready()
            found[name] = await stack.enter_async_context(client_of(app)), engine
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.path}")
async def test_any_fields_are_answered_or_refused_by_name(served: Any, case: Case) -> None:
    """Hypothesis asks from a thread of its own, since it is not asynchronous."""
    client, engine = served[case.model]
    names = REQUESTS[case.path].__struct_encode_fields__
    seen: set[int] = set()

    @OVER_HTTP
    @example(fields={})
    @example(fields={"timeout": -1})
    @given(fields=st.dictionaries(st.sampled_from(names), ODD, max_size=3))
    def ask(fields: dict[str, Any]) -> None:
        body = json.dumps({**case.good, **fields}).encode()
        headers = [("content-type", "application/json")]

        async def post() -> httpx.Response:
            return await client.post(case.path, content=body, headers=headers)

        answer = anyio.from_thread.run(post)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 408, 413), (body[:500], answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            # What is no JSON has no fields.
            if error["code"] != "invalid_json":
                assert re.split(r"[.\[]", error["param"] or "")[0] in names, (body[:500], error)
        elif answer.status_code == 200:
            json.loads(answer.content, parse_constant=lambda name: pytest.fail(name))

    await anyio.to_thread.run_sync(ask)
    assert seen >= {200, 400}
    await until(lambda: engine.stats.num_running + engine.stats.num_waiting == 0)
    assert engine.stats.pool_is_whole
    for path in ("/info", "/health"):
        assert (await client.get(path)).status_code == 200
