"""Adapters over HTTP: listed, chosen, loaded and unloaded."""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from msgspec.structs import replace

from src import AsyncEngine
from src.core.config import Config, LoraSection, ModelSection, Secret
from src.core.errors import InvalidRequestError
from src.http import create_app
from src.http.admin.adapters import allowed_path
from src.http.server.errors import PermissionDeniedError
from tests.http.asking import client_of
from tests.support.adapters import make_adapter, merged, merged_into
from tests.support.checkpoints import load_reference
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import greedy

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def root(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters `one` and `other`, and one beside it."""
    root = tmp_path_factory.mktemp("adapters") / "allowed"
    model = load_reference(checkpoint)
    for seed, name in enumerate(("one", "other"), 1):
        make_adapter(root / name, model, seed=seed)
    shutil.copytree(root / "one", root.parent / "outside")
    return root


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server.ready_engine()
        yield client


def with_lora(config: Config, root: Path, **http: Any) -> Config:
    section = LoraSection(adapters={"one": str(root / "one")}, directories=(str(root),))
    return replace(config, lora=section, http=replace(config.http, **http))


async def tokens_of(client: httpx.AsyncClient, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


async def test_adapters_are_chosen_loaded_and_unloaded(
    config: Config, checkpoint: Path, root: Path
) -> None:
    models = {"tiny": load_reference(checkpoint)}
    models |= {name: merged(checkpoint, root / name) for name in ("one", "other")}
    expected = {name: greedy(model, PROMPT, 8, None) for name, model in models.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    async with serving(with_lora(config, root)) as client:
        client_ = openai.AsyncOpenAI(
            api_key="-", base_url="http://slipstream/v1", http_client=client
        )
        cards = {card.id: card for card in (await client_.models.list()).data}
        assert list(cards) == ["tiny", "org/alias", "one"]
        assert (cards["one"].parent, cards["one"].root) == ("tiny", "one")
        assert str(root) not in (await client.get("/v1/models")).text
        assert cards["tiny"].parent is None
        # Of an adapter too: it is asked for vectors as it is for text.
        tasks = ["generate", "embed", "token_embed"]
        assert [card.model_dump()["tasks"] for card in cards.values()] == [tasks] * 3
        assert await tokens_of(client, "one") == expected["one"]
        assert await tokens_of(client, "tiny") == expected["tiny"]
        unknown = await client.post("/v1/completions", json={"model": "other", "prompt": PROMPT})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")

        loaded = await client.post(LOAD, json={"lora_name": "other", "lora_path": "other"})
        assert (loaded.status_code, loaded.json()["status"]) == (200, "loaded")
        assert await tokens_of(client, "other") == expected["other"]
        again = {"lora_name": "other", "lora_path": str(root / "one")}
        assert (await client.post(LOAD, json=again)).status_code == 409
        assert (await client.post(LOAD, json={**again, "load_inplace": True})).status_code == 200
        assert await tokens_of(client, "other") == expected["one"]

        chat = await client_.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert chat.model == "one"
        message = await client.post(
            "/v1/messages",
            json={"model": "one", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
        )
        assert message.json()["model"] == "one"
        response = await client_.responses.create(model="one", input="Hi", max_output_tokens=16)
        assert response.model == "one"
        metrics = (await client.get("/metrics")).text
        assert re.search(r'vllm:lora_requests_info{max_lora="8",running_lora_adapters=""', metrics)

        for name in ("one", "other"):
            unloaded = await client.post(UNLOAD, json={"lora_name": name})
            assert (unloaded.status_code, unloaded.json()["status"]) == (200, "unloaded")
        assert (await client.post(UNLOAD, json={"lora_name": "one"})).status_code == 404
        gone = await client.post("/v1/completions", json={"model": "one", "prompt": PROMPT})
        assert gone.status_code == 404


async def test_adapters_of_an_encoder_have_its_tasks_and_give_vectors(
    config: Config, tmp_path: Path
) -> None:
    directory = make_encoder(tmp_path / "base", "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"}, normalizes=False)
    adapter = make_adapter(
        tmp_path / "adapter",
        load_encoder_reference(directory),
        targets=("query", "key", "value", "dense"),
        within="encoder.layer",
        task_type="FEATURE_EXTRACTION",
    )
    references = {
        "base": load_encoder_reference(directory),
        "mine": merged_into(load_encoder_reference(directory), adapter),
    }
    model = ModelSection(path=str(directory), served_model_name=("base",))
    lora = LoraSection(adapters={"mine": str(adapter)})
    async with serving(replace(config, model=model, lora=lora)) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        tasks = ["embed", "score", "token_embed"]
        assert [(card["id"], card["tasks"]) for card in cards] == [("base", tasks), ("mine", tasks)]
        card = (await client.get("/v1/models/mine")).json()
        assert (card["parent"], card["tasks"]) == ("base", tasks)
        for name, reference in references.items():
            answer = await client.post("/v1/embeddings", json={"model": name, "input": PROMPT})
            assert answer.status_code == 200, answer.text
            with torch.inference_mode():
                states = reference(torch.tensor([PROMPT])).last_hidden_state[0]
            made = torch.tensor(answer.json()["data"][0]["embedding"])
            torch.testing.assert_close(made, states.mean(0), rtol=1e-4, atol=1e-4)


# What is awaited between the name and the request, and bodies of the endpoints that go that way.
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
GOING: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": (
        "src.http.completions.handlers.token_ids_of",
        {"prompt": "Hi", "max_tokens": 4},
    ),
    "/v1/chat/completions": ("src.http.chat.handlers._plan", _CHAT),
    "/v1/messages": ("src.http.chat.handlers._plan", _CHAT),
    "/v1/responses": ("src.http.chat.handlers._plan", {"input": "Hi", "max_output_tokens": 16}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GOING)
async def test_an_adapter_that_goes_meanwhile_is_missed(
    adapted: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Between its name and the request. The model alone must not answer in its place."""
    place, body = GOING[path]
    loaded = await adapted.post(LOAD, json={"lora_name": "going", "lora_path": "one"})
    assert loaded.status_code == 200, loaded.text
    module, _, name = place.rpartition(".")
    awaited = getattr(importlib.import_module(module), name)

    async def gone(engine: AsyncEngine, *given: Any, **named: Any) -> Any:
        await engine.adapters.unload("going")
        return await awaited(engine, *given, **named)

    monkeypatch.setattr(place, gone)
    answer = await adapted.post(path, json={"model": "going", "stream": stream, **body})
    assert answer.status_code == 404, answer.text
    assert "no adapter `going` is loaded" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"lora_path": "../outside"}, 403, "lora.directories only"),
        ({"lora_path": "one/../../outside"}, 403, "lora.directories only"),
        ({"lora_path": "/etc"}, 403, "lora.directories only"),
        ({"lora_path": "nothing"}, 400, "lora_path names no directory"),
        ({"lora_path": "one\0"}, 403, "lora.directories only"),
        ({"lora_path": "x" * 5000}, 400, "lora_path"),
        ({"lora_path": ""}, 400, "lora_path"),
        ({"lora_path": "x" * 300}, 400, "lora_path cannot be read"),
        ({"lora_path": "circle"}, 400, "lora_path cannot be read"),
        ({"lora_path": "circles"}, 400, "lora_path cannot be read"),
        ({"lora_path": "empty"}, 400, "has no file adapter_config.json"),
        ({"lora_path": "one", "lora_name": "tiny"}, 409, "the model itself is called"),
        ({"lora_path": "one", "lora_name": "a\nb"}, 400, "printable characters"),
        ({"lora_path": "one", "lora_name": ""}, 400, "lora_name"),
        ({"lora_path": "one", "lora_name": "n" * 300}, 400, "lora_name"),
        ({"lora_path": 1}, 400, "lora_path"),
    ],
)
async def test_what_is_not_loaded(
    config: Config, root: Path, adapted: httpx.AsyncClient, fields: dict[str, Any], status: int,
    message: str,
) -> None:  # fmt: skip
    (root / "empty").mkdir(exist_ok=True)
    (root / "circles").mkdir(exist_ok=True)
    for circle in (root / "circle", root / "circles" / "adapter_config.json"):
        circle.unlink(missing_ok=True)
        circle.symlink_to(circle)
    answer = await adapted.post(LOAD, json={"lora_name": "new", **fields})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
async def adapted(config: Config, root: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(with_lora(config, root)) as client:
        yield client


async def test_who_may_load(config: Config, root: Path) -> None:
    keyed = with_lora(config, root, api_keys=(Secret("client"),), admin_key=Secret("administrator"))
    body = {"lora_name": "other", "lora_path": "other"}
    async with serving(keyed) as client:
        for key, status in ((None, 401), ("wrong", 401), ("client", 403), ("administrator", 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            answer = await client.post(LOAD, json=body, headers=headers)
            assert answer.status_code == status, answer.text


async def test_without_adapters_nothing_is_loaded(client: httpx.AsyncClient, root: Path) -> None:
    answer = await client.post(LOAD, json={"lora_name": "a", "lora_path": str(root / "one")})
    assert answer.status_code == 403
    assert "lora.directories names no directory" in answer.json()["error"]["message"]
    assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 404


def test_links_do_not_lead_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root / "one")
    assert allowed_path("one", [str(root)]) == (root / "one").resolve()
    with pytest.raises(PermissionDeniedError):
        allowed_path("link", [str(tmp_path)])
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "adapter_model.safetensors").symlink_to(root / "one" / "adapter_model.safetensors")
    with pytest.raises(PermissionDeniedError):
        allowed_path("inner", [str(tmp_path)])
    # In another allowed directory it is.
    assert allowed_path(str(root / "one"), [str(tmp_path), str(root)]) == (root / "one").resolve()
    with pytest.raises(InvalidRequestError):
        allowed_path("nothing", [str(tmp_path), str(root)])
