"""A whole engine holds its weights once, from the checkpoint's files to strips of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.settings import CHECKOUT
from tests.support.checkpoints import make_checkpoint

# Compiled once for every depth, and for the tests of strips.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from src import AsyncEngine, SamplingParams
from src.engine.execution import compilation
from src.engine import startup
from src.ops.build.kernels import ensure_built
from tests.support.engines import small_config
from tests.support.probe import Probe

def peak():
    # Not getrusage, whose peak a child inherits from its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

async def weights_of_served(directory, **settings):
    # KV memory of many layers is no weight.
    settings |= {"model__max_model_len": 64, "cache__num_blocks": 16}
    config = small_config(Path(directory), **settings)
    async with AsyncEngine.open(config) as engine:
        await engine.generate([5, 17, 3], SamplingParams(temperature=0, max_tokens=4))
        assert engine.stats.compiled is not config.compile.enforce_eager
        model = Probe(engine).model
        assert (model.weights["layers.0.qkv_weight"].dim() == 3) == engine.stats.compiled
        return sum(tensor.nbytes for tensor in model.parameters().values())

# Whatever this machine's kernels gain, for all of them take strips.
ensure_built(wait=True)
startup.takes_strips = compilation.takes_strips = lambda: True
small, large, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
asyncio.run(weights_of_served(small, **settings))
before = peak()
weights = asyncio.run(weights_of_served(large, **settings))
print(json.dumps([weights, peak() - before]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two layers, and of so many that a second copy of all would show."""
    return [
        make_checkpoint(
            tmp_path_factory.mktemp("memory") / str(layers),
            tokenizer=True,
            dtype=torch.bfloat16,
            num_hidden_layers=layers,
            max_shard_size="10MB",
            **SIZES,
        )
        for layers in (2, 150)
    ]


@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"compile__enforce_eager": True}, id="in rows"),
        pytest.param(
            {"compile__enforce_eager": False, "compile__startup": "wait"},
            marks=pytest.mark.compilers,
            id="in strips",
        ),
    ],
)
def test_an_engine_never_holds_its_weights_twice(
    checkpoints: list[Path], settings: dict[str, Any]
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, checkpoints), json.dumps(settings)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    weights, rise = json.loads(result.stdout)
    assert weights > 40e6
    assert 0.9 * weights < rise < 1.3 * weights
