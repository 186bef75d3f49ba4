"""Compiled code that calls the kernel library for its tensors, and code that must call torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from src.compile import Compilation, Job, LoadedFunction
from src.compile.artifacts import ArtifactCache
from src.compile.replace_torch_shims import with_library_tensors
from src.ops.runtime.compiled import Caller, CompiledCodeError
from src.ops.runtime.kernel_library import KernelLibrary
from tests.compile.functions import Passed, pass_constant, pass_on, pass_on_with_torch

pytestmark = pytest.mark.timeout(900)

WEIGHT = torch.randn(128, 64)
NAMES = b"\0aoti_torch_empty_strided\0aoti_torch_dtype_int8\0aoti_torch_get_sizes\0"


@pytest.fixture(scope="module", params=[pass_on, pass_on_with_torch])
def passing(
    request: pytest.FixtureRequest, library: KernelLibrary, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedFunction, Callable[..., Passed]]:
    """A function, compiled and as it is."""
    root = tmp_path_factory.mktemp("compiled")
    job = Job.of(request.param, (torch.randn(4, 64), WEIGHT, torch.arange(4)), (0, 2))
    (function,) = Compilation([job], root).load(Caller(library.path, 2))
    artifact = ArtifactCache(root).find(job)
    assert artifact is not None
    assert artifact.has_own_tensors == (request.param is pass_on)
    return function, request.param


@torch.inference_mode()
def test_results_are_arguments_and_parts_and_products(
    passing: tuple[LoadedFunction, Callable[..., Passed]],
) -> None:
    compiled, plain = passing
    for count in (1, 0, 7, 500, 7):
        x, positions = torch.randn(count, 64), torch.arange(count)
        got = compiled(x, WEIGHT, positions)
        torch.testing.assert_close(got, plain(x, WEIGHT, positions), rtol=1e-4, atol=1e-4)
        # They stay what they are, whatever becomes of the arguments and of later calls.
        kept, before = got.part, got.part.clone()
        compiled(torch.randn(count, 64), WEIGHT, positions)
        x.zero_()
        assert torch.equal(kept, before)


@torch.inference_mode()
def test_nothing_is_lost(
    passing: tuple[LoadedFunction, Callable[..., Passed]], library: KernelLibrary
) -> None:
    compiled, _ = passing
    call = TensorFunctions(library.path)
    for count in (1, 300, 0):
        x, positions = torch.randn(count, 64), torch.arange(count)
        compiled(x, WEIGHT, positions)
        before = call.status("count_tensors")
        for _ in range(3):
            compiled(x, WEIGHT, positions)
            assert call.status("count_tensors") == before


@torch.inference_mode()
def test_constants_are_torch_s(library: KernelLibrary, tmp_path: Path) -> None:
    arguments = (torch.randn(4, 64), WEIGHT, torch.arange(4))
    job = Job.of(pass_constant, arguments, (0, 2))
    (function,) = Compilation([job], tmp_path).load(Caller(library.path, 2))
    artifact = ArtifactCache(tmp_path).find(job)
    assert artifact is not None
    assert not artifact.has_own_tensors
    torch.testing.assert_close(
        function(*arguments), pass_constant(*arguments), rtol=1e-4, atol=1e-4
    )


def test_only_torch_takes_a_weight_of_so_many_dimensions(
    passing: tuple[LoadedFunction, Callable[..., Passed]], library: KernelLibrary
) -> None:
    code = passing[0]._code
    refused = pytest.raises(CompiledCodeError, match="dimensions")
    with refused if code.has_own_tensors else contextlib.nullcontext():
        assert Caller(library.path, 2).bind(code, [None, torch.zeros([1] * 9), None]).address


def test_names_of_tensor_functions_are_changed_in_place() -> None:
    code = b"\x7fELF..." + NAMES + b"of aoti_torch_clone\0"
    assert with_library_tensors(code, "") == (
        b"\x7fELF...\0slipstream_empty_strided\0aoti_torch_dtype_int8\0slipstream_get_sizes\0"
        b"of aoti_torch_clone\0"
    )


@pytest.mark.parametrize(
    "code",
    [
        b"MZ" + NAMES,
        b"\x7fELF" + NAMES + b"aoti_torch_cpu_mm_out\0",
        b"\x7fELF" + NAMES + b"torch_call_dispatcher\0",
    ],
)
def test_code_that_calls_anything_else_is_left_to_torch(code: bytes) -> None:
    assert with_library_tensors(code, "") is None


class TensorFunctions:
    """The library's, called as compiled code does: sizes in and out by pointer, 0 for success."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.status(name, *arguments, ctypes.byref(made)) == 0
        return made

    def number(self, name: str, tensor: ctypes.c_void_p, *arguments: Any) -> int:
        number = ctypes.c_int64()
        assert self.status(name, tensor, *arguments, ctypes.byref(number)) == 0
        return number.value

    def status(self, name: str, *arguments: Any) -> int:
        status: int = getattr(self._library, f"slipstream_{name}")(*arguments)
        return status

    def row(self, name: str, tensor: ctypes.c_void_p) -> list[int]:
        address = ctypes.POINTER(ctypes.c_int64)()
        assert self.status(name, tensor, ctypes.byref(address)) == 0
        return address[: self.number("get_dim", tensor)]


FLOAT, INT64, CPU = ctypes.c_int32(6), ctypes.c_int32(4), ctypes.c_int32(0)


def longs(*numbers: int) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def test_views_keep_memory_and_copies_have_their_own(library: KernelLibrary) -> None:
    call = TensorFunctions(library.path)
    source = torch.arange(24.0).view(4, 6)
    blob = call.make(
        "create_tensor_from_blob", ctypes.c_void_p(source.data_ptr()), ctypes.c_int64(2),
        longs(3, 6), longs(6, 1), ctypes.c_int64(6), FLOAT, CPU, CPU,
    )  # fmt: skip
    strided = call.make(
        "_reinterpret_tensor", blob, ctypes.c_int64(3),
        longs(3, 2, 2), longs(6, 3, 1), ctypes.c_int64(1),
    )  # fmt: skip
    copied = call.make("clone", strided)
    part = call.make(
        "_reinterpret_tensor", copied, ctypes.c_int64(1), longs(5), longs(2), ctypes.c_int64(2)
    )
    for gone in (blob, strided, copied):
        assert call.status("delete_tensor_object", gone) == 0
    expected = source[1:].as_strided((3, 2, 2), (6, 3, 1), 7).reshape(-1)[2:12:2]
    assert call.row("get_sizes", part) == [5]
    assert call.row("get_strides", part) == [2]
    assert call.number("get_size", part, ctypes.c_int64(0)) == 5
    assert call.number("get_numel", part) == 5
    place = ctypes.c_void_p(call.number("get_data_ptr", part))
    floats = ctypes.cast(place, ctypes.POINTER(ctypes.c_float))
    assert torch.equal(torch.tensor(floats[:9:2]), expected)
    assert call.status("delete_tensor_object", part) == 0


def test_memory_is_aligned_and_large_enough(library: KernelLibrary) -> None:
    call = TensorFunctions(library.path)
    held: list[tuple[ctypes.c_void_p, int, int]] = []
    for count in (0, 1, 63, 64, 65, 127, 128, 129, 640, 641, 1000, 4096, 4097, 100_000):
        made = call.make(
            "empty_strided", ctypes.c_int64(1), longs(count), longs(1), INT64, CPU, CPU
        )
        place = call.number("get_data_ptr", made)
        assert place % 64 == 0
        # Written to from end to end: nobody else has any of it.
        ctypes.memset(place, len(held), count * 8)
        held.append((made, place, count * 8))
    for value, (made, place, size) in enumerate(held):
        assert ctypes.string_at(place, size) == bytes([value]) * size
        assert call.status("delete_tensor_object", made) == 0


@pytest.mark.parametrize("dims", [9, 40])
def test_more_dimensions_than_there_is_room_for_fail(library: KernelLibrary, dims: int) -> None:
    call, made = TensorFunctions(library.path), ctypes.c_void_p()
    ones = longs(*[1] * dims)
    arguments = (ctypes.c_int64(dims), ones, ones, FLOAT, CPU, CPU)
    assert call.status("empty_strided", *arguments, ctypes.byref(made)) == 1


@pytest.mark.parametrize("size", [-4, 1 << 46, 1 << 62])
def test_a_size_that_went_wrong_fails(library: KernelLibrary, size: int) -> None:
    call, made = TensorFunctions(library.path), ctypes.c_void_p()
    arguments = (ctypes.c_int64(1), longs(size), longs(1), FLOAT, CPU, CPU)
    assert call.status("empty_strided", *arguments, ctypes.byref(made)) == 1


class Spare:
    """Memory that this thread has freed, and may have for nothing the next time."""

    def __init__(self, library: KernelLibrary) -> None:
        self._call = TensorFunctions(library.path)

    @property
    def size(self) -> int:
        return self._call.status("count_spare_bytes")

    def make(self, size: int) -> tuple[ctypes.c_void_p, bool]:
        """A tensor of so many bytes, and whether its memory had been spare."""
        before = self.size
        arguments = (ctypes.c_int64(1), longs(size // 4), longs(1), FLOAT, CPU, CPU)
        made = self._call.make("empty_strided", *arguments)
        return made, before - self.size >= size

    def free(self, made: ctypes.c_void_p) -> None:
        assert self._call.status("delete_tensor_object", made) == 0

    def use(self, *sizes: int) -> bool:
        """Tensors that live together for a while; whether all of their memory had been spare."""
        made = [self.make(size) for size in sizes]
        for tensor, _ in made:
            self.free(tensor)
        return all(was_spare for _, was_spare in made)


def in_fresh_thread(library: KernelLibrary, function: Callable[[Spare], None]) -> None:
    """What a thread may keep depends on what it has ever used."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: function(Spare(library))).result()


def test_sizes_that_do_not_come_back_keep_nobody_out(library: KernelLibrary) -> None:
    def try_out(spare: Spare) -> None:
        for megabytes in range(1, 30):
            spare.use(megabytes << 20)
        assert 32 << 20 < spare.size <= 64 << 20
        for size in (12_000, 280_000):
            spare.use(size)
            assert spare.size <= 64 << 20
            assert spare.use(size)

    in_fresh_thread(library, try_out)


def test_what_comes_back_stays_whatever_comes_between(library: KernelLibrary) -> None:
    def try_out(spare: Spare) -> None:
        layer = (4 << 20, 23 << 20, 11 << 20)
        spare.use(*layer)
        for megabytes in range(1, 30):
            spare.use(megabytes * 999_424)
            assert spare.use(*layer)

    in_fresh_thread(library, try_out)


def test_what_is_used_now_and_then_hides_nothing_older_of_its_size(library: KernelLibrary) -> None:
    def try_out(spare: Spare) -> None:
        turn = [1 << 20, *(megabytes << 20 for megabytes in (2, 3, 5, 7, 10, 14, 16, 20))]
        spare.use(*[1 << 20] * 60)
        for size in turn * 3:
            spare.use(size)
        for size in turn:
            assert spare.use(size)

    in_fresh_thread(library, try_out)


def test_what_was_needed_at_once_stays_however_large(library: KernelLibrary) -> None:
    def try_out(spare: Spare) -> None:
        spare.use(120 << 20, 60 << 20)
        assert spare.use(120 << 20, 60 << 20)
        # Used in turn, not at once.
        spare.use(40 << 20, 30 << 20)
        assert spare.use(120 << 20, 60 << 20)
        for megabytes in range(1, 200, 7):
            spare.use(megabytes << 20)
        assert spare.size <= 2 * (240 << 20)

    in_fresh_thread(library, try_out)
