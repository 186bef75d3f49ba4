"""A server that a command started ends with it, however the command is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.bench.server_process import left_by_signals
from src.core.settings import CHECKOUT

pytestmark = pytest.mark.timeout(120)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def signal_self(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """As a terminal has them: who runs tests behind `nohup` hands on that SIGHUP is ignored."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["startup", "soak"])
def test_a_command_that_is_ended_leaves_no_server(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "src", "bench", command, "--config", "configs/demo.toml"],
        cwd=CHECKOUT,
        # Without a compiler, which would have to be ended with it.
        env={**os.environ, "TMPDIR": str(tmp_path), "CXX": "no-such-compiler"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    servers: list[int] = []
    try:
        while not servers:
            assert bench.poll() is None
            time.sleep(0.02)
            servers = list(filter(is_server, children_of(bench.pid)))
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
        assert bench.returncode == 128 + number, errors
        assert not any(map(is_server, servers))
        assert not list(tmp_path.iterdir())
    finally:
        bench.kill()
        bench.communicate()
        for server in filter(is_server, servers):
            os.killpg(server, signal.SIGKILL)


@pytest.mark.usefixtures("default_signals")
def test_what_somebody_else_decided_about_a_signal_stays() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(SystemExit) as ended, left_by_signals():
        signal_self(signal.SIGHUP, signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
