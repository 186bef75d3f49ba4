"""The command line on a real small checkpoint, in process: torch is imported once."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from src.cli.main import main
from src.core.sampling_params import SamplingParams
from src.core.settings import load_config
from src.engine.client import AsyncEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_options, compile_settings

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("cli") / "tiny",
        tokenizer=True,
        num_hidden_layers=2,
        max_position_embeddings=2048,
    )


@pytest.fixture
def settings(checkpoint: Path) -> list[str]:
    return [
        *("--model", str(checkpoint)),
        *compile_options(),
        *("--set", "cache.num_blocks=256"),
        *("--set", "device.num_threads=1"),
    ]


async def expected(checkpoint: Path, prompt: object, params: SamplingParams) -> str:
    names = {"model.path": str(checkpoint), "cache.num_blocks": "256", "device.num_threads": "1"}
    names |= {f"compile.{key}": str(value).lower() for key, value in compile_settings().items()}
    async with AsyncEngine.open(load_config(environ={}, overrides=[*names.items()])) as engine:
        return (await engine.generate(prompt, params)).text  # type: ignore[arg-type]


def typed(monkeypatch: pytest.MonkeyPatch, lines: Iterator[Callable[[], str]]) -> None:
    """Somebody types these lines, and Ctrl-D at the end."""

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line()

    monkeypatch.setattr(builtins, "input", read)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["serve", "--help"], ["generate", "-h"], ["chat", "-h"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("serve", "generate", "chat", "--port", "--max-tokens", "--system", "--set"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--set", "model.dtyp=float32"], "did you mean model.dtype?"),
        (["generate", "x", "--config", "/no/such.toml"], "/no/such.toml: cannot be read"),
        (["serve", "--hypercorn-config", "/no/such.toml"], "there is no file /no/such.toml"),
        (["generate", "x", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("slipstream: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_that_cannot_be_is_a_usage_error(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--port={port}"])
    assert ended.value.code == 2
    assert f"expected a number from 0 to 65535, got '{port}'" in capsys.readouterr().err


def test_hypercorn_settings_that_are_no_toml_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("bind = [")
    assert main(["serve", "--hypercorn-config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"slipstream: {file}: not hypercorn's settings: ")
    assert error.count("\n") == 1


def test_generate_ends_quietly_when_its_reader_leaves(
    settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["generate", "Once", *settings, "--max-tokens", "4"]) == 141
    assert "Traceback" not in capsys.readouterr().err


def test_a_setting_without_a_value_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", "--set", "model.dtype"])
    assert ended.value.code == 2
    assert "expected SECTION.KEY=VALUE" in capsys.readouterr().err


def test_generate_prints_what_the_engine_generates(
    settings: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = ["--max-tokens", "12", "--temperature", "0"]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    assert main(["generate", "Once upon", *settings, *sampling]) == 0
    assert capsys.readouterr().out == asyncio.run(expected(checkpoint, "Once upon", params)) + "\n"
    assert main(["generate", "Once upon", "--chat", *settings, *sampling]) == 0
    message = [{"role": "user", "content": "Once upon"}]
    assert capsys.readouterr().out == asyncio.run(expected(checkpoint, message, params)) + "\n"


def test_a_bad_sampling_parameter_is_one_line(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", *settings, "--temperature", "7"]) == 2
    assert "temperature must be from 0.0 to 2.0, got 7.0" in capsys.readouterr().err


def test_chat_keeps_the_conversation_until_it_is_reset(
    settings: list[str],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ("hello", "again", "/help", "/reset", "", "hello")
    typed(monkeypatch, iter([lambda line=line: line for line in lines]))  # type: ignore[misc]
    sampling = ["--max-tokens", "8", "--temperature", "0", "--system", "Be brief."]
    assert main(["chat", *settings, *sampling]) == 0
    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    first = asyncio.run(expected(checkpoint, messages, params))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    second = asyncio.run(expected(checkpoint, messages, params))
    out = capsys.readouterr().out
    assert out.startswith(f"{first}\n{second}\n/reset ")
    assert out.endswith(f"leave\n{first}\n\n")


class InterruptedByItsFirstText:
    """Standard output that a Ctrl-C follows as soon as there is something to read."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout
        self._pending = True

    def write(self, text: str) -> int:
        written = self._stdout.write(text)
        if self._pending and text.strip():
            self._pending = False
            os.kill(os.getpid(), signal.SIGINT)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_for_too_much() -> str:
        monkeypatch.setattr(sys, "stdout", InterruptedByItsFirstText(sys.stdout))
        return "hello"

    def be_interrupted() -> str:
        raise KeyboardInterrupt

    typed(monkeypatch, iter([ask_for_too_much, be_interrupted, lambda: "/help"]))
    assert main(["chat", *settings, "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert " [stopped]\n" in out
    assert "Ctrl-D" in out
