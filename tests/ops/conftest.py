import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.ops.cpu.build import KernelCache, cache_root
from src.ops.cpu.kernel_library import KernelLibrary


@pytest.fixture(scope="session")
def kernel_cache() -> KernelCache:
    """The user's kernel cache, built if it was not yet (the compiler is part of the test setup)."""
    assert shutil.which("g++") or shutil.which("c++"), "these tests need a C++ compiler"
    cache = KernelCache(cache_root())
    cache.build()
    return cache


@pytest.fixture(scope="session")
def level_files(kernel_cache: KernelCache) -> dict[str, Path]:
    """Every level that passed its self-check here, by name."""
    directory = kernel_cache.directory()
    return {level.name: directory / f"{level.name}.so" for level in kernel_cache.levels}


@pytest.fixture(scope="session")
def libraries(level_files: dict[str, Path]) -> dict[str, KernelLibrary]:
    found = {name: KernelLibrary(path) for name, path in level_files.items() if path.exists()}
    for library in found.values():
        # Whoever asks for threads gets them for small inputs too.
        library.assume_wake_cost(0.01)
    return found


@pytest.fixture(scope="session")
def library(libraries: dict[str, KernelLibrary]) -> KernelLibrary:
    """The fastest level of this machine."""
    return list(libraries.values())[-1]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch too, whose idle ones spin for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
