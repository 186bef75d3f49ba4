"""Loops of compiled code, cut into parts for the kernel library's threads."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.compile import Compilation, Job, LoadedFunction
from src.compile.artifacts import Artifact, ArtifactCache
from src.compile.replace_openmp import with_library_threads
from src.ops.runtime.compiled import Caller
from src.ops.runtime.kernel_library import KernelLibrary
from tests.compile.functions import gate_twice

pytestmark = pytest.mark.timeout(900)

WIDTH = 72
GAIN = torch.randn(WIDTH)
COUNTS = (3, 0, 1, 2, 64, 1000)
ONE_LOOP = "#pragma omp parallel\n{\n#pragma omp for\nfor (;;) {}\n}\n"
COMPILE_SERIALLY = """
import pickle, sys
from src.compile import replace_openmp, worker
replace_openmp.with_library_threads = lambda *_: None
worker._compile_into(*pickle.load(sys.stdin.buffer))
"""
NAMES = b"\0GOMP_parallel\0omp_get_thread_num\0omp_get_num_threads\0GOMP_4.0\0GOMP_barrier\0"


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.of(gate_twice, (*given(4), GAIN), (0, 1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def functions(job: Job, library: KernelLibrary, root: Path) -> dict[int, LoadedFunction]:
    """The same code, by number of threads."""
    return {
        threads: Compilation([job], root).load(Caller(library.path, threads))[0]
        for threads in (1, 2, 5)
    }


@pytest.fixture
def any_loop_is_long(library: KernelLibrary) -> Iterator[None]:
    library.assume_wake_cost(1e-6)
    yield
    library.assume_wake_cost()


def given(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 2 * WIDTH, generator=generator)
    return x, torch.randn(count, WIDTH, generator=generator)


def loops_cut(library: KernelLibrary) -> int:
    count = ctypes.CDLL(str(library.path)).slipstream_count_cut_loops
    count.restype = ctypes.c_int64
    number: int = count()
    return number


@torch.inference_mode()
@pytest.mark.usefixtures("any_loop_is_long")
@pytest.mark.parametrize("threads", [2, 5])
def test_parts_are_the_whole_to_the_bit(
    functions: dict[int, LoadedFunction], library: KernelLibrary, threads: int
) -> None:
    for count in COUNTS:
        expected = functions[1](*given(count), GAIN)
        close = gate_twice(*given(count), GAIN)
        torch.testing.assert_close(expected, close, rtol=1e-4, atol=1e-4)
        # How long a loop takes is known from the second time on.
        for _ in range(5):
            before = loops_cut(library)
            got = functions[threads](*given(count), GAIN)
            for mine, whole in zip(got, expected, strict=True):
                assert torch.equal(mine.view(torch.int32), whole.view(torch.int32))
        assert (loops_cut(library) > before) == (count > 1)


@torch.inference_mode()
def test_a_short_loop_stays_whole(
    functions: dict[int, LoadedFunction], library: KernelLibrary
) -> None:
    library.assume_wake_cost(1e9)
    time.sleep(0.05)  # threads that keep watch cost less
    try:
        before = loops_cut(library)
        for _ in range(3):
            functions[2](*given(64), GAIN)
        assert loops_cut(library) == before
    finally:
        library.assume_wake_cost()


@torch.inference_mode()
@pytest.mark.compilers
def test_without_threads_of_ours_code_is_serial(
    job: Job, library: KernelLibrary, tmp_path: Path
) -> None:
    cache = ArtifactCache(tmp_path)
    with cache.locked(job) as directory:
        given_job = pickle.dumps((job, directory))
        subprocess.run([sys.executable, "-c", COMPILE_SERIALLY], input=given_job, check=True)
    artifact = cache.find(job)
    assert artifact is not None
    code = artifact.shared_object.read_bytes()
    assert b"\0GOMP_" not in code
    assert b"\0slipstream_do\0" not in code
    (function,) = Compilation([job], tmp_path).load(Caller(library.path, 2))
    close = gate_twice(*given(9), GAIN)
    torch.testing.assert_close(function(*given(9), GAIN), close, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("functions")
def test_compiled_code_knows_no_openmp(job: Job, root: Path) -> None:
    artifact = ArtifactCache(root).find(job)
    assert isinstance(artifact, Artifact)
    code = artifact.shared_object.read_bytes()
    assert b"\0slipstream_do\0" in code
    assert b"\0GOMP_parallel\0" not in code
    # A kernel with two loops, the second of which reads what all of the first have written.
    kernels = artifact.source.read_text().split('extern "C"')
    assert max(kernel.count("#pragma omp for") for kernel in kernels) > 1


def test_names_of_openmp_are_changed_in_place() -> None:
    code = b"\x7fELF..." + NAMES + b"of GOMP_parallel\0"
    assert with_library_threads(code, ONE_LOOP + "#pragma omp simd simdlen(8)\n" + ONE_LOOP) == (
        b"\x7fELF...\0slipstream_do\0slipstream_my_part\0slipstream_in_parts\0GOMP_4.0\0"
        b"slipstream_0\0of GOMP_parallel\0"
    )


def test_code_without_loops_for_threads_stays() -> None:
    assert with_library_threads(b"\x7fELF...", "for (;;) {}") == b"\x7fELF..."


@pytest.mark.parametrize(
    ("code", "source"),
    [
        (b"MZ" + NAMES, ONE_LOOP),
        (b"\x7fELF" + NAMES + b"GOMP_single_start\0", ONE_LOOP),
        (b"\x7fELF" + NAMES + b"omp_get_max_threads\0", ONE_LOOP),
        (b"\x7fELF" + NAMES, ONE_LOOP + "#pragma omp for\nfor (;;) {}\n"),
        (b"\x7fELF" + NAMES, ONE_LOOP + "#pragma omp single\n{}\n"),
        (b"\x7fELF" + NAMES, "for (;;) {}"),
        (b"\x7fELF" + NAMES, ONE_LOOP.replace("for\n", "critical\n")),
    ],
)
def test_other_code_is_not_changed(code: bytes, source: str) -> None:
    assert with_library_threads(code, source) is None
