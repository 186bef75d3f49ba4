"""A layer of experts, its routing and all, as one compiled function."""

from pathlib import Path

import pytest
import torch

from src.compile.ahead import Compilation
from src.compile.artifacts import ArtifactCache
from src.compile.job import Job
from src.ops.projections.experts import EXPERTS, Experts
from src.ops.runtime.compiled import Caller
from src.ops.runtime.kernel_library import KernelLibrary
from tests.compile.functions import mixture

PACKED = "int4/32 with bfloat16 offsets"
# On a machine that does other things too, a compiler takes its time.
pytestmark = pytest.mark.timeout(900)


@torch.inference_mode()
@pytest.mark.parametrize("weight", ["same", "strips of same", "strips of int8", "e2m1/32", PACKED])
def test_experts_are_those_of_the_op(tmp_path: Path, library: KernelLibrary, weight: str) -> None:
    """Of layers whose routing is compiled with them, without any call of torch's."""
    call = Experts.of_flat(
        *EXPERTS.build(
            "cpu",
            tokens=64,
            experts=8,
            chosen=2,
            hidden=64,
            intermediate=64,
            dtype=torch.bfloat16,
            weight=weight,
        )
    )
    x, stacks = call.x, (call.gate_up, call.down)
    for held in (tensor for stack in stacks for tensor in (stack.values, stack.scales)):
        # The experts that nobody chose there, some are chosen here.
        if held is not None and held.is_floating_point():
            held.nan_to_num_(nan=0.01)
        elif held is not None:
            held[held == 255] = 120
    layer = (torch.randn(8, 64), *stacks)
    job = Job.of(mixture, (x, *layer), (0,))
    (function,) = Compilation([job], tmp_path).load(Caller(library.path, 2))
    artifact = ArtifactCache(tmp_path).find(job)
    assert artifact is not None
    assert artifact.has_own_tensors
    for count in (1, 2, 63, 64):
        expected = mixture(x[:count], *layer)
        torch.testing.assert_close(function(x[:count], *layer), expected, rtol=2e-2, atol=2e-2)
