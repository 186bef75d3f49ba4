"""Servers whose chat template, or a client's, never ends: everybody else is served meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from src import AsyncEngine
from src.core.settings import CHECKOUT, load_config
from src.text.template_forms import PROBE_SECONDS
from src.text.template_pool import MAX_SECONDS
from tests.http.processes import ServerProcess
from tests.text.test_template_pool import ENDLESS, children, is_alive

pytestmark = pytest.mark.timeout(240)

DEMO = CHECKOUT / "configs" / "demo"
HELLO = [{"role": "user", "content": "What is 5 + 29?"}]
CHAT = "/v1/chat/completions"
# Not one turn of a loop: no check between operations would notice it.
DIVISION = (
    "{% set n = messages | length %}{% set x = ('f' * (9000000 * n)) | int(0, 16) %}"
    "{{ x // (('e' * (4000000 * n)) | int(0, 16)) }}"
)


def checkpoint(path: Path, template: str) -> dict[str, str]:
    """The bundled model with this template; what serves it."""
    shutil.copytree(DEMO, path)
    (path / "chat_template.jinja").write_text(template)
    return {"SLIPSTREAM_MODEL": str(path), "SLIPSTREAM_COMPILE__STARTUP": "off"}


def asked(server: ServerProcess, path: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(server.url + path, json=body, timeout=150)


def renderers(server: ServerProcess) -> list[int]:
    """Processes under the server's own that render."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"src.text.template_process" not in command.read_bytes():
                continue
            stat = (command.parent / "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        if parent in family(server.process.pid):
            found.append(int(command.parent.name))
    return found


def family(pid: int) -> set[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid, *map(int, children)}


def test_a_checkpoint_whose_template_never_ends_starts_and_completes_prompts(
    tmp_path: Path,
) -> None:
    environment = checkpoint(tmp_path / "hostile", DIVISION)
    with ServerProcess.hypercorn(environment) as server:
        server.wait_ready()
        said = "on a conversation of a few words"
        assert said in next(
            line for line in server.output.splitlines() if "no conversation can be served" in line
        )
        begun = time.monotonic()
        for path, fields in (
            (CHAT, {"messages": HELLO}),
            ("/tokenize", {"messages": HELLO}),
            ("/v1/messages", {"messages": HELLO}),
            ("/v1/responses", {"input": "Hello", "max_tokens": None}),
        ):
            answer = asked(server, path, **fields)
            assert answer.status_code == 400, answer.text
            assert said in answer.text
        assert asked(server, "/v1/completions", prompt="Once").status_code == 200
        # Nothing is rendered any more.
        assert time.monotonic() - begun < 5 * MAX_SECONDS
        begun = time.monotonic()
        server.terminate()
        server.wait_exit()
        assert time.monotonic() - begun < 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Takes clients' templates; its own takes for ever over a certain word."""
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    own = "{% if messages[-1].content == 'for ever' %}" + ENDLESS + "{% endif %}" + template
    environment = checkpoint(tmp_path_factory.mktemp("templates") / "model", own)
    environment["SLIPSTREAM_CHAT__REQUEST_TEMPLATES"] = "all"
    with ServerProcess.hypercorn(environment) as process:
        process.wait_ready()
        yield process


@pytest.mark.parametrize("whose", ["clients", "own"])
def test_others_are_served_while_templates_never_end(server: ServerProcess, whose: str) -> None:
    answers: list[httpx.Response] = []

    def attack(number: int) -> None:
        messages = HELLO
        fields: dict[str, Any] = {"chat_template": f"{number}{DIVISION}"}
        if whose == "own":
            # Long, as a conversation is that takes a usual template seconds.
            padding = {"role": "user", "content": "x" * 300_000}
            messages, fields = [padding, {"role": "user", "content": "for ever"}], {}
        answers.append(asked(server, CHAT, messages=messages, **fields))

    quiet = median_wait(server)
    attackers = [threading.Thread(target=attack, args=(number,)) for number in range(4)]
    for thread in attackers:
        thread.start()
    time.sleep(1.0)
    # Attackers take both CPUs of a small machine.
    assert median_wait(server) < 1 + 4 * quiet
    assert any(thread.is_alive() for thread in attackers), "nobody attacked meanwhile"
    for thread in attackers:
        thread.join(150)
    for answer in answers:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages"
        assert f"takes more than {MAX_SECONDS:g} s of CPU time" in error["message"] or (
            f"takes more than {PROBE_SECONDS:g} s of CPU time on a conversation" in error["message"]
        )
    if whose == "clients":
        again = asked(server, CHAT, messages=HELLO, chat_template=f"0{DIVISION}")
        assert again.status_code == 400
        assert "not tried again" in again.text


def median_wait(server: ServerProcess) -> float:
    """Seconds that a few requests take together."""
    waits = []
    for _ in range(5):
        begun = time.monotonic()
        assert server.get("/live").status_code == 200
        assert asked(server, CHAT, messages=HELLO).status_code == 200
        assert asked(server, "/v1/completions", prompt="Once").status_code == 200
        waits.append(time.monotonic() - begun)
    return sorted(waits)[len(waits) // 2]


def test_a_renderer_that_is_killed_is_replaced(server: ServerProcess) -> None:
    pids = renderers(server)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert asked(server, CHAT, messages=HELLO).status_code == 200
    assert not set(pids) & set(renderers(server))
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.anyio
async def test_a_closed_engine_leaves_no_process(tmp_path: Path) -> None:
    config = load_config(CHECKOUT / "configs" / "demo.toml", overrides=[("compile.startup", "off")])
    before = set(children())
    async with AsyncEngine.open(config) as engine:
        assert await engine.tokenize(HELLO)
        with anyio.fail_after(30):
            assert await engine.tokenize(HELLO)
        assert set(children()) - before
    assert not set(children()) - before
