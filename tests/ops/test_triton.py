"""The Triton kernels where there is no GPU: run in the interpreter, compiled for Hopper."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "triton_in_interpreter attention",
    "triton_in_interpreter",
    "triton_in_interpreter thresholds",
    "triton_in_interpreter drafts",
    pytest.param("triton_for_hopper", marks=pytest.mark.compilers),
    "triton_variants",
)

Started = dict[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Started]:
    """All that were chosen at once, for some take a minute of one processor."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    running: Started = {}
    try:
        for program in _chosen(request.session.items):
            running[program] = subprocess.Popen(
                [sys.executable, "-m", *f"tests.ops.{program}".split()],
                cwd=ROOT,
                env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def _chosen(items: Sequence[pytest.Item]) -> Iterator[str]:
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname == test_triton_kernels.__name__:
            yield str(item.callspec.params["program"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_triton_kernels(program: str, started: Started) -> None:
    output, _ = started[program].communicate(timeout=580)
    assert started[program].returncode == 0, output
