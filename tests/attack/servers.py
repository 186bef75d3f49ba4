"""The servers that are attacked."""

from __future__ import annotations

import time
from pathlib import Path

from tests.http.processes import ServerProcess
from tests.support.compiling import compile_variables

DEMO = Path(__file__).parents[2] / "configs" / "demo"
# The longest that it may take until nothing of an attack is left.
_LONGEST = 90


def environment(path: Path) -> dict[str, str]:
    """Of a server of the model in a directory, on one thread."""
    return {
        "SLIPSTREAM_MODEL": str(path),
        "SLIPSTREAM_DEVICE__NUM_THREADS": "1",
        "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "32",
        **compile_variables(),
        "OMP_NUM_THREADS": "1",
    }


def wait_idle(server: ServerProcess) -> None:
    """Wait until what an attack left behind is gone, and is no part of the next one."""
    deadline, running = time.monotonic() + _LONGEST, [""]
    while running:
        lines = server.get("/metrics").text.splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        found = [line for line in lines if line.startswith(names)]
        assert found
        running = [line for line in found if float(line.rpartition(" ")[2])]
        assert time.monotonic() < deadline, running
        time.sleep(0.1)
