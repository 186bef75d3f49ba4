"""`aiperf profile`: streamed chats, and the server's own metrics beside them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.common import MODEL, URL

SECONDS = 240
REQUESTS = 8
TOKENS = 12


def profile(folder: Path, endpoint: str) -> Path:
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", endpoint]
    command += ["--streaming", "--concurrency", "2", "--request-count", str(REQUESTS)]
    command += ["--isl", "40", "--osl", str(TOKENS), "--tokenizer", "configs/demo"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile(tmp_path_factory.mktemp("aiperf"), "chat")


def test_streamed_chats(artifacts: Path) -> None:
    figures = json.loads((artifacts / "profile_export_aiperf.json").read_text())
    assert figures["error_summary"] == []
    assert figures["request_count"]["avg"] == REQUESTS
    # Its own count differs where the text of some tokens is other tokens again; the server's is so.
    assert figures["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    assert figures["usage_prompt_cache_read_tokens"]["avg"] >= 0
    assert figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]


def test_metrics_of_the_server(artifacts: Path) -> None:
    metrics = json.loads((artifacts / "server_metrics_export.json").read_text())["metrics"]
    assert {"vllm:time_to_first_token_seconds", "vllm:kv_cache_usage_perc"} <= set(metrics)
