"""No step waits for a GPU, or mixes its tensors with the host's: seen without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.core.settings import CHECKOUT
from tests.support.checkpoints import make_checkpoint


def run(module: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=CHECKOUT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_who_waits_for_the_device_is_found_out() -> None:
    found = run("tests.support.fake_cuda")
    assert found[:2] == ["AssertionError", "DataDependentOutputException"]
    # The others by torch or by us.
    assert len(found) == 5
    assert "unnoticed" not in found


@pytest.mark.parametrize(
    ("architecture", "rotates"),
    [
        ("llama", True),
        ("qwen3", True),
        ("qwen3_moe", True),
        ("gemma3", False),
        ("deepseekv3", False),
    ],
    ids=[
        *("llama", "norms of queries", "experts"),
        *("groups of layers, not rotated in the mixer", "latent attention"),
    ],
)
def test_no_step_waits_for_the_device(tmp_path: Path, architecture: str, rotates: bool) -> None:
    directory = make_checkpoint(tmp_path, architecture)
    how = "rotates" if rotates else "does not"
    assert run("tests.engine.execution.steps_on_fake_cuda", str(directory), how) == ["ok"]
