"""A server of the demo model exports to real receivers, each in a process of its own.

`nox -s otel` runs this: the receivers (`rotel`, a collector, and `arize-phoenix`, which answers
queries)
are installed into an environment of their own, whose directory is in ``OTEL_RECEIVERS``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.processes import ServerProcess, free_port

RECEIVERS = Path(os.environ["OTEL_RECEIVERS"])
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 2 plus 2?"}],
    "max_tokens": 16,
    "temperature": 0,
}
CHILDREN = {
    *("parse and tokenize", "admission", "queue", "prefill", "decode"),
    "detokenize and stream",
}


class Receiver:
    """A program that takes OTLP; leaving the block ends it."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def wait(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first result that is true; a receiver that is not there yet is waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if result := what():
                return result
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.2)
    raise AssertionError("it did not come in time")


def ask(environment: dict[str, str], tmp_path: Path) -> httpx.Response:
    """One chat with a caller's trace, of a server that is then stopped, which exports the rest."""
    variables = {
        "SLIPSTREAM_CONFIG": "configs/demo.toml",
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "SLIPSTREAM_OBSERVABILITY__TRACE_STEPS": "1",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        "OTEL_SERVICE_NAME": "slipstream-e2e",
        "OMP_NUM_THREADS": "1",
    }
    with ServerProcess.hypercorn(variables | environment) as server:
        server.wait_ready()
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60
        )
        server.terminate()
        assert server.wait_exit(30) == 0
        (tmp_path / "server.log").write_text(server.output)
    assert answer.status_code == 200
    assert "traceresponse" in answer.headers
    assert "telemetry" not in server_log(tmp_path)
    return answer


def server_log(tmp_path: Path) -> str:
    return (tmp_path / "server.log").read_text()


class RotelSpans:
    """What rotel's debug log says of the spans that it received."""

    _FIELD = re.compile(r"^\s*(Trace ID|Parent ID|ID|Name|Kind|Status code)\s*: ?(.*?)\s*$")

    def __init__(self, text: str) -> None:
        self.spans: list[dict[str, str]] = []
        for line in text.splitlines():
            if re.match(r"^\s*Span #\d+", line):
                self.spans.append({})
            elif self.spans and (found := self._FIELD.match(line)):
                self.spans[-1].setdefault(found[1], found[2])

    def named(self, name: str) -> dict[str, str]:
        return next(span for span in self.spans if span.get("Name") == name)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_rotel_takes_spans_and_metrics_over_both_protocols(protocol: str, tmp_path: Path) -> None:
    (program,) = RECEIVERS.glob("lib/python*/site-packages/rotel/rotel-agent")
    http, grpc = free_port(), free_port()
    log = tmp_path / "rotel.log"
    rotel = Receiver(
        [
            *(str(program), "start", "--exporter", "blackhole"),
            *("--debug-log", "traces", "--debug-log", "metrics"),
            *("--debug-log-verbosity", "detailed"),
            *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
            *("--otlp-http-endpoint", f"127.0.0.1:{http}"),
        ],
        log,
    )
    try:
        wait(lambda: "Starting Rotel" in log.read_text())
        port = grpc if protocol == "grpc" else http
        ask(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                "OTEL_METRICS_EXPORTER": "otlp",
            },
            tmp_path,
        )
        wait(lambda: "gen_ai.server.time_to_first_token" in log.read_text())
        wait(lambda: "chat demo" in log.read_text())
    finally:
        rotel.close()
    text = log.read_text()
    received = RotelSpans(text)
    root = received.named("chat demo")
    assert root["Trace ID"] == TRACE_ID
    assert root["Parent ID"] == PARENT_ID
    children = [span for span in received.spans if span.get("Parent ID") == root["ID"]]
    assert {span["Name"] for span in children} == CHILDREN
    assert {span["Trace ID"] for span in children} == {TRACE_ID}
    assert received.named("step")["Trace ID"] != TRACE_ID
    assert received.named("startup")["Trace ID"] != TRACE_ID
    for expected in (
        "slipstream-e2e",
        "gen_ai.usage.output_tokens",
        "gen_ai.server.request.duration",
    ):
        assert expected in text


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Its URL, and the port that takes gRPC."""
    directory = tmp_path_factory.mktemp("phoenix")
    http, grpc = free_port(), free_port()
    url = f"http://127.0.0.1:{http}"
    program = Receiver(
        [str(RECEIVERS / "bin" / "phoenix"), "serve"],
        directory / "log",
        PHOENIX_HOST="127.0.0.1",
        PHOENIX_PORT=str(http),
        PHOENIX_GRPC_PORT=str(grpc),
        PHOENIX_WORKING_DIR=str(directory),
        PHOENIX_TELEMETRY_ENABLED="false",
    )
    try:
        wait(lambda: httpx.get(f"{url}/v1/projects", timeout=5).status_code == 200, 180)
        yield url, grpc
    finally:
        program.close()


def test_phoenix_shows_the_request_under_its_callers_trace(
    phoenix: tuple[str, int], tmp_path: Path
) -> None:
    url, _ = phoenix
    answer = ask({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, tmp_path)

    def spans() -> dict[str, dict[str, Any]]:
        page = httpx.get(f"{url}/v1/projects/default/spans?limit=1000", timeout=10).json()
        return {span["name"]: span for span in page["data"]}

    root = wait(lambda: spans()["chat demo"])
    found = spans()
    assert root["context"]["trace_id"] == TRACE_ID
    assert root["parent_id"] == PARENT_ID
    own = root["context"]["span_id"]
    assert {name for name, span in found.items() if span["parent_id"] == own} == CHILDREN
    attributes = root["attributes"]
    usage = answer.json()["usage"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.request.temperature"] == 0.0
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    start = found["startup"]["context"]["span_id"]
    phases = {name for name, span in found.items() if span["parent_id"] == start}
    assert phases == {"importing", "configuration", "weights", "kv_cache"}
    assert "step" in found


def test_a_collector_that_is_not_there_costs_one_line(tmp_path: Path) -> None:
    variables = {
        "SLIPSTREAM_CONFIG": "configs/demo.toml",
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OMP_NUM_THREADS": "1",
    }
    with ServerProcess.hypercorn(variables) as server:
        server.wait_ready()
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
            assert answer.status_code == 200
            time.sleep(1.5)
        wait(lambda: "telemetry collector" in server.output)
        server.terminate()
        assert server.wait_exit(30) == 0
        output = server.output
    assert output.count("the telemetry collector does not take spans") == 1
    assert "Traceback" not in output
