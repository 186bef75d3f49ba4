import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.ops.build.cache_root import cache_root
from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.levels import LEVELS, cpu_flags
from src.ops.build.objects import Objects
from src.ops.build.scratch import locked
from src.ops.build.units import SOURCES, Unit
from src.ops.runtime.kernel_library import KernelLibrary

OPTIMIZATION = "-O1"
"""Of levels that serve nobody on this machine: results are looked at, not speed.

A test with the marker `compilers` compiles them as they are shipped.
"""


@pytest.fixture(scope="session")
def kernel_cache() -> KernelCache:
    """The user's kernel cache, built if it was not yet (the compiler is part of the test setup)."""
    assert shutil.which("g++") or shutil.which("c++"), "these tests need a C++ compiler"
    cache = KernelCache(cache_root())
    # One that does not compile, or not pass its self-check, is no level less but a failure.
    cache.build_all(OPTIMIZATION)
    return cache


@pytest.fixture(scope="session")
def level_files(kernel_cache: KernelCache) -> dict[str, Path]:
    """Every level that this CPU and compiler have, by name; all have passed their self-checks."""
    return kernel_cache.build_all(OPTIMIZATION)


@pytest.fixture(scope="session")
def libraries(level_files: dict[str, Path]) -> dict[str, KernelLibrary]:
    found = {name: KernelLibrary(path) for name, path in level_files.items()}
    for library in found.values():
        # Whoever asks for threads gets them for small inputs too.
        library.assume_wake_cost(0.01)
    return found


_LINEAR_UNITS = ("projections/linear.cpp", "runtime/pool.cpp")
MACHINE_LEVELS = [level.name for level in LEVELS if level.needs <= cpu_flags()]


@pytest.fixture(scope="session", params=MACHINE_LEVELS)
def library(libraries: dict[str, KernelLibrary], request: pytest.FixtureRequest) -> KernelLibrary:
    """Each level of this machine in turn."""
    return at_level(libraries, request.param)


def at_level(libraries: dict[str, KernelLibrary], name: str) -> KernelLibrary:
    """Of that name; for one that the compiler does not know, the fastest."""
    return libraries.get(name) or list(libraries.values())[-1]


def _emulated(header: str, *flags: str, units: tuple[str, ...] = _LINEAR_UNITS) -> list[Unit]:
    """Units for AVX2, with the instructions of a header of this folder in plain C++."""
    common = (
        *("-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC"),
        *("-pthread", "-w", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c"),
    )
    before = Path(__file__).with_name(header)
    return [Unit(SOURCES / unit, (*common, *flags), before) for unit in units]


# Linears are compiled in a third of the time without optimization, and run for a moment.
EMULATED = {
    "amx": _emulated(
        "emulated_amx.h", "-O1", units=("attention/paged_attention.cpp", *_LINEAR_UNITS)
    ),
    "avx2_vnni": _emulated("emulated_avx_vnni.h", "-O0"),
    "avx512": _emulated("emulated_amx.h", "-DEMULATED_AVX512", "-O0"),
    "avx512_vnni": _emulated("emulated_amx.h", "-DEMULATED_AVX512_VNNI", "-O0"),
}


@pytest.fixture(scope="session")
def emulated_linears(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The projections of levels that few machines have, their instructions emulated."""
    compiler = cpp_compiler()
    assert compiler is not None
    directory, folder = cache_root() / "emulated-kernels", tmp_path_factory.mktemp("emulated")
    # One of the processes that run tests compiles, with all processors.
    with locked(directory):
        kept = Objects(directory / "objects", compiler, "")
        objects, failed = kept.make(EMULATED, folder, seconds=600)
    assert not failed
    libraries = {}
    for name, files in objects.items():
        output = str(folder / f"{name}.so")
        subprocess.run(
            [*compiler[0], "-shared", "-pthread", *map(str, files), "-o", output], check=True
        )
        libraries[name] = ctypes.CDLL(output)
        libraries[name].slipstream_assume_wake_cost(ctypes.c_double(0.01))
    return libraries


@pytest.fixture(scope="session")
def emulated_amx(emulated_linears: dict[str, ctypes.CDLL]) -> ctypes.CDLL:
    """The AMX level's kernels, its instructions emulated."""
    return emulated_linears["amx"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of torch too, whose idle ones spin for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
