"""One client attacks, another one has a greedy answer written, and a probe asks for `/live`.

The probe's answers are compared with those beside an idle server of the same minute: the machine
may have other things to do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from src.bench.soak.attacks import Attack, attacks
from tests.attack.servers import DEMO, environment, wait_idle
from tests.http.processes import ServerProcess

pytestmark = pytest.mark.timeout(400)

SPACE = 227
# Seconds that one attack lasts, and for which any probe may wait.
SECONDS = 4.0
BOUND = 0.2
# A machine that is busy at just this moment may be asked again.
TRIES = 3
ATTACKS = attacks(SPACE, 900, 24)
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model, whose tokenizer has a token more than its embedding, over hypercorn."""
    path = tmp_path_factory.mktemp("attack") / "demo"
    shutil.copytree(DEMO, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": 2048, "content": "<|new|>", **flags, "special": True})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with ServerProcess.hypercorn(environment(path), "--keep-alive", "75") as process:
        process.wait_ready()
        yield process


class Prober(threading.Thread):
    """Asks `/live` on a connection of its own, over and over; `waits` are seconds for an answer."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.waits: list[float] = []
        self._port = port
        self._ended = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._ended.is_set():
            begun = time.monotonic()
            connection.request("GET", "/live")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            self.waits.append(time.monotonic() - begun)
            time.sleep(0.005)
        connection.close()

    def __enter__(self) -> Prober:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(60)


def written(server: ServerProcess) -> str:
    """A greedy answer, of which each token takes a step."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    content = json.loads(answer.read())
    assert answer.status == 200, content
    connection.close()
    text: str = content["choices"][0]["text"]
    return text


def attacked(server: ServerProcess, attack: Attack, until: float) -> list[bytes]:
    """The attack over and over, each on a connection of its own; how the answers begin."""
    answers = []
    while (left := until - time.monotonic()) > 0:
        with socket.create_connection(("127.0.0.1", server.port), timeout=left) as connection:
            received = b""
            # It is left when its time is over, and may be ended before it was sent.
            with contextlib.suppress(OSError):
                connection.sendall(attack.request)
                while time.monotonic() < until and (piece := connection.recv(65536)):
                    received = received or piece[:12]
            answers.append(received)
    return answers


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_nobody_else_notices(server: ServerProcess, attack: Attack) -> None:
    expected = written(server)
    for _ in range(TRIES):
        with Prober(server.port) as idle:
            time.sleep(1.0)
        until = time.monotonic() + SECONDS
        answers: list[bytes] = []
        attacker = threading.Thread(
            target=lambda: answers.extend(attacked(server, attack, until))  # noqa: B023
        )
        texts: list[str] = []
        with Prober(server.port) as prober:
            attacker.start()
            while time.monotonic() < until:
                texts.append(written(server))
            attacker.join()
        assert set(texts) == {expected}
        assert answers
        for answer in answers:
            assert not answer or answer.startswith(attack.answers), answer
        longest, beside_idle = max(prober.waits), max(idle.waits)
        if longest <= max(BOUND, 2 * beside_idle):
            break
    else:
        pytest.fail(f"a probe waited {longest:.3f} s, {beside_idle:.3f} s beside an idle server")
    assert "Traceback" not in server.output


@pytest.fixture(autouse=True)
def all_is_over(server: ServerProcess) -> Iterator[None]:
    """What one attack left running is no part of the next one."""
    yield
    wait_idle(server)
