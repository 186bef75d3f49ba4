"""The contest of servers: a real one is started, asked over HTTP in turns, and ended."""

from __future__ import annotations

import dataclasses
import http.client
from pathlib import Path

import pytest

from benchmarks.load import THROUGHPUT
from benchmarks.peers import servers
from benchmarks.peers.checkpoint import make, vocabulary


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "INPUT_LEN", 9)
    monkeypatch.setattr(servers, "OUTPUT_LEN", 5)


def test_a_server_is_started_asked_in_turns_and_ended(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "tiny", all_have_text=True)
    own, *_ = servers.servers()
    uncompiled = {**own.variables, "SLIPSTREAM_COMPILE__STARTUP": "off"}
    own = dataclasses.replace(own, variables=uncompiled)
    options = servers.parse(["--streams", "2", "--repeats", "2", "--requests-per-stream", "2"])
    with servers.running(own, tmp_path, checkpoint, rows=2) as url:
        found = servers.contest({"own": url}, options, vocabulary("tiny"))
    ((about, repeats),) = found.items()
    assert about == ("own", 2)
    assert len(repeats) == 2
    for figures in repeats:
        assert figures.keys() == THROUGHPUT.keys()
        assert figures["output_throughput"] > 0
        assert figures["ttft_median"] > 0
    with pytest.raises(OSError):
        http.client.HTTPConnection(url.removeprefix("http://"), timeout=2).request("GET", "/ready")


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = servers.Server("broken", ("{python}", "-c", "raise SystemExit('no such model')"), "/")
    with (
        pytest.raises(RuntimeError, match="broken does not serve: no such model"),
        servers.running(broken, tmp_path, tmp_path, rows=1),
    ):
        pass


def test_the_command_repeats_the_run() -> None:
    options = servers.parse(["--streams", "8", "16", "--threads", "2"])
    assert servers.command_of(options) == (
        "nox -s bench-peers -- servers --shape 7m --streams 8 16 --requests-per-stream 4 "
        "--threads 2 --repeats 3"
    )
