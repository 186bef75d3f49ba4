"""`inspect` and `top` against a real server in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from src.cli.main import main
from src.core.settings import CHECKOUT
from tests.http.processes import ServerProcess, free_port
from tests.observability.chrome_trace import check_trace
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(180)

KEY = "a-key-that-is-long-enough"
API_KEY = "another-key-of-a-client"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("inspected")
    checkpoint = make_checkpoint(
        folder / "tiny", tokenizer=True, num_hidden_layers=2, max_position_embeddings=1024
    )
    (folder / "key").write_text(KEY + "\n")
    environment = {
        "SLIPSTREAM_MODEL": str(checkpoint),
        "SLIPSTREAM_DEVICE__NUM_THREADS": "1",
        "SLIPSTREAM_CACHE__NUM_BLOCKS": "256",
        "SLIPSTREAM_COMPILE__ENFORCE_EAGER": "true",
        "SLIPSTREAM_HTTP__ADMIN_KEY_FILE": str(folder / "key"),
        "SLIPSTREAM_HTTP__API_KEYS": API_KEY,
        "SLIPSTREAM_OBSERVABILITY__PLAN_LOG": str(folder / "plans.jsonl"),
        "OMP_NUM_THREADS": "1",
    }
    with ServerProcess.serve(environment) as server:
        server.wait_ready()
        for index in range(3):
            body = {"prompt": [31, 32, 33 + index], "max_tokens": 12, "ignore_eos": True}
            headers = {"x-request-id": f"name-{index}", "x-api-key": API_KEY}
            httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
        yield server
        server.terminate()
        assert server.wait_exit(30) == 0
        assert KEY not in server.output


@pytest.fixture
def plans(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(tmp_path_factory.getbasetemp().glob("inspected*/plans.jsonl"))


def test_the_steps_of_a_server_have_a_price(server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    options = ["--url", server.url, "--key", KEY, "--set", "scheduler.max_num_seqs=48"]
    assert main(["bench", "calibrate", *options, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["source"] == server.url
    # What a server does not say of itself comes from the settings.
    assert (found["limits"]["num_blocks"], found["limits"]["max_num_seqs"]) == (256, 48)
    assert found["limits"]["max_model_len"] == 1024
    assert found["cost"]["num_steps"] >= 3 * 12


def test_inspect_saves_a_trace_and_sums_it_up(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    assert main(["inspect", "--url", server.url, "--key", KEY, "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    check_trace(document)
    names = {event["name"] for event in document["traceEvents"]}
    assert {"step 1", "plan 1", "request 0", "prefill", "decode"} <= names
    text = capsys.readouterr().out
    steps = document["otherData"]["last_step"]
    assert text.startswith(f"{steps} steps in ")
    for word in ("bubble", "plan", "device", "commit", "publish", "first token", "slowest steps"):
        assert word in text
    assert str(output) in text
    assert KEY not in text


def test_inspect_takes_the_newest_steps_and_the_key_of_the_settings(
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HTTP__ADMIN_KEY", KEY)
    output = tmp_path / "trace.json"
    arguments = ["inspect", "--url", f"{server.url}/", "--steps", "4", "--output", str(output)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("4 steps in ")


def test_a_plan_log_of_a_running_server_replays(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = -1
    while size != (size := plans.stat().st_size):
        time.sleep(0.4)  # the log is written a few times a second
    assert main(["inspect", "--replay", str(plans)]) == 0
    assert "every plan is the recorded one" in capsys.readouterr().out
    lines = plans.read_text().splitlines()
    place, line = next((i, line) for i, line in enumerate(lines) if line.startswith('["plan",5'))
    # Where its only row begins; behind that come bounds, if it may have drafts.
    lines[place] = re.sub(
        r"(\d+)(,1,1(,\d+,\d+,\d+)?\]\],\[\],\[\],\[\]\])$",
        lambda match: f"{int(match[1]) + 1}{match[2]}",
        line,
    )
    assert lines[place] != line
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines))
    assert main(["inspect", "--replay", str(changed)]) == 1
    text = capsys.readouterr().out
    assert f"line {place + 1} differs" in text
    assert f"recorded  {lines[place]}" in text
    assert f"replayed  {line}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--key", "wrong"], "does not take the admin key"),
        ([], "does not take the admin key"),
        (["--url", "ftp://x"], "expected http://HOST:PORT"),
        (["--url", "http://x:y"], "--url"),
        (["--key", KEY, "--output", "/no/such/folder/x"], "cannot be written"),
        (["--replay", "/no/such/file"], "cannot be read"),
        (["--replay", __file__], "line 1 is not a plan log's"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    server: ServerProcess,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "--url", server.url, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert KEY not in error


def test_a_server_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for command in ("inspect", "top"):
        assert main([command, "--url", url, "--key", "x"]) == 2
        assert f"{url} does not answer" in capsys.readouterr().err


def command(server: ServerProcess, *options: str) -> list[str]:
    return [sys.executable, "-m", "src", "top", "--url", server.url, "--key", KEY, *options]


def test_top_prints_one_screen_where_a_terminal_cannot_do_more(server: ServerProcess) -> None:
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "110", "LINES": "20"}
    done = subprocess.run(
        command(server),
        cwd=CHECKOUT,
        env={**environment, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    assert max(map(len, lines)) <= 110
    assert lines[0].startswith(server.url)
    for word in ("requests  running 0, waiting 0", "tokens/s", "latency", "bubble", "KV  "):
        assert word in done.stdout


def test_top_watches_until_ctrl_c(server: ServerProcess) -> None:
    """In a real terminal, with a request that runs meanwhile."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
    process = subprocess.Popen(
        command(server, "--interval", "0.1"),
        cwd=CHECKOUT,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"prompt": [40, 41], "max_tokens": 900, "ignore_eos": True, "stream": True}
            headers = {"x-request-id": "watched", "x-api-key": API_KEY}
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200
                seen = read_until(ours, rb"watched/0 .*running.*\d+/900", seconds=60)
            seen += read_until(ours, rb"nothing to do", seconds=30)
        process.send_signal(signal.SIGINT)
        seen += read_until(ours, rb"\x1b\[\?1049l", seconds=30)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
    assert seen.startswith(b"\x1b[?1049h")
    assert len(re.findall(rb"\x1b\[H", seen)) >= 2
    assert b"Traceback" not in seen
    assert KEY.encode() not in seen


def read_until(terminal: int, pattern: bytes, seconds: float) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while not re.search(pattern, seen):
        assert time.monotonic() < deadline, seen[-3000:].decode("utf-8", "replace")
        ready, _, _ = select.select([terminal], [], [], 0.2)
        if ready:
            seen += os.read(terminal, 65536)
    return seen
