"""Structs of the kernels' interface: declared once, laid out alike on both sides."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from src.ops.attention.spec import AttentionSpec
from src.ops.matrix import KINDS, NUMBERS
from src.ops.projections.experts import EXPERTS
from src.ops.projections.linear import LINEAR
from src.ops.runtime import abi, weight_kinds
from src.ops.runtime import compiled_entries as entries
from src.ops.runtime.c_records import Record, _records, float32, int64, int64_array, pointer, record


def test_the_header_is_written_from_the_records() -> None:
    assert abi.HEADER.read_text() == abi.header(), "run `python -m src.ops.runtime.abi`"


def test_the_entry_points_of_compiled_code_are_written_from_the_schemas() -> None:
    assert entries.HEADER.read_text() == entries.header(), (
        "run `python -m src.ops.runtime.compiled_entries`"
    )


def test_a_shim_declares_what_the_schema_says() -> None:
    assert entries.c_shim(LINEAR) == (
        "int32_t aoti_torch_cpu_streamed_linear(AtenTensorHandle x, AtenTensorHandle weight, "
        "AtenTensorHandle* scales, AtenTensorHandle* offsets, int64_t kind, "
        "AtenTensorHandle* bias, AtenTensorHandle* ret)"
    )
    shim = entries.c_shim(EXPERTS)
    assert "int64_t activation, double alpha, double limit, int32_t weighs_inputs" in shim


def test_fields_have_names_and_values_on_both_sides(tmp_path: Path) -> None:
    @record(kernel="of_everything")
    class Everything(Record):
        """One field of each kind."""

        small: float = float32("before a gap")
        data: int = pointer("const int32_t*", "[count]")
        sizes: ctypes.Array[ctypes.c_int64] = int64_array("kSizes", 3)
        count: int = int64()

    _records.remove(Everything)
    source, library = tmp_path / "sums.cpp", tmp_path / "sums.so"
    source.write_text(
        "#include <cstddef>\n#include <cstdint>\nconstexpr int kSizes = 3;\n"
        + Everything.in_cpp()
        + 'extern "C" double sum(const Everything* all) {\n'
        "  double sum = all->small + double(all->sizes[2]);\n"
        "  for (int64_t i = 0; i < all->count; ++i) sum += all->data[i];\n"
        "  return sum;\n}\n"
    )
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).sum
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.POINTER(Everything),)
    numbers = (ctypes.c_int32 * 2)(100, 200)
    given = Everything(
        small=0.5,
        data=ctypes.addressof(numbers),
        sizes=(ctypes.c_int64 * 3)(1, 2, 3000),
        count=2,
    )
    assert function(given) == 3300.5


def test_a_layout_that_differs_does_not_compile(tmp_path: Path) -> None:
    text = abi.LinearArgs.in_cpp().replace("int64_t group;", "int32_t group;")
    source = tmp_path / "other.cpp"
    source.write_text("#include <cstddef>\n#include <cstdint>\n" + text)
    command = ["c++", "-std=c++17", "-fsyntax-only", source]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "as in Python" in failed.stderr


@pytest.mark.parametrize("change", ["int64_t tokens;", "// [rows + 1] contiguous"])
def test_the_interface_has_another_number_after_a_change(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    assert change in abi._declarations()
    declared = abi._declarations().replace(change, "")
    assert abi.digest(declared) != abi.ABI


def test_a_value_has_a_struct_of_its_fields() -> None:
    sinks = torch.ones(4)
    packed = abi.AttentionSpec.of(AttentionSpec(0.5, window=3, sinks=sinks))
    fields = (packed.scale, packed.cap, packed.window, packed.chunk, packed.sinks)  # type: ignore[attr-defined]
    assert fields == (0.5, 0.0, 3, 0, sinks.data_ptr())
    for elsewhere in (torch.ones(8)[::2], torch.ones(4, device="meta")):
        with pytest.raises(ValueError, match="contiguous sinks in host memory"):
            abi.AttentionSpec.of(AttentionSpec(0.5, sinks=elsewhere))


def test_every_kernel_of_the_interface_is_exported() -> None:
    exported = abi.header()
    assert all(f"slipstream_{each.kernel};" in exported for each in abi.KERNELS)
    assert len({each.kernel for each in abi.KERNELS}) == len(abi.KERNELS) == 10


def test_kinds_of_weights_are_those_of_the_table() -> None:
    assert weight_kinds.HEADER.read_text() == weight_kinds.header()
    assert len(KINDS) == len(NUMBERS) + sum(one.tiled_kind is not None for one in NUMBERS.values())
