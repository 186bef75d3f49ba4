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
from src.ops.cpu.levels import LEVELS, cpu_flags


@pytest.fixture(scope="session")
def kernel_cache() -> KernelCache:
    """The user's kernel cache, built if it was not yet (the compiler is part of the test setup)."""
    assert shutil.which("g++") or shutil.which("c++"), "these tests need a C++ compiler"
    cache = KernelCache(cache_root())
    # One that does not compile, or not pass its self-check, is no level less but a failure.
    cache.build_all()
    return cache


@pytest.fixture(scope="session")
def level_files(kernel_cache: KernelCache) -> dict[str, Path]:
    """Every level that this CPU and compiler have, by name; all have passed their self-checks."""
    return kernel_cache.build_all()


@pytest.fixture(scope="session")
def libraries(level_files: dict[str, Path]) -> dict[str, KernelLibrary]:
    found = {name: KernelLibrary(path) for name, path in level_files.items()}
    for library in found.values():
        # Whoever asks for threads gets them for small inputs too.
        library.assume_wake_cost(0.01)
    return found


MACHINE_LEVELS = [level.name for level in LEVELS if level.needs <= cpu_flags()]


@pytest.fixture(scope="session", params=MACHINE_LEVELS)
def library(libraries: dict[str, KernelLibrary], request: pytest.FixtureRequest) -> KernelLibrary:
    """Each level of this machine in turn."""
    return at_level(libraries, request.param)


def at_level(libraries: dict[str, KernelLibrary], name: str) -> KernelLibrary:
    """Of that name; for one that the compiler does not know, the fastest."""
    return libraries.get(name) or list(libraries.values())[-1]


class Emulated:
    """Kernels compiled for AVX2, with the instructions of a header of this folder in plain C++."""

    def __init__(self, folder: Path, header: str, *flags: str, units: tuple[str, ...]) -> None:
        self._folder = folder
        objects = [str(folder / f"{unit}.o") for unit in units]
        self._link = [_CXX, "-shared", "-pthread", *objects, "-o", str(folder / "all.so")]
        # All at once: a machine has more than one processor.
        self._compilers = [
            subprocess.Popen(
                [
                    *(_CXX, "-std=c++17", "-O1", "-fno-math-errno", "-fno-trapping-math"),
                    *("-fvisibility=hidden", "-fPIC", "-pthread", "-w", "-Wno-psabi"),
                    *("-mavx2", "-mfma", "-mf16c", *flags),
                    *("-include", str(Path(__file__).with_name(header))),
                    *("-c", str(Path(build.__file__).with_name(unit)), "-o", to),
                ]
            )
            for unit, to in zip(units, objects, strict=True)
        ]

    def load(self) -> ctypes.CDLL:
        """Once they are compiled."""
        assert [compiler.wait() for compiler in self._compilers] == [0] * len(self._compilers)
        subprocess.run(self._link, check=True)
        library = ctypes.CDLL(self._link[-1])
        library.slipstream_assume_wake_cost(ctypes.c_double(0.01))
        return library


_CXX = os.environ.get("CXX", "c++")
_LINEAR_UNITS = ("linear.cpp", "pool.cpp")
EMULATED_LINEARS = {
    "avx2_vnni": ("emulated_avx_vnni.h",),
    "avx512": ("emulated_amx.h", "-DEMULATED_AVX512"),
    "avx512_vnni": ("emulated_amx.h", "-DEMULATED_AVX512_VNNI"),
}


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The AMX level's kernels, its instructions emulated."""
    units = ("attention.cpp", *_LINEAR_UNITS)
    return Emulated(tmp_path_factory.mktemp("amx"), "emulated_amx.h", units=units).load()


@pytest.fixture(scope="session")
def emulated_linears(
    tmp_path_factory: pytest.TempPathFactory, emulated_amx: ctypes.CDLL
) -> dict[str, ctypes.CDLL]:
    """The projections of levels that few machines have, their instructions emulated."""
    # Compiled in a third of the time, and run for a moment: hence -O0.
    begun = {
        name: Emulated(tmp_path_factory.mktemp(name), *how, "-O0", units=_LINEAR_UNITS)
        for name, how in EMULATED_LINEARS.items()
    }
    return {**{name: one.load() for name, one in begun.items()}, "amx": emulated_amx}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch too, whose idle ones spin for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
