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


def _emulated(file: Path, header: str, *flags: str, units: tuple[str, ...]) -> ctypes.CDLL:
    """Kernels compiled for AVX2, with the instructions of a header of this folder in plain C++."""
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-fno-math-errno"),
        *("-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w"),
        *("-Wno-psabi", "-mavx2", "-mfma", "-mf16c", *flags),
        *("-include", str(Path(__file__).with_name(header))),
        *(str(Path(build.__file__).with_name(name)) for name in units),
        *("-o", str(file)),
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(file))
    library.slipstream_assume_wake_cost(ctypes.c_double(0.01))
    return library


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The AMX level's kernels, its instructions emulated."""
    units = ("attention.cpp", "linear.cpp", "pool.cpp")
    return _emulated(tmp_path_factory.mktemp("amx") / "amx.so", "emulated_amx.h", units=units)


EMULATED_LINEARS = {
    "avx2_vnni": ("emulated_avx_vnni.h",),
    "avx512": ("emulated_amx.h", "-DEMULATED_AVX512"),
    "avx512_vnni": ("emulated_amx.h", "-DEMULATED_AVX512_VNNI"),
}


@pytest.fixture(scope="session")
def emulated_linears(
    tmp_path_factory: pytest.TempPathFactory, emulated_amx: ctypes.CDLL
) -> dict[str, ctypes.CDLL]:
    """The projections of levels that few machines have, their instructions emulated."""
    folder = tmp_path_factory.mktemp("linears")
    units = ("linear.cpp", "pool.cpp")
    found = {
        # Compiled in a third of the time, and run for a moment.
        name: _emulated(folder / f"{name}.so", *how, "-O0", units=units)
        for name, how in EMULATED_LINEARS.items()
    }
    return {**found, "amx": emulated_amx}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch too, whose idle ones spin for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
