"""`vllm-router` before two servers: requests spread, sessions and prefixes stick, one server dies.

Runs in the project's environment, which starts the servers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.common import MODEL, STORY, SUM, SUM_ANSWER, user
from tests.http.processes import ServerProcess, free_port

POLICIES = ("round_robin", "consistent_hash", "cache_aware", "power_of_two")
SERVER = {
    "SLIPSTREAM_CONFIG": "configs/demo.toml",
    "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
    "OMP_NUM_THREADS": "1",
}
# By default a router tries a dead server ten times before it leaves it alone, and a request six
# times: consistent_hash would send all six to the same server.
GIVES_UP = ("--cb-failure-threshold", "2")
START_SECONDS = 60
NOTICE_SECONDS = 30


class Router:
    """A router process; leaving the block ends it."""

    def __init__(self, policy: str, workers: list[ServerProcess], log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        command = ["vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        # Its own metrics have a port too, the same for every router by default.
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += GIVES_UP
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, "--worker-urls", *(worker.url for worker in workers)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"the router is not ready:\n{self.log.read_text()}")

    def chat(self, text: str = SUM, headers: dict[str, str] | None = None) -> dict[str, Any]:
        body = {"model": MODEL, "messages": user(text), "temperature": 0, "max_tokens": 24}
        return self.post("/v1/chat/completions", body, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, f"{answer.text}\n{self.log.read_text()[-3000:]}"
        decoded: dict[str, Any] = answer.json()
        return decoded

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ServerProcess.hypercorn(SERVER) as first, ServerProcess.hypercorn(SERVER) as second:
        first.wait_ready()
        second.wait_ready()
        yield [first, second]


@pytest.fixture(scope="module")
def routers(
    servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Router]]:
    folder = tmp_path_factory.mktemp("routers")
    started: dict[str, Router] = {}
    try:
        for policy in POLICIES:
            started[policy] = Router(policy, servers, folder / f"{policy}.log")
        for router in started.values():
            router.wait_ready()
        yield started
    finally:
        for router in started.values():
            router.close()


def served(servers: list[ServerProcess]) -> list[int]:
    """How many completions each server has finished."""
    counts = []
    for server in servers:
        text = server.get("/metrics").text
        lines = re.findall(r"^vllm:request_success_total\{.*\} ([\d.e+]+)$", text, re.MULTILINE)
        counts.append(int(sum(map(float, lines))))
    return counts


class Busy:
    """Long streams at an address inside the block, one after the other, two at a time."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url = url
        self.body = {**body, "stream": True, "ignore_eos": True, "max_tokens": 800}
        self.started, self.stop = threading.Event(), threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(2)]

    def run(self) -> None:
        while not self.stop.is_set():
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as answer:
                for _ in answer.iter_raw():
                    self.started.set()
                    if self.stop.is_set():
                        break

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()
        assert self.started.wait(START_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


class Spread:
    """Which servers the requests inside the block went to: `counts` afterwards."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self.servers = servers
        self.counts: list[int] = []

    def __enter__(self) -> Spread:
        self.before = served(self.servers)
        return self

    def __exit__(self, *_: object) -> None:
        after = served(self.servers)
        self.counts = [now - then for now, then in zip(after, self.before, strict=True)]


def test_round_robin_spreads_evenly(
    routers: dict[str, Router], servers: list[ServerProcess]
) -> None:
    with Spread(servers) as spread:
        for _ in range(8):
            answer = routers["round_robin"].chat()
            assert answer["choices"][0]["message"]["content"] == SUM_ANSWER
    assert spread.counts == [4, 4]


def test_streams_come_through(routers: dict[str, Router]) -> None:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 16, "temperature": 0, "stream": True}
    whole = routers["round_robin"].post("/v1/completions", {**body, "stream": False})
    with httpx.stream("POST", f"{routers['round_robin'].url}/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 4
    assert whole["choices"][0]["finish_reason"] == "length"


def test_sessions_stick(routers: dict[str, Router], servers: list[ServerProcess]) -> None:
    total = [0, 0]
    for session in range(12):
        with Spread(servers) as spread:
            for turn in range(3):
                routers["consistent_hash"].chat(
                    f"{SUM} {turn}", {"X-Session-ID": f"session-{session}"}
                )
        assert sorted(spread.counts) == [0, 3]
        total = [a + b for a, b in zip(total, spread.counts, strict=True)]
    assert all(total), "every session went to the same server"


def test_prefixes_stick(routers: dict[str, Router], servers: list[ServerProcess]) -> None:
    def about(topic: str, turn: int) -> str:
        return f"{topic}: " + f"This is all about {topic}. " * 12 + f"Question {turn}"

    router = routers["cache_aware"]
    topics = ("dogs and cats", "old ships at sea")
    # A prefix that nobody has seen goes to the less loaded server.
    body = {"model": MODEL, "messages": user(about(topics[0], 0))}
    with Busy(f"{router.url}/v1/chat/completions", body):
        router.chat(about(topics[1], 0))
    total = [0, 0]
    for topic in topics:
        with Spread(servers) as spread:
            answers = [router.chat(about(topic, turn)) for turn in range(1, 5)]
        assert sorted(spread.counts) == [0, 4]
        for answer in answers:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        total = [a + b for a, b in zip(total, spread.counts, strict=True)]
    assert total == [4, 4]


@pytest.mark.parametrize("busy", [0, 1])
def test_power_of_two_takes_the_less_loaded(
    routers: dict[str, Router], servers: list[ServerProcess], busy: int
) -> None:
    """It asks for the loads every few seconds, and goes by them until it asks again."""
    body = {"model": MODEL, "prompt": STORY}
    with Busy(f"{servers[busy].url}/v1/completions", body):
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline:
            with Spread(servers) as spread:
                for _ in range(4):
                    routers["power_of_two"].chat()
            if spread.counts[1 - busy] == 4:
                return
            time.sleep(0.5)
    raise AssertionError("requests went to the busy server")


def test_a_dead_server_loses_no_new_request(
    routers: dict[str, Router], servers: list[ServerProcess]
) -> None:
    """The last test of the module: it kills one of the servers."""
    dead = servers[1]
    os.killpg(dead.process.pid, signal.SIGKILL)
    dead.process.wait()
    for policy in POLICIES:
        for number in range(8):
            headers = {"X-Session-ID": f"session-{number}"}
            answer = routers[policy].chat(SUM, headers)
            assert answer["choices"][0]["message"]["content"] == SUM_ANSWER
