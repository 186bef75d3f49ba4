import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.ops.cpu import build
from src.ops.cpu.build import KernelCache, cache_root
from src.ops.cpu.kernel_library import KernelLibrary


@pytest.fixture(scope="session")
def kernel_cache() -> KernelCache:
    """The user's kernel cache, built if it was not yet (the compiler is part of the test setup)."""
    assert shutil.which("g++") or shutil.which("c++"), "these tests need a C++ compiler"
    cache = KernelCache(cache_root())
    cache.build_all()
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


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The AMX level's kernels, compiled for AVX2 with its instructions in plain C++."""
    file = tmp_path_factory.mktemp("amx") / "amx.so"
    units = ("attention.cpp", "linear.cpp", "pool.cpp")
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-fno-math-errno"),
        *("-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w"),
        *("-Wno-psabi", "-mavx2", "-mfma", "-mf16c"),
        *("-include", str(Path(__file__).with_name("emulated_amx.h"))),
        *(str(Path(build.__file__).with_name(name)) for name in units),
        *("-o", str(file)),
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(file))
    library.slipstream_assume_wake_cost(ctypes.c_double(0.01))
    return library


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch too, whose idle ones spin for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
