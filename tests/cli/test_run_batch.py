"""Batch files end to end: the command in a process of its own, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.cli.batch_file import BatchRequest, check_requests, finished, problem
from src.cli.main import main
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_options
from tests.support.encoders import make_encoder, save_encoder_tokenizer
from tests.support.strange_token import STRANGE, STRANGE_ID, with_a_strange_token

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("batch") / "tiny", tokenizer=True, max_position_embeddings=1024
    )


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"prompt": "one two", "max_tokens": 4, "temperature": 0, **body}
    if url == "/v1/chat/completions":
        fields.pop("prompt")
        fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return {"custom_id": name, "method": "POST", "url": url, "body": fields}


def test_vectors_and_scores_are_answered(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_encoder(tmp_path_factory.mktemp("encoder") / "tiny", "bert")
    save_encoder_tokenizer(directory)
    texts = ["the quick brown fox", "a lazy dog"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": texts},
        # More than is sent in one piece.
        "/embed": {"inputs": [[5, 6]] * 400},
        "/v2/embed": {"texts": texts},
        "/score": {"text_1": texts[0], "text_2": texts},
        "/v1/score": {"text_1": texts, "text_2": texts},
        "/rerank": {"query": texts[1], "documents": texts},
        "/v1/rerank": {"query": texts[1], "documents": texts},
        "/v2/rerank": {"query": texts[1], "documents": texts},
        "/pooling": {"input": texts},
        "/classify": {"input": texts},
        "/predict": {"inputs": texts[0]},
    }
    lines = [
        {"custom_id": url, "method": "POST", "url": url, "body": body}
        for url, body in bodies.items()
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert main(command(directory, source, target)[3:]) == 0
    assert "9 answered, 2 refused" in capsys.readouterr().err
    answers = {
        each["custom_id"]: each["response"]
        for each in map(json.loads, target.read_text().splitlines())
    }
    refused = {url for url, answer in answers.items() if answer["status_code"] == 400}
    assert refused == {"/classify", "/predict"}
    assert len(answers["/embed"]["body"]) == 400
    for url in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert answers[url]["body"]["results"][0]["index"] == 1


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def command(checkpoint: Path, source: Path, target: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "src", "run-batch", "-i", str(source), "-o", str(target),
        "--model", str(checkpoint), "--set", "cache.num_blocks=512",
        *compile_options(), "--set", "device.num_threads=1", *more,
    ]  # fmt: skip


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def answers(path: Path) -> dict[str, dict[str, Any]]:
    parsed = [json.loads(entry) for entry in path.read_text().splitlines()]
    by_name = {entry["custom_id"]: entry for entry in parsed}
    assert len(by_name) == len(parsed)
    return by_name


@pytest.mark.slow
def test_every_request_has_its_answer(checkpoint: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            line("a"),
            line("b", "/v1/chat/completions"),
            line("c", temperature=9),
            line("d", "/v1/images/generations"),
            line("e", stream=True),
            line("f", n=2),
        ],
    )
    target = tmp_path / "out.jsonl"
    result = run(command(checkpoint, source, target))
    assert result.returncode == 0, result.stderr
    assert "6/6" in result.stderr
    assert "3 answered, 3 refused" in result.stderr
    got = answers(target)
    assert set(got) == set("abcdef")
    assert got["a"]["error"] is None
    assert got["a"]["response"]["status_code"] == 200
    assert got["a"]["response"]["body"]["object"] == "text_completion"
    assert got["a"]["response"]["request_id"]
    assert got["b"]["response"]["body"]["object"] == "chat.completion"
    assert got["c"]["response"]["status_code"] == 400
    assert got["c"]["response"]["body"]["error"]["param"] == "temperature"
    for name in "de":
        assert got[name]["response"] is None
        assert got[name]["error"]["code"] == "invalid_request"
    assert len(got["f"]["response"]["body"]["choices"]) == 2
    # Again: nothing is left, and nothing is loaded for it.
    before = target.read_text()
    again = run(command(Path("/nowhere"), source, target))
    assert again.returncode == 0
    assert "6 of 6 are done already" in again.stderr
    assert target.read_text() == before


@pytest.mark.slow
def test_an_interrupted_run_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", [line(f"r{i}", max_tokens=60, ignore_eos=True) for i in range(200)]
    )
    target = tmp_path / "out.jsonl"
    # Answers are compared whose steps had other sizes.
    steady = ("--set", "model.deterministic=true")
    arguments = command(checkpoint, source, target, "--concurrency", "4", *steady)
    process = subprocess.Popen(
        arguments, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (target.exists() and target.read_bytes().count(b"\n") >= 5):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    begun = target.read_bytes().count(b"\n")
    assert 5 <= begun < 200
    # As a machine that was switched off would leave it.
    with target.open("ab") as output:
        output.write(b'{"id":"batch_req_1","custom_id":"r199","resp')
    result = run(command(checkpoint, source, target, *steady))
    assert result.returncode == 0, result.stderr
    assert f"{begun} of 200 are done already" in result.stderr
    got = answers(target)
    assert set(got) == {f"r{i}" for i in range(200)}
    # All requests are the same, so their answers are.
    texts = {entry["response"]["body"]["choices"][0]["text"] for entry in got.values()}
    assert len(texts) == 1


def settings(checkpoint: Path) -> list[str]:
    return command(checkpoint, Path("in"), Path("out"))[8:]


@pytest.mark.parametrize("fatal", [True, False], ids=["engine", "request"])
def test_what_failed_is_not_done(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fatal: bool,
) -> None:
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(40)])
    target = tmp_path / "out.jsonl"
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--concurrency", "2"]
    arguments += settings(checkpoint)
    compute, neutralize = StepComputer.compute, RowState.neutralize
    calls = 0

    def failing(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise RuntimeError("injected")
        return compute(*given, **named)

    def lost(*given: Any) -> None:
        if fatal:
            raise RuntimeError("the device is lost\nand a trace")
        neutralize(*given)

    with monkeypatch.context() as patch:
        patch.setattr(StepComputer, "compute", failing)
        patch.setattr(RowState, "neutralize", lost)
        code = main(arguments)
    told = capsys.readouterr().err
    last = told.splitlines()[-1]
    done = answers(target)
    assert {entry["response"]["status_code"] for entry in done.values()} == {200}
    if fatal:
        assert code == 4
        assert "the engine died: DeviceLostError" in last
        assert 2 <= len(done) < 30
        assert calls == 20
    else:
        assert code == 1
        failed = 40 - len(done)
        assert 1 <= failed <= 2
        assert f"{failed} failed" in last
    assert f"{len(done)} answered, 0 refused" in told
    # Again: exactly those are asked for.
    assert main(arguments) == 0
    assert f"{len(done)} of 40 are done already" in capsys.readouterr().err
    assert set(answers(target)) == {f"r{i}" for i in range(40)}
    assert {entry["response"]["status_code"] for entry in answers(target).values()} == {200}


def test_a_text_with_a_token_that_the_model_does_not_have_is_refused_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every protocol, in the middle of others that are answered as they are alone."""
    text = f"hi {STRANGE}"
    hurt = {
        "completion": line("completion", prompt=text),
        "ids": line("ids", prompt=[5, STRANGE_ID]),
        "chat": line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": text}]),
        "response": {"url": "/v1/responses", "body": {"input": text, "max_output_tokens": 16}},
        "message": {
            "url": "/v1/messages",
            "body": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        },
    }
    fine = [line(f"r{i}", max_tokens=12, ignore_eos=True) for i in range(8)]
    lines = [*fine[:4], *({"custom_id": name, **entry} for name, entry in hurt.items()), *fine[4:]]
    target = tmp_path / "out.jsonl"
    arguments = ["run-batch", "-i", str(write(tmp_path / "in.jsonl", lines)), "-o", str(target)]
    arguments += ["--concurrency", "12", *settings(with_a_strange_token(tmp_path / "demo"))]
    assert main(arguments) == 0
    assert "8 answered, 5 refused" in capsys.readouterr().err
    got = answers(target)
    fields = {"completion": "prompt", "ids": "prompt", "chat": "messages", "response": "input"}
    for name, field in fields.items():
        assert got[name]["response"]["status_code"] == 400
        assert got[name]["response"]["body"]["error"]["param"] == field
    assert got["message"]["response"]["status_code"] == 400
    assert "messages" in got["message"]["response"]["body"]["error"]["message"]
    served = [got[entry["custom_id"]]["response"] for entry in fine]
    assert {answer["status_code"] for answer in served} == {200}
    assert len({answer["body"]["choices"][0]["text"] for answer in served}) == 1
    assert served[0]["body"]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("nonsense\n", "line 1"),
        (json.dumps({"custom_id": "a"}) + "\n", "line 1"),
        (json.dumps(line("a")) + "\n\n[]\n", "line 3"),
        (2 * (json.dumps(line("a")) + "\n"), "twice"),
    ],
)
def test_a_file_that_is_no_batch(tmp_path: Path, content: str, complaint: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        check_requests(source)


def test_files_that_are_not_there_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_requests(tmp_path / "none.jsonl")
    other = tmp_path / "other.txt"
    other.write_text("something else\n")
    with pytest.raises(ConfigError, match="no output of a batch"):
        finished(other)
    assert other.read_text() == "something else\n"
    assert finished(tmp_path / "none.jsonl") == set()
    source = write(tmp_path / "in.jsonl", [line("a")])
    result = run(command(Path("/nowhere"), source, source))
    assert result.returncode == 2
    assert "must not be the input" in result.stderr


def test_a_line_that_was_cut_short_is_cut_off(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text('{"custom_id":"a"}\n{"custom_id":"b"}\n{"custom_i')
    assert finished(target) == {"a", "b"}
    assert target.read_text() == '{"custom_id":"a"}\n{"custom_id":"b"}\n'
    assert os.path.getsize(target) == 36


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"method": "GET"}, "method"),
        ({"url": "/metrics"}, "url"),
        ({"body": b"[]"}, "body"),
        ({"body": b'{"stream":true}'}, "stream"),
        ({"body": b'{"background":true}'}, "background"),
        ({}, None),
    ],
)
def test_what_cannot_be_a_part_of_a_batch(fields: dict[str, Any], what: str | None) -> None:
    import msgspec

    body = msgspec.Raw(fields.pop("body", b"{}"))
    request = BatchRequest(**{"custom_id": "a", "url": "/v1/responses", "body": body, **fields})
    found = problem(request)
    assert found is None if what is None else what in (found or "")
