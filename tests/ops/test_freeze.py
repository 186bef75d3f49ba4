"""The tool that shows that a change of the code changes no bit of what is computed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from src.ops import GUMBEL_ARGMAX, LINEAR, PAGED_ATTENTION, Kernel
from src.ops.build.units import further_flags
from tests import freeze
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _kernels_of_this_process() -> Iterator[None]:
    ops = (GUMBEL_ARGMAX, LINEAR, PAGED_ATTENTION)
    before = [op.active("cpu") for op in ops]
    yield
    for op, kernel in zip(ops, before, strict=True):
        op.install_cpu(kernel)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(torch.int32).add_(torch.tensor([0, 0, 0, 1])).view(torch.float32),
        lambda x: x.neg_(),
        lambda x: x.view(torch.float64),
        lambda x: x.view(2, 2),
    ],
)
def test_one_bit_makes_another_digest(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = freeze.digest(torch.zeros(4))
    assert freeze.digest(torch.zeros(4)) == before
    assert freeze.digest(change(torch.zeros(4))) != before


def test_the_digest_of_an_op_has_its_result_and_what_it_changes() -> None:
    case = {"rows": ((2, 5),), "head_dim": 8}
    PAGED_ATTENTION.uninstall_cpu()
    before = freeze.digest_of_op(PAGED_ATTENTION, case)
    assert before[0] == "reference"
    assert freeze.digest_of_op(PAGED_ATTENTION, case) == before
    names = [argument.name for argument in PAGED_ATTENTION.overload._schema.arguments]
    for changed in ("value_cache", "out"):

        def run(*args: Any, changed: str = changed) -> None:
            PAGED_ATTENTION.reference(*args)
            args[names.index(changed)].neg_()

        PAGED_ATTENTION.install_cpu(Kernel("another", run))
        assert freeze.digest_of_op(PAGED_ATTENTION, case)[1] != before[1]


def test_the_way_is_the_kernel_unless_that_asks_the_reference() -> None:
    case = {"rows": 3, "vocab_size": 8}
    GUMBEL_ARGMAX.install_cpu(Kernel("mine", lambda *args: torch.zeros(3, dtype=torch.int64)))
    assert freeze.digest_of_op(GUMBEL_ARGMAX, case)[0] == "mine"
    GUMBEL_ARGMAX.install_cpu(Kernel("mine", lambda *args: GUMBEL_ARGMAX.reference(*args)))
    assert freeze.digest_of_op(GUMBEL_ARGMAX, case)[0] == "reference"


def test_the_digest_of_a_family_has_all_of_its_weights(tmp_path: Path) -> None:
    loaded = {"dtype": "float32"}
    found = {
        freeze.digest_of_family(make_checkpoint(tmp_path / name, "llama", seed=seed), loaded)
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    }
    assert len(found) == 2


def test_differences_name_what_changed_and_what_is_missing() -> None:
    before = {"same": "a", "changed": "b", "gone": "c"}
    assert freeze.differences(before, {"same": "a", "changed": "x", "new": "d"}) == [
        "changed: b -> x",
        "gone: c -> absent",
        "new: absent -> d",
    ]
    assert freeze.differences(before, before) == []


def test_kernels_in_the_cache_that_tests_share_have_no_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = []

    class Cache:
        def __init__(self, root: Path) -> None:
            flags.extend(further_flags())

        def build_all(self, optimization: str) -> dict[str, Path]:
            return {}

    monkeypatch.setenv("SLIPSTREAM_KERNEL_FLAGS", "-g")
    monkeypatch.setattr(freeze, "KernelCache", Cache)
    assert freeze._libraries() == {"reference": None}
    assert flags == ["-g", "-Werror"]
