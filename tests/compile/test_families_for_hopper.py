"""Every family's calls become code for a GPU that holds for any number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from src.core.settings import CHECKOUT
from tests.support.checkpoints import CLASSES

pytest.importorskip("triton")

# What torch's compiler asks about, each in another part of a model: latent attention, a weight that
# two segments of a call share, rounded inputs, and ops of our own between loops.
SHAPES = ("deepseekv2", "cohere", "fp8 by token", "mixtral")
FORMATS = ("fp8", "fp8 static", "fp8 by block", "awq", "int8", "int4", "adapters")


def launched(names: Sequence[str], caches: Path) -> dict[str, Any]:
    """What each model launches in each call, or why it cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.families_for_hopper", *names],
        cwd=CHECKOUT,
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], names: Sequence[str]) -> None:
    assert found.keys() == set(names)
    failed = {name: why for name, why in found.items() if isinstance(why, str)}
    assert not failed
    for name, calls in found.items():
        assert all(calls.values()), f"{name}: a call that launches nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_kind_of_layer_goes_on_uncompiled(tmp_path: Path) -> None:
    found = launched(SHAPES, tmp_path)
    check(found, SHAPES)
    names = [name for call in found["fp8 by token"].values() for name in call]
    assert any("float8_product" in name for name in names)


@pytest.mark.slow
@pytest.mark.compilers
@pytest.mark.timeout(600)
def test_no_family_and_no_format_goes_on_uncompiled(tmp_path: Path) -> None:
    names = [name for name in (*CLASSES, *FORMATS) if name not in SHAPES]
    check(launched(names, tmp_path), names)
