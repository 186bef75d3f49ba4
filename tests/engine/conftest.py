"""A small real checkpoint, and transformers' own model of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from src.ops import PAGED_ATTENTION, ROTATE_AND_CACHE, Kernel
from src.ops.build.kernels import ensure_built
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.rotation import mixers_rotate
from tests.support.steady_steps import steady_steps


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(scope="session", autouse=True)
def guard_of_no_device() -> None:
    """A CUDA build without a GPU keeps what stands in for one in the thread that traced first.

    Once that has ended, the next thread that traces crashes (torch 2.11). This one stays.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and torch.version.cuda is not None and not torch.cuda.is_available():
        ensure()


@pytest.fixture(autouse=True)
def poisoned_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV memory starts as NaN: a read of what was never written shows in every logit."""
    from src.engine import startup
    from src.engine.execution.kv_cache import allocate_kv_cache

    monkeypatch.setattr(startup, "allocate_kv_cache", partial(allocate_kv_cache, poison=True))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost as much as on a machine that does nothing else."""
    steady_steps(monkeypatch)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    return load_reference(checkpoint)


@pytest.fixture
def reference_attention() -> Iterator[None]:
    """Attention by its reference, which finds keys in the cache where the compiled one does not."""
    # So that nothing is installed while the test runs.
    ensure_built(wait=True)
    before = PAGED_ATTENTION.active("cpu")
    PAGED_ATTENTION.uninstall_cpu()
    yield
    PAGED_ATTENTION.install_cpu(before)


@pytest.fixture
def rotate_in_op(reference_attention: None) -> Iterator[Callable[[], list[int]]]:
    """Have engines that start from now on rotate in `rotate_and_cache`, as on CUDA.

    What is returned, a list that grows, has the number of tokens of every call of the op.
    """
    calls: list[int] = []

    def counted(*arguments: Any) -> None:
        calls.append(len(arguments[0]))
        ROTATE_AND_CACHE.reference(*arguments)

    with ExitStack() as stack:

        def force() -> list[int]:
            stack.enter_context(mixers_rotate())
            stack.callback(ROTATE_AND_CACHE.uninstall_cpu)
            ROTATE_AND_CACHE.install_cpu(Kernel("counted", counted))
            return calls

        yield force
