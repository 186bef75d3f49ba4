"""What Inductor makes of a program's calls for a GPU, seen without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from src.core.settings import CHECKOUT

pytest.importorskip("triton")

NORM, ACTIVATION = "triton_red", "triton_poi"
EXPECTED = {
    # The lookup is in the norm's kernel, and so is the sum with what a projection adds.
    "first": [NORM, "mm"],
    "middle": ["mm", NORM, "mm", ACTIVATION, "mm", NORM, "mm"],
    "last": ["mm", NORM, "mm", ACTIVATION, "mm", NORM],
    "head": ["mm", ACTIVATION],
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    caches = tmp_path_factory.mktemp("caches")
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.calls_for_hopper"],
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
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def kinds(names: list[str]) -> list[str]:
    """Reductions over a row, with or without a loop, are of one kind."""
    return [
        name.replace("triton_per", NORM)[: len(NORM)] if "triton" in name else name
        for name in names
    ]


@pytest.mark.timeout(300)
def test_every_norm_and_activation_of_a_layer_is_one_kernel(
    launched: dict[str, dict[str, list[str]]],
) -> None:
    plain = {call: kinds(names) for call, names in launched["llama-3.1-8b"].items()}
    assert plain == EXPECTED


@pytest.mark.timeout(300)
def test_a_bias_is_added_by_its_product(launched: dict[str, dict[str, list[str]]]) -> None:
    biased = {call: kinds(names) for call, names in launched["biased"].items()}
    # Those of queries, keys and values; a product with the residual stream would copy it.
    expected = {call: list(names) for call, names in EXPECTED.items()}
    expected["first"][-1] = expected["middle"][-1] = "addmm"
    assert biased == expected
