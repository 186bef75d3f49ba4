"""In how many threads a step computes: torch's team only where there are no kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.core.settings import CHECKOUT
from tests.support.checkpoints import make_checkpoint

PROGRAM = """
import asyncio, sys
from pathlib import Path
import torch
from src import AsyncEngine, SamplingParams
from src.ops.build.kernels import ensure_built
from tests.support.engines import small_config

async def main():
    print(ensure_built(wait=True))
    config = small_config(Path(sys.argv[1]), device__num_threads=3)
    async with AsyncEngine.open(config) as engine:
        await engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
        thread = engine._parts.worker._device_thread
        print(thread.call(torch.get_num_threads).result())

asyncio.run(main())
"""


@pytest.mark.parametrize(("has_compiler", "team"), [(True, 1), (False, 3)])
def test_references_have_the_team_of_torch(has_compiler: bool, team: int, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if not has_compiler:
        environment |= {"CXX": str(tmp_path / "none"), "SLIPSTREAM_CACHE_DIR": str(tmp_path / "c")}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(make_checkpoint(tmp_path, tokenizer=True))],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    kernels, threads = answer.stdout.split()
    assert (kernels != "reference", int(threads)) == (has_compiler, team)
