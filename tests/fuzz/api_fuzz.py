"""Schemathesis asks everything that /openapi.json allows, and what it does not: `nox -s fuzz`.

Not collected with the other tests: it takes minutes, and needs the group `fuzz`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.http.processes import ServerProcess
from tests.support.checkpoints import make_checkpoint

HERE = Path(__file__).parent
KEY = "sk-fuzz-0123456789"
# Of each operation and phase; and seconds for all of them.
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "100")
SECONDS = os.environ.get("FUZZ_SECONDS", "600")


@pytest.mark.timeout(7200)
def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    assert program is not None, "the dependency group fuzz brings schemathesis"
    checkpoint = make_checkpoint(
        tmp_path / "tiny", tokenizer=True, num_hidden_layers=2, max_position_embeddings=64
    )
    environment = {
        "SLIPSTREAM_MODEL": str(checkpoint),
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "SLIPSTREAM_DEVICE__NUM_THREADS": "1",
        "SLIPSTREAM_CACHE__NUM_BLOCKS": "512",
        "SLIPSTREAM_HTTP__API_KEYS": KEY,
        "OMP_NUM_THREADS": "1",
    }
    with ServerProcess.serve(environment) as server:
        server.wait_ready()
        command = [
            *(program, "--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"{server.url}/openapi.json", "--checks", "all"),
            *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", EXAMPLES),
            *("--max-time", SECONDS, "--request-timeout", "60", "--continue-on-failure"),
            *("--header", f"Authorization: Bearer {KEY}"),
            *("--suppress-health-check", "all", "--warnings", "off", "--no-color"),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout[-20_000:])
        assert done.returncode == 0
        assert server.get("/health").status_code == 200
        assert "Traceback" not in server.output
        server.terminate()
        assert server.wait_exit(30) == 0
