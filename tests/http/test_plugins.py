"""The package of docs/plugins.md, installed outside the tree, and used over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from src import AsyncEngine, SamplingParams
from tests.http.processes import ServerProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config
from tests.support.plugin_packages import NAME, install_echo

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PROMPT = [5, 6, 7, 8, 9]
FUNCTION = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["count"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_echo(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("of") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def echo(llama: Path) -> Path:
    """The same weights; its `config.json` is one that the plugin's family alone can read."""
    folder = llama.parent / "echo"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["EchoForCausalLM"], "model_type": "echo"}
    config["echo_layers"] = config.pop("num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def variables(model: Path, installed: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]),
        "SLIPSTREAM_MODEL": str(model),
        "SLIPSTREAM_PLUGINS__ENABLED": NAME,
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "SLIPSTREAM_DEVICE__NUM_THREADS": "1",
        "SLIPSTREAM_CACHE__NUM_BLOCKS": "512",
        "SLIPSTREAM_CHAT__REQUEST_TEMPLATES": "all",
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def server(request: pytest.FixtureRequest, echo: Path, installed: Path) -> Iterator[ServerProcess]:
    environment = variables(echo, installed)
    environment["SLIPSTREAM_SCHEDULER__PIPELINE_DEPTH"] = str(request.param)
    with ServerProcess.serve(environment) as server:
        server.wait_ready()
        yield server


def recent(window: int, penalty: float) -> list[dict[str, Any]]:
    return [{"name": "recent", "arguments": {"window": window, "penalty": penalty}}]


async def complete(client: httpx.AsyncClient, **fields: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer = await client.post("/v1/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def test_its_family_is_served_as_the_model_that_it_describes(
    server: ServerProcess, llama: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    async with AsyncEngine.open(small_config(llama, compile__enforce_eager=True)) as engine:
        expected = (await engine.generate(PROMPT, params)).completions[0].token_ids
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert await complete(client, temperature=0) == list(expected)


async def test_its_kernel_draws(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        await complete(client, temperature=1)
    assert server.output.count("the plugin's kernel draws") == 1


async def test_its_logits_processor_changes_the_requests_that_name_it(
    server: ServerProcess,
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        plain = await complete(client, temperature=0)
        assert len(set(plain)) < len(plain)
        ids = await complete(client, temperature=0, logits_processors=recent(4096, 100))
        assert len({*PROMPT, *ids}) == len(PROMPT) + len(ids)
        # Of the last token alone: none follows itself.
        ids = await complete(client, temperature=0, logits_processors=recent(1, 99))
        assert all(a != b for a, b in zip([PROMPT[-1], *ids], ids))
        assert len(set(ids)) < len(ids)
        assert await complete(client, temperature=0, logits_processors=[]) == plain
        assert await complete(client, temperature=0, logits_processors=recent(64, 0)) == plain


async def test_seeded_text_is_the_same_in_any_batch(server: ServerProcess) -> None:
    kinds: list[dict[str, Any]] = [
        {"logits_processors": recent(64, 3.0)},
        {},
        {"logits_processors": recent(2, 50.0), "top_k": 20},
        {"logits_processors": [*recent(64, 2.0), *recent(3, 1.0)], "frequency_penalty": 0.5},
    ]
    asked = [{"seed": number, "temperature": 0.1, **kind} for number in range(4) for kind in kinds]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        alone = [await complete(client, **fields) for fields in asked]
        together = await asyncio.gather(*(complete(client, **fields) for fields in asked))
    assert together == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("processors", "where"),
    [
        ([{"name": "recent"}], "logits_processors[0].arguments: "),
        (recent(0, 1.0), "logits_processors[0].arguments.window: "),
        (recent(1, 100), "logits_processors[0].arguments: a window of one token"),
        ([*recent(2, 1), {"name": "recent", "arguments": {"window": "x"}}],
         "logits_processors[1].arguments.window: "),
        ([{"name": "recent", "arguments": {"window": 2, "other": 1}}], "unknown field `other`"),
        ([{"name": "recent", "arguments": {"window": 2, "pad": "x" * 17_000}}], "16384 bytes"),
        ([{"name": "nobody"}], "[0].name: there is no 'nobody'"),
        (recent(2, 1) * 9, "logits_processors"),
        (["recent"], "logits_processors"),
        ([{"name": "recent", "arguments": [1]}], "logits_processors"),
    ],
)  # fmt: skip
async def test_arguments_that_do_not_fit_are_refused_by_their_place(
    server: ServerProcess, processors: Any, where: str
) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions/render", {"prompt": "x"}),
        ):
            body = {**prompt, "logits_processors": processors, "max_tokens": 1}
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"].startswith("logits_processors")
            assert where in error["message"]


async def test_its_syntaxes_are_found_in_a_template(server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Look."}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "chat_template": "{# <echo:call> </ponder> #}{{ messages }}",
        "max_tokens": 200,
        "seed": 3,
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call, *_) = choice["message"]["tool_calls"]
        assert 0 <= json.loads(call["function"]["arguments"])["count"] <= 99
        # And a grammar makes the model write in it: the same answer unread has the tag.
        plain = {**body, "return_token_ids": True}
        ids = (await client.post("/v1/chat/completions", json=plain)).json()
        given = await client.post("/detokenize", json={"tokens": ids["choices"][0]["token_ids"]})
        assert given.json()["prompt"].startswith('<echo:call>{"name": "look"')


def test_a_kernel_for_the_cpu_beside_compiled_code_ends_the_start(
    echo: Path, installed: Path
) -> None:
    environment = variables(echo, installed) | {"SLIPSTREAM_COMPILE__ENFORCE_EAGER": "false"}
    with ServerProcess.serve(environment) as server:
        assert server.wait_exit() != 0
        assert "plugin slipstream-echo, entry draw of slipstream.ops: a kernel" in server.output
