"""A matrix and its encoding: what every kind of number promises, in rows and in tiles."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src.ops.matrix import (
    KINDS,
    NUMBERS,
    Encoding,
    Matrix,
    Tiling,
    _has_capability,
    as_matrix,
    fits_strips,
    has_capability,
)
from src.ops.projections.experts import Experts
from src.ops.projections.linear import LINEAR, Linear, linear
from src.ops.projections.projection import InputRounding, Projection, _multiplies_float8
from src.ops.runtime.kernel_library import KernelLibrary

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ENCODINGS = (
    Encoding("int8", None, torch.float32),
    Encoding("int8", 16, torch.float32),
    Encoding("int8", 48, torch.float32, has_offsets=True),
    Encoding("int4", 32, torch.float32),
    Encoding("int4", 96, torch.float32, has_offsets=True),
    Encoding("e4m3", None, torch.float32),
    Encoding("e4m3", 32, torch.float32),
    Encoding("e2m1", 32, torch.uint8),
)
# The largest error over the largest magnitude of a group: half of a number's largest step.
ERRORS = {"int8": 0.5 / 127, "int4": 0.5 / 7, "e4m3": 2**-4, "e2m1": 0.25}


def encoded(encoding: Encoding, rows: int = 64, inputs: int = 192) -> tuple[torch.Tensor, Matrix]:
    values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    parts = encoding.round(values)
    scales = parts["scales"].squeeze(1) if encoding.group is None else parts["scales"]
    return values, Matrix(parts["values"], encoding, scales, parts.get("offsets"))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_what_is_rounded_is_near_and_has_the_parts_that_are_planned(encoding: Encoding) -> None:
    values, matrix = encoded(encoding)
    planned = encoding.parts(64, 192)
    rounded = encoding.round(values)
    assert {kind: (tuple(one.shape), one.dtype) for kind, one in rounded.items()} == planned
    assert (matrix.outputs, matrix.inputs) == (64, 192)
    groups = values.view(64, -1, matrix.group)
    error = (matrix.dequantized().view_as(groups) - groups).abs()
    assert (error <= ERRORS[encoding.number] * groups.abs().amax(2, keepdim=True) * 1.001).all()
    assert error.max() > 0
    # Rounding again changes nothing, but for the sign of a zero.
    again = matrix._replace(values=encoding.round(matrix.dequantized())["values"])
    assert torch.equal(again.dequantized(), matrix.dequantized())


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_an_op_is_told_all_that_the_encoding_says(encoding: Encoding) -> None:
    _, matrix = encoded(encoding)
    forms = [matrix, matrix.tiled()]
    assert (forms[1].tiling is Tiling.TILES) == (encoding.number in ("int8", "int4"))
    for one in forms:
        told = Matrix.of_kind(one.kind, one.values, one.scales, one.offsets)
        assert (told.encoding, told.tiling) == (encoding, one.tiling)
        assert torch.equal(told.dequantized(), matrix.dequantized())
        stack = Matrix.of_kind(
            one.kind,
            *(None if t is None else torch.stack([t.flip(0), t]) for t in one[:1] + one[2:4]),
        )
        assert stack.is_stack
        assert (stack.encoding, stack.outputs, stack.inputs) == (encoding, 64, 192)
        assert torch.equal(stack.dequantized()[1], matrix.dequantized())
        assert stack.of(1).encoding == encoding


def test_two_encodings_of_equal_shapes_and_dtypes_are_told_apart() -> None:
    """Levels and e2m1 with the same bytes: the number alone says what they are."""
    _, levels = encoded(Encoding("int4", 32, torch.float32))
    codes = levels._replace(encoding=replace(levels.encoding, number="e2m1"))
    assert codes.values is levels.values
    x = torch.eye(192)
    for matrix in (levels, codes):
        expected = matrix.dequantized().T
        torch.testing.assert_close(LINEAR.reference(*Linear(x, matrix).flat()), expected)
    assert not torch.equal(levels.dequantized(), codes.dequantized())


def test_columns_in_another_order_meet_their_inputs() -> None:
    _, matrix = encoded(ENCODINGS[3])
    order = torch.randperm(192, generator=torch.Generator().manual_seed(3)).int()
    moved = matrix._replace(order=order)
    assert torch.equal(moved.dequantized()[:, order.long()], matrix.dequantized())
    x = torch.randn(5, 192)
    torch.testing.assert_close(linear(x, moved), x @ moved.dequantized().T, rtol=1e-4, atol=1e-4)
    stack = moved.map(lambda each: torch.stack([each, each]))
    assert torch.equal(stack.dequantized()[1], moved.dequantized())


def test_tensors_are_plain_matrices() -> None:
    weight = torch.randn(64, 32).bfloat16()
    matrix = as_matrix(weight)
    assert str(matrix.encoding) == "bfloat16"
    assert matrix.tensors().keys() == {"values"}
    tiles = matrix.tiled()
    assert tiles.tiling is Tiling.TILES
    assert (tiles.outputs, tiles.inputs) == (64, 32)
    assert torch.equal(tiles.dequantized(), weight.float())
    assert as_matrix(tiles) is tiles
    with pytest.raises(KeyError):
        as_matrix(torch.zeros(2, 2, dtype=torch.int8))


@pytest.mark.parametrize("kind", [-1, 3, 99])
def test_a_kind_that_nobody_knows_is_refused(kind: int) -> None:
    assert kind not in KINDS
    with pytest.raises(ValueError, match=f"no matrix of kind {kind} has values"):
        Matrix.of_kind(kind, torch.zeros(2, 2), None)


def test_kernels_of_devices() -> None:
    e2m1, e4m3 = Encoding("e2m1", 32, torch.uint8), Encoding("e4m3", None, torch.float32)
    assert e2m1.has_kernel(64, CPU, is_stack=False)
    assert e2m1.has_kernel(64, CUDA, is_stack=True)
    assert not e2m1.has_kernel(64, CUDA, is_stack=False)
    assert Encoding("bfloat16").has_kernel(7, CUDA, is_stack=False)
    for name in NUMBERS:
        quantized = Encoding(name, None, torch.float32)
        assert not quantized.has_kernel(48, CPU, is_stack=False)
    assert e4m3.has_kernel(64, CUDA, is_stack=False)
    # Of blocks of 8 inputs.
    assert not Encoding("e4m3", 8, torch.float32).has_kernel(128, CPU, is_stack=False)


@pytest.mark.parametrize(("capability", "has_kernel"), [((8, 0), False), ((8, 9), True)])
def test_older_gpus_do_not_convert_8_bit_floats(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_kernel: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    encoding = Encoding("e4m3", None, torch.float32)
    assert encoding.has_kernel(64, CUDA, is_stack=False) is has_kernel
    assert Encoding("int8", None, torch.float32).has_kernel(64, CUDA, is_stack=False)


def test_a_gpu_is_asked_once_what_it_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, 0)
    )
    _has_capability.cache_clear()
    try:
        for _ in range(2):
            assert not NUMBERS["e4m3"].is_known_to(torch.device("cuda", 1))
        assert asked == [torch.device("cuda", 1)]
    finally:
        _has_capability.cache_clear()


def test_a_gpu_is_asked_once_whether_it_multiplies_8_bit_floats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0)
    )
    _has_capability.cache_clear()
    try:
        matrix = encoded(Encoding("e4m3", None, torch.float32))[1]
        x: Any = SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.bfloat16)
        for _ in range(2):
            assert _multiplies_float8(x, matrix)
        assert asked == [torch.device("cuda", 1)]
        x.dtype = torch.float16
        assert not _multiplies_float8(x, matrix)
    finally:
        _has_capability.cache_clear()


def test_a_compiler_that_asks_what_a_gpu_can_is_told_without_a_warning() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if has_capability(torch.device("cuda", 0), (0, 0)) else x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(doubled, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_scales_that_are_fewer_than_rows_or_groups_are_refused(
    library: KernelLibrary, encoding: Encoding
) -> None:
    """Kernels would read behind them."""
    _, rows = encoded(encoding)
    x = torch.ones(2, 192)
    for matrix in (rows, rows.tiled()):
        scales, kind = matrix.scales, matrix.kind
        assert scales is not None
        wrong = [scales[:0], torch.stack([scales, scales]), scales[0]]
        wrong += [scales.double()] if encoding.group is None else [scales.flatten()[:-1]]
        stack = torch.stack([matrix.values] * 2)
        stacks = [torch.stack([scales]), *(torch.stack([one, one]) for one in wrong)]
        for one, several in zip([scales[:-1], *wrong], stacks, strict=True):
            offsets, moved = (one, several) if encoding.has_offsets else (None, None)
            # Scales of rows say how many the last tile has.
            if one.shape != (63,) or matrix.tiling is Tiling.ROWS:
                with pytest.raises(ValueError, match=REFUSED):
                    library.streamed_linear(x, matrix.values, one, offsets, kind)
            with pytest.raises(ValueError, match=REFUSED):
                call_experts(library, x, stack, several, kind, moved)


REFUSED = "expected|neither rows nor groups|no matrix|no strips"


def call_experts(
    library: KernelLibrary,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scales: torch.Tensor,
    kind: int,
    offsets: torch.Tensor | None,
) -> None:
    """With plain matrices behind the activation."""
    down = Matrix.plain(torch.ones(2, 192, 32))
    weights, ids = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    rest = Experts(x, down, down, weights, ids).flat()[6:]
    library.experts(x, gate_up, scales, offsets, None, kind, *rest)


def test_no_kernel_decodes_a_matrix_in_a_call(library: KernelLibrary) -> None:
    """Loading decodes what this refuses."""
    _, matrix = encoded(Encoding("int8", None, torch.float32), inputs=48)
    with pytest.raises(ValueError, match="no kernel multiplies int8 per row with 48 inputs"):
        library.streamed_linear(*Linear(torch.ones(1, 48), matrix).flat())


@pytest.mark.parametrize("number", ["int8", "int4", "e4m3", "e2m1"])
def test_a_row_of_zeros_stays_one(number: str) -> None:
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    values[0] = 0
    scale = torch.uint8 if number == "e2m1" else torch.float32
    encoding = Encoding(number, 32, scale)
    matrix = Matrix(encoding=encoding, **encoding.round(values))
    assert not matrix.dequantized()[0].any()


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "in_groups", "fits"),
    [
        (torch.int8, 10, 128, False, True),  # the last tile is padded
        (torch.int8, 10, 128, True, False),
        (torch.int8, 64, 96, False, False),
        (torch.int8, 64, 96, True, True),
        (torch.uint8, 64, 48, True, True),
        (torch.uint8, 10, 48, True, False),
        (torch.bfloat16, 64, 2, False, True),
        (torch.bfloat16, 64, 3, False, False),
        (torch.float32, 64, 64, False, False),
    ],
)
def test_which_matrices_fit_tiles(
    dtype: torch.dtype, rows: int, columns: int, in_groups: bool, fits: bool
) -> None:
    assert fits_strips(torch.zeros(rows, columns, dtype=dtype), in_groups=in_groups) is fits


@pytest.mark.parametrize("number", ["int8", "e4m3"])
@pytest.mark.parametrize("scaled", ["token", "static"])
def test_a_projection_has_all_its_tensors_and_rounds_its_inputs(number: str, scaled: str) -> None:
    _, matrix = encoded(Encoding(number, None, torch.float32))
    scale = torch.full((1, 1), 0.02) if scaled == "static" else None
    rounding = InputRounding(scaled, number, scale)  # type: ignore[arg-type]
    projection = Projection(matrix, rounding)
    names = {"values", "scales"} | ({"input_scale"} if scaled == "static" else set())
    assert projection.tensors().keys() == names
    assert projection.nbytes == sum(one.nbytes for one in projection.tensors().values())
    meta = projection.map(lambda each: each.to("meta"))
    assert all(each.is_meta for each in meta.tensors().values())
    assert meta.matrix.encoding == matrix.encoding
    # All within what the static scale reaches.
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).clamp(-2.5, 2.5)
    exact, got = x @ matrix.dequantized().T, projection.multiply(x, None)
    assert not torch.equal(got, Projection(matrix).multiply(x, None))
    # A token's result does not depend on the others.
    torch.testing.assert_close(projection.multiply(x[1:2], None), got[1:2])
    assert (got - exact).abs().max() < 0.1 * exact.abs().max()
