"""`plan` in the terminal: half a screen, JSON, and one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from src.cli.main import main
from src.core.config import GIB, MIB
from src.core.settings import CHECKOUT
from src.engine.sizing import device_table
from src.engine.sizing.answer import ModelPlan
from src.engine.sizing.roofline import Roofline
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(120)

HALF_A_SCREEN = 26


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_table, "available_memory", lambda: GIB)
    limits = Roofline(bandwidth=20e9, flops=2e11)
    monkeypatch.setattr(device_table, "measure", lambda device, dtype: limits)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plan") / "tiny")


@pytest.mark.parametrize("device", [[], ["--device", "h100-80gb"]])
def test_it_is_half_a_screen(
    device: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(checkpoint), *device, "--concurrency", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= HALF_A_SCREEN
    assert max(map(len, lines[1:-1])) <= 120
    text = "\n".join(lines)
    for words in ("attention", "MLP", "KV memory", "left free", "ms per token", "It fits. "):
        assert words in text
    assert lines[-1].startswith(f"Serve it: python -m src serve --model {checkpoint}")


def test_json_is_the_whole_plan(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(checkpoint), "--json", "--context", "100"]) == 0
    out = capsys.readouterr().out
    plan = msgspec.json.decode(out, type=ModelPlan)
    assert plan.model == str(checkpoint)
    assert plan.memory.kv is not None
    assert plan.memory.kv.max_model_len == 100
    assert plan.quantization is None
    assert json.loads(out)["memory"]["weights"][0]["name"] == "embedding"


def test_what_does_not_fit_is_code_1_with_advice(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--context", "256", "--set", f"cache.memory_bytes={MIB // 8}"]
    assert main(["plan", str(checkpoint), *arguments]) == 1
    out = capsys.readouterr().out
    assert "It does not fit: model.max_model_len = 256 does not fit KV memory of " in out
    assert "  --set cache.memory_bytes=" in out
    assert "  --context " in out


def test_the_model_may_come_from_the_settings(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(checkpoint), "--quantization", "int8"]
    assert main(["plan", *options]) == 0
    assert ", float32 with int8" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "h1000"], "device 'h1000' is not known"),
        (["--device", "l4", "--set", "model.quantize_activations=true"], "true is for the CPU"),
        (["--device", "l4", "--tensor-parallel", "7"], "among 2"),
        (["--context", "100000"], "max_model_len must be from 1 to 256"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    options: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(checkpoint), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("slipstream: ")
    assert error.count("\n") == 1


def test_without_torch_it_is_one_line(checkpoint: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from src.cli.main import main; "
        f"sys.exit(main(['plan', {str(checkpoint)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "slipstream: torch is missing, see python -m src doctor\n"


@pytest.mark.parametrize(
    "option", ["--context=0", "--concurrency=-1", "--concurrency=65537", "--tensor-parallel=x"]
)
def test_a_number_that_cannot_be_is_a_usage_error(
    option: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(checkpoint), option])
    assert ended.value.code == 2
    assert "expected a number from 1 to " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "method", "words"),
    [
        ("cpu", "auto", "(auto): prediction, suffix; they take logits only"),
        ("h100-80gb", "auto", "(auto): nothing drafts: no GPU has run drafts yet"),
        ("h100-80gb", "suffix", "(suffix): suffix; they take logits only"),
    ],
)
def test_it_says_who_would_draft(
    device: str, method: str, words: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", str(checkpoint), "--device", device, "--set", f"speculation.method={method}"]
    assert main(asked) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
    assert any(words in note for note in notes)


def test_the_command_serves_what_was_planned(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("cache.dtype=int8", "speculation.method=ngram", "speculation.prompt_lookup_max=4")
    sets = [word for setting in given for word in ("--set", setting)]
    assert main(["plan", str(checkpoint), "--device", "cpu", *sets]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith(f"Serve it: python -m src serve --model {checkpoint}")
    assert command.endswith(" ".join(sets))
