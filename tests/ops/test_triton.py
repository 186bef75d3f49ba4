"""The Triton kernels where there is no GPU: run in the interpreter, compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["triton_in_interpreter", "triton_for_hopper", "triton_variants"]
)
def test_triton_kernels(program: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    answer = subprocess.run(
        [sys.executable, "-m", f"tests.ops.{program}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
