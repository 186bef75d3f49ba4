"""A matrix within an op's record: flat for torch, and as a kernel of the CPU is given it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from src.ops.matrix import Encoding, Matrix, Tiling
from src.ops.projections.linear import Linear
from src.ops.projections.matrix_field import MatrixField
from src.ops.records import Record, nested, number, result, tensor
from src.ops.runtime import c_records as cpu_records
from src.ops.runtime.abi import ExpertsArgs
from src.ops.runtime.compiled_entries import body
from src.ops.runtime.matrix_reading import reader_of
from src.ops.runtime.packing import bind

BY_ROW = Encoding("int8", None, torch.float32)
IN_GROUPS = Encoding("int8", 32, torch.bfloat16, has_offsets=True)


class Stacked(Record, result=result("out", "tokens outputs", like="x")):
    """A stack of matrices, each followed by one more argument than any op has."""

    x: Tensor = tensor("tokens inputs", rows=True)
    layers: Matrix = nested(
        by=MatrixField("layers", "count 2*outputs inputs", prefix="layers_", is_ordered=True)
    )
    gain: float = number()
    turns: bool = number(default=False)


@cpu_records.record(call=Stacked)
class StackedArgs(cpu_records.Record):
    """What a kernel of `Stacked` would be given."""


cpu_records._records.remove(StackedArgs)


def encoded(encoding: Encoding, *, tiled: bool = False, rows: int = 128) -> Matrix:
    """A stack of three matrices [rows, 64]."""
    layers = []
    for seed in range(3):
        values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
        parts = encoding.round(values)
        scales = parts["scales"].to(torch.float32 if encoding.scale is None else encoding.scale)
        scales = scales.squeeze(1) if encoding.group is None else scales
        offsets = parts["offsets"].to(scales.dtype) if encoding.has_offsets else None
        matrix = Matrix(parts["values"], encoding, scales, offsets)
        layers.append(matrix.tiled() if tiled else matrix)
    stacks = {
        name: torch.stack([each.tensors()[name] for each in layers]) for name in layers[0].tensors()
    }
    return layers[0]._replace(**stacks)


def test_a_matrix_is_flat_for_torch_and_whole_for_kernels() -> None:
    assert Stacked.schema() == (
        "(Tensor x, Tensor layers, Tensor? layers_scales, Tensor? layers_offsets, "
        "Tensor? layers_order, int layers_kind, float gain, bool turns=False) -> Tensor"
    )
    matrix = encoded(IN_GROUPS)._replace(order=torch.arange(64).int().expand(3, -1))
    again = Stacked.of_flat(*Stacked(torch.ones(2, 64), matrix, 0.5).flat())
    assert again.layers.encoding == IN_GROUPS
    for name, each in matrix.tensors().items():
        assert again.layers.tensors()[name] is each
    assert (again.gain, again.turns) == (0.5, False)


def test_an_op_that_takes_no_order_refuses_one() -> None:
    matrix = Matrix.plain(torch.ones(4, 4))._replace(order=torch.arange(4).int())
    with pytest.raises(ValueError, match="weight must have its columns in the order of inputs"):
        Linear(torch.ones(1, 4), matrix).flat()


@pytest.mark.parametrize("tiled", [False, True])
def test_a_result_that_is_traced_has_the_sizes_of_a_matrix(tiled: bool) -> None:
    matrix = encoded(BY_ROW, tiled=tiled)
    assert (matrix.tiling is Tiling.TILES) is tiled
    assert matrix.shape == (3, 128, 64)
    made = Linear(torch.ones(5, 64), matrix.of(1)).traced()
    assert made is not None
    assert made.shape == (5, 128)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("encoding", "group", "group_dtype"),
    [(None, 0, 0), (BY_ROW, 0, 0), (IN_GROUPS, 32, 1), (Encoding("e2m1", 32, torch.uint8), 32, 3)],
    ids=str,
)
def test_a_kernel_is_given_what_a_matrix_is(
    encoding: Encoding | None, group: int, group_dtype: int, tiled: bool
) -> None:
    seen: list[dict[str, Any]] = []

    def kernel(args: Any) -> int:
        seen.append({name: getattr(args, name) for name in StackedArgs.declared})
        return 0

    if encoding is None:
        matrix = Matrix.plain(torch.ones(3, 128, 64))
    else:
        matrix = encoded(encoding, tiled=tiled)
    out = bind(kernel, StackedArgs)(*Stacked(torch.ones(2, 64), matrix, 0.5, True).flat())
    assert out.shape == (2, 64)
    got = seen[0]
    numbers = ("tokens", "count", "outputs", "inputs", "gain", "turns")
    assert [got[name] for name in numbers] == [2, 3, 64, 64, 0.5, 1]
    assert got["layers"] == matrix.values.data_ptr()
    scales = None if matrix.scales is None else matrix.scales.data_ptr()
    assert got["layers_scales"] == scales
    assert bool(got["layers_offsets"]) is (matrix.offsets is not None)
    assert not got["layers_order"]
    told = (got["layers_kind"], got["layers_group"], got["layers_group_dtype"])
    assert told == (matrix.kind, group, group_dtype)


def test_sizes_of_a_matrix_are_compared_with_those_of_tensors() -> None:
    call = bind(lambda _: pytest.fail("called"), StackedArgs)
    for matrix in (
        Matrix.plain(torch.ones(3, 127, 64)),
        Matrix.plain(torch.ones(3, 128, 63)),
        Matrix.plain(torch.ones(3, 128, 64, dtype=torch.bfloat16)),
        Matrix.plain(torch.ones(3, 128, 64))._replace(order=torch.ones(3, 63).int()),
    ):
        with pytest.raises(ValueError, match=r"layers \[count, 2\*outputs, inputs\].*layers \(3, "):
            call(*Stacked(torch.ones(2, 64), matrix, 0.5).flat())


@pytest.mark.parametrize("tiled", [False, True])
def test_parts_that_do_not_fit_their_matrix_are_refused(tiled: bool) -> None:
    read = reader_of(3)
    rows, groups = encoded(BY_ROW, tiled=tiled), encoded(IN_GROUPS, tiled=tiled)
    assert rows.scales is not None
    assert groups.scales is not None
    assert read(rows.values, rows.kind, rows.scales, None) == (3, 128, 64, 0, 0)
    assert read(groups.values, groups.kind, groups.scales, groups.offsets) == (3, 128, 64, 32, 1)
    for matrix, scales, offsets in (
        (rows, rows.scales[:2], None),
        (rows, rows.scales.double(), None),
        (rows, rows.scales.T.contiguous().T, None),
        (rows, rows.scales, rows.scales),
        (groups, groups.scales[:, :1], None),
        (groups, groups.scales.double(), None),
        (groups, groups.scales, groups.scales.float()),
        (groups, groups.scales, groups.scales[:, :1]),
    ):
        with pytest.raises(ValueError, match=r"expected|strips"):
            read(matrix.values, matrix.kind, scales, offsets)
    plain = torch.ones(3, 128, 64)
    for values, offsets in ((plain[0], None), (plain.transpose(1, 2), None), (plain, plain)):
        with pytest.raises(ValueError, match="expected"):
            read(values, 0, None, offsets)


def test_what_may_be_left_out_has_its_default_in_cpp_too() -> None:
    declared = StackedArgs.in_cpp().splitlines()
    assert "  int64_t turns = 0;" in declared
    assert "  double gain;" in declared
    joined = ExpertsArgs.in_cpp()
    assert "int64_t activation = 0;" in joined
    assert "double alpha = 1.0;" in joined


def test_compiled_code_hands_over_all_that_a_struct_has() -> None:
    lines = list(body(Stacked, StackedArgs))
    given = [line.split(" = ")[0].removeprefix("args.") for line in lines if "args." in line]
    # The result is made, and its address set, behind it.
    assert given == [name for name in StackedArgs.declared if name != "out"]
    assert "const int64_t size_outputs = (size_layers_1 / (2));" in lines
    assert "const int64_t size_inputs = seen_x.sizes[1];" in lines
    assert "args.gain = gain;" in lines
    assert "args.layers_group = seen_layers.group;" in lines
    assert "const int64_t shape[] = {size_tokens, size_outputs};" in lines
