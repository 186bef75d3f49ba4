"""Kernels for the grammars' rows: without them other code follows these."""

from __future__ import annotations

import pytest

from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.runtime.kernel_library import KernelLibrary


@pytest.fixture(scope="package", autouse=True)
def library() -> KernelLibrary:
    ensure_built(wait=True)
    found = kernel_library()
    assert found is not None
    return found
