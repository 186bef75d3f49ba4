"""`guidellm run`: its own check of the server, then streamed chats at a fixed concurrency."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.clients.common import URL

SECONDS = 240
REQUESTS = 8
TOKENS = 12


def test_streamed_chats(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={URL}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", "kind=huggingface_auto,model=configs/demo"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == TOKENS
