"""`codex exec` with a local provider: its own instructions, its own tools, two turns.

Runs in the project's environment, which starts the server: Codex sends some 14,000 tokens
of the demo model's, far more than its context. With a longer one it answers nonsense, in the right
form, which is what counts here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.common import MODEL, SUM
from tests.http.processes import ServerProcess

CHECKPOINT = Path("configs/demo")
CONTEXT = 24576
SECONDS = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    longer = tmp_path_factory.mktemp("codex") / "demo"
    shutil.copytree(CHECKPOINT, longer, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "*.md"))
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        values = json.loads((longer / name).read_text())
        (longer / name).write_text(json.dumps({**values, key: CONTEXT}))
    environment = {
        "SLIPSTREAM_CONFIG": "configs/demo.toml",
        "SLIPSTREAM_MODEL__PATH": str(longer),
        "SLIPSTREAM_CACHE__MEMORY_BYTES": str(256 << 20),
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
    }
    with ServerProcess.hypercorn(environment) as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, server: ServerProcess) -> Path:
    """Codex's folder, with the provider in its settings."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "config.toml").write_text(
        f"""\
model = "{MODEL}"
model_provider = "slipstream"

[model_providers.slipstream]
name = "Slipstream"
base_url = "{server.url}/v1"
wire_api = "responses"
"""
    )
    return folder


def codex(home: Path, *arguments: str) -> list[dict[str, Any]]:
    """The events that Codex reports of a turn."""
    done = subprocess.run(
        ["codex", "exec", *arguments],
        cwd=home,
        env={**os.environ, "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(events: list[dict[str, Any]]) -> dict[str, Any]:
    """One message came and the turn ended well; its usage."""
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    assert not failed
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert "agent_message" in [item["type"] for item in items]
    (usage,) = (event["usage"] for event in events if event["type"] == "turn.completed")
    assert usage["output_tokens"] > 0
    return dict(usage)


def test_two_turns(home: Path) -> None:
    first = check(codex(home, "--json", "--skip-git-repo-check", SUM))
    # It keeps the conversation itself and sends all of it again: most is in the cache.
    second = check(
        codex(home, "resume", "--last", "--json", "--skip-git-repo-check", "And 9 + 69?")
    )
    assert second["input_tokens"] > first["input_tokens"]
    assert second["cached_input_tokens"] > 0
