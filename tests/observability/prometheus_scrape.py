"""Prometheus itself scrapes a server and answers every query of the dashboard.

Not collected with the other tests: `nox -s prometheus` runs it where the binary is on PATH.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.processes import ServerProcess, free_port
from tests.observability.dashboard import Query, queries

pytestmark = pytest.mark.timeout(300)

INTERVAL = "15s"
TRACE = "0af7651916cd43dd8448eb211c80319c"
TOKENS = 25


class Prometheus:
    """The binary with a configuration and a database in a temporary directory."""

    def __init__(self, directory: Path, target: str) -> None:
        binary = shutil.which("prometheus")
        assert binary is not None, "prometheus is not on PATH"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = (directory / "log").open("w+")
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n"
            f"  - {{job_name: slipstream, static_configs: [{{targets: ['{target}']}}]}}\n"
        )
        self._process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        if answer.status_code == 503:
            # It is still starting, and says so in plain text.
            answer.raise_for_status()
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.ask("query", query=expression)["result"]
        return result

    def value(self, expression: str) -> float:
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else math.nan

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if holds():
                    return
            except httpx.HTTPError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise AssertionError(f"it never came true:\n{self._log.read()[-4000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    environment = {
        "SLIPSTREAM_MODEL": "configs/demo",
        "SLIPSTREAM_MODEL__SERVED_MODEL_NAME": "demo",
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "SLIPSTREAM_CACHE__NUM_BLOCKS": "1024",
        # Spans are made, and thrown away.
        "OTEL_TRACES_EXPORTER": "console",
    }
    with ServerProcess.serve(environment) as server:
        server.wait_ready()
        yield server


def load(server: ServerProcess, seconds: float) -> int:
    """Requests for so many seconds; returns how many tokens were asked for and given."""

    def ask(index: int) -> int:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": f"Once upon a time {index}", "max_tokens": TOKENS, "ignore_eos": True},
            headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    tokens, deadline = 0, time.monotonic() + seconds
    with ThreadPoolExecutor(4) as threads:
        while time.monotonic() < deadline:
            tokens += sum(threads.map(ask, range(8)))
    return tokens


@pytest.fixture(scope="module")
def scraped(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, int]]:
    """Prometheus after some load, and the output tokens of that load."""
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{server.port}")
    try:
        refused = {"prompt": "x", "model": "other"}
        httpx.post(f"{server.url}/v1/completions", json=refused, timeout=10)
        prometheus.wait_until(lambda: prometheus.value('up{job="slipstream"}') == 1)
        tokens = load(server, 10)
        total = "sum(vllm:generation_tokens_total)"
        prometheus.wait_until(lambda: prometheus.value(total) >= tokens)
        yield prometheus, tokens
    finally:
        prometheus.stop()


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}-{query.legend}")
def test_a_query_has_a_result(query: Query, scraped: tuple[Prometheus, int]) -> None:
    prometheus, _ = scraped
    expression = query.filled_in("demo", INTERVAL)
    result = prometheus.query(expression)
    assert result, expression
    values = [float(entry["value"][1]) for entry in result]
    assert any(math.isfinite(value) for value in values), (expression, values)


def test_what_prometheus_counted_is_what_was_served(scraped: tuple[Prometheus, int]) -> None:
    prometheus, tokens = scraped
    requests = tokens // TOKENS
    assert prometheus.value("sum(vllm:generation_tokens_total)") == tokens
    assert prometheus.value("sum(vllm:request_success_total)") == requests
    assert prometheus.value("sum(vllm:e2e_request_latency_seconds_count)") == requests
    quantile = prometheus.value(
        "histogram_quantile(0.5, sum by (le) (vllm:e2e_request_latency_seconds_bucket))"
    )
    assert 0 < quantile < 60


def test_types_and_texts_arrive(scraped: tuple[Prometheus, int]) -> None:
    prometheus, _ = scraped
    metadata = prometheus.ask("metadata")
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:iteration_tokens_total": "histogram",
        "slipstream_step_phase_seconds": "histogram",
    }
    for name, kind in kinds.items():
        assert [entry["type"] for entry in metadata[name]] == [kind], name
    # In OpenMetrics a counter's family is called without the suffix of its sample.
    counters = [name for name in metadata if name.startswith("vllm:generation_tokens")]
    assert [metadata[name][0]["type"] for name in counters] == ["counter"]


def test_nothing_was_dropped_from_a_scrape(scraped: tuple[Prometheus, int]) -> None:
    prometheus, _ = scraped
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    seen = prometheus.value("scrape_samples_scraped")
    assert seen > 500
    assert seen == prometheus.value("scrape_samples_post_metric_relabeling")


def test_buckets_lead_to_traces(scraped: tuple[Prometheus, int]) -> None:
    prometheus, _ = scraped
    now = time.time()
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        found = prometheus.ask(
            "query_exemplars",
            query=f"vllm:{name}_seconds_bucket",
            start=str(now - 120),
            end=str(now),
        )
        traces = {
            exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]
        }
        assert traces == {TRACE}, name
