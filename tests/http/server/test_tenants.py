"""Clients with different keys: their cached prefixes, and their parts of what is computed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, HttpSection, SchedulerSection, Secret, SpeculationSection
from src.core.errors import ConfigError
from src.core.turn_pool import TurnPool
from src.engine.execution.step_computer import StepComputer
from src.engine.grammar.compiler import GrammarCompiler
from src.http import create_app
from src.http.responses.store import ResponseStore
from src.http.server.guard import check_access
from src.http.server.keys import check_owners, load_keys
from src.text import Tokenizer
from src.text.template_pool import TemplatePool
from tests.http.asking import client_of
from tests.http.processes import ServerProcess
from tests.http.responses.test_store import response
from tests.http.waiting import until

pytestmark = pytest.mark.timeout(240)

KEYS = ("k-alice alice", "k-alice-too alice", "k-bob bob", "k-none")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
async def keyed(
    request: pytest.FixtureRequest, config: Config, anyio_backend: str
) -> AsyncIterator[tuple[Starlette, bool]]:
    config = msgspec.structs.replace(
        config,
        http=msgspec.structs.replace(
            config.http,
            api_keys=tuple(map(Secret, KEYS)),
            max_stored_responses=8,
            max_background_per_owner=3,
        ),
        cache=msgspec.structs.replace(config.cache, share_prefixes=request.param),
    )
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        yield app, request.param


async def cached(client: httpx.AsyncClient, key: str, **fields: object) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    answer = await client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.anyio
async def test_what_is_done_for_a_request_is_its_owners(
    keyed: tuple[Starlette, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def noting(kind: type, name: str, owner_of: Callable[..., str]) -> None:
        original = getattr(kind, name)

        def submit(self: object, *args: Any, **more: Any) -> Any:
            seen.append((kind.__name__, owner_of(*args, **more)))
            return original(self, *args, **more)

        monkeypatch.setattr(kind, name, submit)

    noting(TurnPool, "submit", lambda owner, _: owner)
    noting(TemplatePool, "submit", lambda _, owner="", **more: owner)
    noting(GrammarCompiler, "compile", lambda _, owner="": owner)
    long = "hello" + " " * 70_000
    messages = [{"role": "user", "content": long}]
    schema = {"json_schema": {"name": "x", "schema": {"type": "null"}}, "type": "json_schema"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages}),
        ("/tokenize", {"messages": messages}),
        ("/tokenize", {"prompt": long, "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": [5], "echo": True, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 1,
                "response_format": schema,
            },
        ),
    ]
    async with client_of(keyed[0]) as client:
        for path, body in asked:
            seen.append((path, "alice"))
            await client.post(path, json=body, headers=bearer("k-alice-too"))
            assert seen[-1][0] != path, "nothing was done in turns"
    assert {kind for kind, _ in seen} >= {"TurnPool", "TemplatePool", "GrammarCompiler"}
    assert {owner for _, owner in seen} == {"alice"}


@pytest.mark.anyio
async def test_cached_tokens_tell_nothing_of_other_owners(keyed: tuple[Starlette, bool]) -> None:
    app, is_shared = keyed
    async with client_of(app) as client:
        assert await cached(client, "k-alice") == 0
        assert await cached(client, "k-alice") > 0
        assert await cached(client, "k-alice-too") > 0
        for key in ("k-bob", "k-none"):
            assert (await cached(client, key) > 0) is is_shared
            assert await cached(client, key) > 0
        # A client's own salt is beside that, and cannot be taken for another's name.
        for key in ("k-alice", "k-bob"):
            for salt in ("mine", "alice", "bob", "key-4"):
                first = await cached(client, key, cache_salt=salt)
                assert (first > 0) is (is_shared and key == "k-bob")
                assert await cached(client, key, cache_salt=salt) > 0


@pytest.mark.anyio
async def test_one_owner_cannot_take_all_background_responses(
    keyed: tuple[Starlette, bool], slow_steps: None
) -> None:
    app, _ = keyed
    async with client_of(app) as client:

        async def begin(key: str) -> httpx.Response:
            body = {"input": "x", "background": True, "max_output_tokens": 900, "ignore_eos": True}
            return await client.post("/v1/responses", json=body, headers=bearer(key))

        begun = [await begin("k-alice") for _ in range(2)]
        begun.append(await begin("k-alice-too"))
        assert [answer.status_code for answer in begun] == [200] * 3
        for key in ("k-alice", "k-alice-too"):
            refused = await begin(key)
            assert refused.status_code == 429
            assert "3 responses of this key" in refused.json()["error"]["message"]
        other = [await begin("k-bob"), await begin("k-none")]
        assert [answer.status_code for answer in other] == [200] * 2
        # Keys of one owner are one client; others see nothing of it.
        shown = f"/v1/responses/{begun[0].json()['id']}"
        assert (await client.get(shown, headers=bearer("k-alice-too"))).status_code == 200
        assert (await client.get(shown, headers=bearer("k-bob"))).status_code == 404
        engine = app.state.server.engine
        tenants = {view.tenant for view in engine.inspector.requests().requests}
        assert tenants == {"alice", "bob", "key-4"}
        for answer in begun:
            await client.post(
                f"/v1/responses/{answer.json()['id']}/cancel", headers=bearer("k-alice")
            )
        await app.state.server.close()
        await until(lambda: engine.stats.num_running == 0)


@pytest.mark.anyio
async def test_predictions_of_one_owner_leave_others_room(
    config: Config, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are held as long as their requests wait, so they count as prompts do."""
    text = "the quick brown fox " * 20
    tokens = len(Tokenizer.from_directory(Path(config.model.path or "")).encode(text))
    changed = msgspec.structs.replace(
        config,
        http=msgspec.structs.replace(config.http, api_keys=tuple(map(Secret, KEYS))),
        # Room for three of them, and their prompts.
        scheduler=SchedulerSection(max_num_seqs=1, max_waiting_tokens=3 * tokens + 20),
        speculation=SpeculationSection(method="suffix"),
    )
    goes_on, compute = threading.Event(), StepComputer.compute
    goes_on.set()

    def held(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        assert goes_on.wait(60)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", held)
    app = create_app(changed, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        engine = await app.state.server.ready_engine()
        goes_on.clear()

        async def ask(key: str, **more: Any) -> httpx.Response:
            body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True, **more}
            return await client.post("/v1/completions", json=body, headers=bearer(key))

        predicting = {"prediction": {"type": "content", "content": text}}
        async with asyncio.TaskGroup() as group:
            try:
                waiting = [group.create_task(ask("k-none"))]
                await until(lambda: engine.stats.num_running == 1)
                for key in ("k-alice", "k-bob"):
                    waiting.append(group.create_task(ask(key, **predicting)))
                    await until(lambda: engine.stats.num_waiting == len(waiting) - 1)
                    refused = await asyncio.wait_for(ask("k-alice-too", **predicting), 30)
                    assert refused.status_code == 429
                    message = refused.json()["error"]["message"]
                    assert f"1 requests with {tokens + 2} tokens of this key" in message
                # Without one there is room for her.
                waiting.append(group.create_task(ask("k-alice")))
                await until(lambda: engine.stats.num_waiting == 3)
            finally:
                goes_on.set()
        assert [task.result().status_code for task in waiting] == [200] * 4


def test_held_responses_leave_as_much_room_as_they_take() -> None:
    bounds = {"max_entries": 8, "max_bytes": 100}
    store = ResponseStore()

    def put(owner: bytes, size: int = 1) -> None:
        store.put(response(owner, f"r{len(store)}", held=True), size, **bounds)

    assert store.leaves_room(b"alice", 90, **bounds)  # one in any case
    for _ in range(4):
        assert store.leaves_room(b"alice", 1, **bounds)
        put(b"alice")
    assert not store.leaves_room(b"alice", 1, **bounds)
    for _ in range(2):
        assert store.leaves_room(b"bob", 1, **bounds)
        put(b"bob")
    assert not store.leaves_room(b"bob", 1, **bounds)
    assert store.num_held(b"alice") == 4
    assert not store.leaves_room(b"bob", 90, **bounds)
    assert store.leaves_room(b"carol", 90, **bounds)


def test_owners_are_read_with_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nsecond   bob\n\nthird\n")
    keys = load_keys(HttpSection(api_keys=(Secret("first alice"),), api_key_file=str(file)))
    admitted = [keys.api.admitted([key]) for key in (b"first", b"second", b"third")]
    assert [keys.tenant(digest) for digest in admitted if digest] == ["alice", "bob", "key-3"]
    alone = load_keys(HttpSection(api_keys=(Secret("first"),)))
    digest = alone.api.admitted([b"first"])
    assert digest is not None
    assert alone.tenant(digest) == ""
    both = load_keys(HttpSection(api_keys=(Secret("first alice"), Secret("second alice"))))
    digest = both.api.admitted([b"second"])
    assert digest is not None
    assert both.tenant(digest) == ""


@pytest.mark.parametrize(
    "section",
    [SchedulerSection(tenant_weights={"bo": 2}), SchedulerSection(priority_tenants=("bo",))],
)
def test_settings_name_owners_that_there_are(section: SchedulerSection) -> None:
    keys = check_access(HttpSection(api_keys=(Secret("first alice"), Secret("second"))))
    with pytest.raises(ConfigError, match=r"names 'bo', .* there are: alice, key-2"):
        check_owners(section, keys)
    check_owners(SchedulerSection(tenant_weights={"alice": 2}, priority_tenants=("key-2",)), keys)


# A storm over real HTTP.

BUDGET = 48
QUIET_TOKENS = 120
ADMIN = "administrator"


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ServerProcess]:
    settings = {
        "SLIPSTREAM_HTTP__API_KEYS": "k-a a,k-b b,k-quiet quiet",
        "SLIPSTREAM_HTTP__ADMIN_KEY": ADMIN,
        "SLIPSTREAM_HTTP__PLAYGROUND": "false",
        "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "6",
        "SLIPSTREAM_SCHEDULER__MAX_MIXED_PREFILL_TOKENS": str(BUDGET),
        "SLIPSTREAM_OBSERVABILITY__TIMELINE_STEPS": "100000",
    }
    with ServerProcess.hypercorn({**environment, **settings}) as process:
        process.wait_ready()
        yield process


class Flood(threading.Thread):
    """Clients of one key that send large prompts and long generations, over and over."""

    def __init__(self, server: ServerProcess, key: str, clients: int) -> None:
        super().__init__(daemon=True)
        self._server, self._key, self._clients = server, key, clients
        self._ends = threading.Event()
        self.start()

    def end(self) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._clients)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            tasks = [asyncio.create_task(self._ask(client, i)) for i in range(self._clients)]
            while not self._ends.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        for turn in range(10**6):
            prompt = [3 + (number * 31 + turn * 7 + place) % 200 for place in range(500)]
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True}
            body["priority"] = -(2**31)
            with contextlib.suppress(httpx.TransportError):
                await client.post(
                    f"{self._server.url}/v1/completions", json=body, headers=bearer(self._key)
                )


def steps_to_first_token(server: ServerProcess, number: int) -> int:
    """Steps that began from the arrival of a quiet request to its first token."""
    prompt = [3 + (number * 13 + place * place) % 200 for place in range(QUIET_TOKENS)]
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    headers = {**bearer("k-quiet"), "x-request-id": f"q{number}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    url = f"{server.url}/debug/timeline?format=records"
    view = httpx.get(url, headers=bearer(ADMIN), timeout=30).json()
    track = next(each for each in view["requests"] if each["request_id"] == f"q{number}")
    arrival, first = track["arrival"], track["first_token"]
    return sum(arrival <= step["planned"] <= first for step in view["steps"])


def test_two_floods_cost_a_third_key_no_more_than_its_share(server: ServerProcess) -> None:
    """First token within twice the steps that the prompt takes at a third of their prompts."""
    fair = -(-QUIET_TOKENS // (BUDGET // 3))
    floods = [Flood(server, key, 20) for key in ("k-a", "k-b")]
    try:
        deadline = time.monotonic() + 60
        while True:
            view = httpx.get(f"{server.url}/debug/requests", headers=bearer(ADMIN)).json()
            if view["waiting"] >= 20:
                break
            assert time.monotonic() < deadline, json.dumps(view)[:500]
            time.sleep(0.1)
        steps = [steps_to_first_token(server, number) for number in range(6)]
    finally:
        for flood in floods:
            flood.end()
    assert statistics.median(steps) <= 2 * fair, steps
