"""Whole servers: exit codes, signals, and the other ASGI servers."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.http.processes import ServerProcess
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(240)

Start = Callable[[dict[str, str]], ServerProcess]
STARTS: dict[str, Start] = {
    "hypercorn": ServerProcess.hypercorn,
    "uvicorn": ServerProcess.uvicorn,
    "granian": ServerProcess.granian,
    "serve": ServerProcess.serve,
}


def complete(server: ServerProcess, **fields: object) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 3, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


class Reader(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._max_tokens = max_tokens
        self.begun = threading.Event()
        self.text = ""
        self.start()

    def run(self) -> None:
        body = {
            "prompt": "hello",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self._server.url}/v1/completions"
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url, json=body, timeout=60) as answer,
        ):
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()


@pytest.fixture(scope="module")
def servers(environment: dict[str, str]) -> Iterator[dict[str, ServerProcess]]:
    """One of each kind, started side by side, since each imports torch."""
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(start(environment))
            for name, start in STARTS.items()
            if name != "hypercorn"
        }
        for server in started.values():
            server.wait_ready()
        yield started


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Servers whose model cannot be loaded."""
    empty = tmp_path_factory.mktemp("empty")
    environment = {"SLIPSTREAM_MODEL": str(empty), "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true"}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(start(environment)) for name, start in STARTS.items()}


@pytest.mark.parametrize("name", STARTS)
def test_a_failed_load_ends_the_process_with_a_reason(
    broken: dict[str, ServerProcess], name: str
) -> None:
    server = broken[name]
    code = server.wait_exit()
    expected = {"hypercorn": -signal.SIGUSR1, "uvicorn": 3, "granian": 1, "serve": 3}
    assert code == expected[name], server.output
    reasons = [line for line in server.output.splitlines() if line.startswith("slipstream: ")]
    assert len(reasons) == 1
    assert "the model could not be loaded: ModelLoadError" in reasons[0]
    assert "Traceback" not in server.output
    assert "leaked" not in server.output


@pytest.fixture(scope="module")
def unable(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """Servers that were asked for drafts which nobody can make for their model."""
    draft = make_checkpoint(tmp_path_factory.mktemp("draft"), tokenizer=True, num_hidden_layers=1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (draft / file).read_text()
        (draft / file).write_text(text.replace("<|im_end|>", "<|im_stop|>"))
    settings = {
        "draft": ("--set", "speculation.method=draft", "--set", f"speculation.model={draft}"),
        "mtp": ("--set", "speculation.method=mtp"),
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(ServerProcess.serve(environment, *options))
            for name, options in settings.items()
        }


@pytest.mark.parametrize(
    ("name", "field", "expected", "found"),
    [
        ("draft", "speculation.model", "token 2 must be '<|im_end|>'", "got '<|im_stop|>'"),
        (
            "mtp",
            "speculation.method = mtp",
            "no layer that predicts further tokens",
            "LlamaForCausalLM",
        ),
    ],
)
def test_drafts_that_cannot_be_made_end_the_process_with_a_reason(
    unable: dict[str, ServerProcess], name: str, field: str, expected: str, found: str
) -> None:
    server = unable[name]
    assert server.wait_exit() == 3, server.output
    (reason,) = [line for line in server.output.splitlines() if line.startswith("slipstream: ")]
    assert f"the model could not be loaded: ConfigError: {field}: " in reason
    assert expected in reason
    assert found in reason
    assert "Traceback" not in server.output


def test_a_bad_setting_ends_the_process_before_the_port_opens(
    environment: dict[str, str],
) -> None:
    with ServerProcess.hypercorn({**environment, "SLIPSTREAM_MODLE": "x"}) as server:
        assert server.wait_exit() == -signal.SIGUSR1
        assert "unknown environment variable SLIPSTREAM_MODLE; did you mean" in server.output
        assert "Running on" not in server.output
    with ServerProcess.serve(environment, "--set", "model.dtype=int3") as server:
        assert server.wait_exit() == 2
        assert "model.dtype='int3': expected one of auto" in server.output


def test_a_dead_engine_ends_the_process_with_a_code_of_its_own(
    environment: dict[str, str],
) -> None:
    with ServerProcess.hypercorn(environment, app="tests.http.server.dying_app:app") as server:
        server.wait_ready()
        answer = complete(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        assert server.wait_exit(30) == -signal.SIGUSR2
        assert "slipstream: the engine died: MemoryError: broken on purpose" in server.output


@pytest.mark.parametrize("name", ["uvicorn", "granian", "serve"])
def test_every_server_serves_and_streams(servers: dict[str, ServerProcess], name: str) -> None:
    server = servers[name]
    answer = complete(server, temperature=0)
    assert answer.status_code == 200
    streamed = complete(server, temperature=0, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    # A client that leaves frees what it asked for.
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "n": 8},
            timeout=httpx.Timeout(60, read=0.1),
        )
    deadline = time.monotonic() + 60
    idle = 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0'
    while idle not in server.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_serve_finishes_streams_after_sigterm_and_refuses_the_rest(
    servers: dict[str, ServerProcess],
) -> None:
    server = servers["serve"]
    reader = Reader(server, 400)
    assert reader.begun.wait(30)
    server.terminate()
    server.wait_for("/ready", 503)
    refused = complete(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    reader.join(60)
    assert '"finish_reason":"length"' in reader.text
    assert reader.text.endswith("data: [DONE]\n\n")
    assert server.wait_exit(30) == 0
    with pytest.raises(httpx.TransportError):
        server.get("/live")


def test_late_bodies_are_refused_and_a_second_signal_ends_at_once(
    environment: dict[str, str],
) -> None:
    with ServerProcess.serve({**environment, "SLIPSTREAM_HTTP__BODY_TIMEOUT": "0.5"}) as server:
        server.wait_ready()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()
        assert b'"code":"body_timeout"' in answer
        readers = [Reader(server, 1000) for _ in range(16)]
        assert all(reader.begun.wait(30) for reader in readers)
        server.terminate()
        server.wait_for("/ready", 503)
        started = time.monotonic()
        server.terminate()
        # The first signal grants twenty seconds.
        assert server.wait_exit(30) == 0, server.output
        assert time.monotonic() - started < 15
        for reader in readers:
            reader.join(30)
        assert any('"error"' in reader.text for reader in readers)
        assert "Traceback" not in server.output


def test_a_half_sent_request_does_not_hold_the_end(environment: dict[str, str]) -> None:
    with ServerProcess.serve(environment) as server:
        server.wait_ready()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
            )
            time.sleep(0.1)
            server.terminate()
            started = time.monotonic()
            assert server.wait_exit(25) == 0, server.output
            # Less than the 30 s that a body may take. From Python 3.12 on it is the last patience.
            assert time.monotonic() - started < 20


# Uvicorn raises the signal again after its orderly end.
@pytest.mark.parametrize(("name", "code"), [("uvicorn", -signal.SIGTERM), ("granian", 0)])
def test_other_servers_end_after_sigterm(
    servers: dict[str, ServerProcess], name: str, code: int
) -> None:
    servers[name].terminate()
    assert servers[name].wait_exit(30) == code


def test_sigterm_ends_a_server_that_is_loading(environment: dict[str, str]) -> None:
    with ServerProcess.serve(environment) as server:
        server.wait_for("/live")
        server.terminate()
        started = time.monotonic()
        assert server.wait_exit(60) == 0
        assert time.monotonic() - started < 30


def test_importing_the_application_brings_neither_torch_nor_a_model() -> None:
    code = "import sys, src.http; assert not {'torch', 'transformers'} & set(sys.modules)"
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


def test_a_port_in_use_is_one_readable_line(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with ServerProcess.serve(environment, "--port", port) as server:
            assert server.wait_exit(60) == 1
            assert f"slipstream: cannot listen on 127.0.0.1:{port}: " in server.output


def test_sigterm_during_background_compilation_is_an_orderly_end(
    environment: dict[str, str], tmp_path: Path
) -> None:
    compiling = {
        **environment,
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "false",
        "SLIPSTREAM_COMPILE__STARTUP": "background",
        # Nothing compiled before may be found.
        "SLIPSTREAM_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    with ServerProcess.serve(compiling) as server:
        server.wait_ready()
        server.terminate()
        assert server.wait_exit(30) == 0, server.output
