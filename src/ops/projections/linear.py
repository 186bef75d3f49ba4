"""`linear`: a projection that reads its weights once, in the dtype in which they are stored.

For few tokens, the cost of a projection is reading the matrix. So weights are widened in registers,
never in memory: compared with float32, bfloat16 reads half, int8 a quarter, int4 an eighth. (Where
a CPU has bfloat16 products, bfloat16 inputs are multiplied by bfloat16 weights directly. Quantized
weights are converted to bfloat16 there: int8 exactly, int4 times its scale to within 2^-9.)

A `Matrix` says what its numbers stand for and how they lie. Among the flat arguments the number
`kind` says it (`src.ops.matrix.KINDS`). Tiles are the layout of a CPU's dot-product instructions;
inputs of quantized tiles are rounded to 8 bits, and multiplied as integers.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op
from src.ops.matrix import (
    FLOAT8,
    Encoding,
    Matrix,
    Operand,
    Tiling,
    as_matrix,
    from_strips,
    groups_in_strips,
    to_quantized_strips,
    to_strips,
)
from src.ops.projections.matrix_field import MatrixField
from src.ops.records import Record, nested, result, tensor

_NOTHING = 2.0**-100  # Smaller magnitudes are rounded to zero: their inverse would overflow.


def round_inputs(x: Tensor, unit: int) -> Tensor:
    """Round inputs [T, K] to 8 bits and return the rounded values as float32.

    Each `unit` inputs of a token become integers from -127 to 127 times one scale. The scale is
    their largest magnitude divided by 127.

    Raises
    ------
    ValueError
        K is not a multiple of `unit`.
    """
    tokens, inputs = x.shape
    if inputs % unit:
        raise ValueError(f"expected a multiple of {unit} inputs to be rounded, got {inputs}")
    units = x.float().view(tokens, inputs // unit, unit)
    largest = units.abs().amax(dim=2, keepdim=True)
    # Not `127 / largest`: torch computes that as reciprocal times 127, which rounds twice.
    inverse = torch.where(largest < _NOTHING, 0.0, torch.full_like(largest, 127.0) / largest)
    # By a tensor as well: on CUDA torch multiplies by the reciprocal of a number.
    steps = largest / torch.full_like(largest, 127.0)
    return ((units * inverse).round() * steps).view(tokens, inputs)


class Linear(Record, result=result("out", "tokens outputs", like="x")):
    """`x @ weight.T + bias`, see `linear`.

    Attributes
    ----------
    x
        [T, K] float32, bfloat16 or float16, last dimension contiguous.
    weight
        A matrix [N, K], plain ones in x's dtype; columns are in the order of inputs.
    bias
        [N] in x's dtype; None for no bias.

    Returns
    -------
    [T, N] in x's dtype.
    """

    x: Tensor = tensor("tokens inputs", rows=True)
    weight: Matrix = nested(by=MatrixField("weight", "outputs inputs", prefix="", is_ordered=False))
    bias: Tensor | None = tensor("outputs", default=None)


def reference(call: Linear) -> Tensor:
    """See `linear`."""
    return multiply(call.x, call.weight, call.bias)


def multiply(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """The product in plain torch."""
    is_tiled = matrix.tiling is Tiling.TILES
    if matrix.scales is None:
        return functional.linear(x, from_strips(matrix.values) if is_tiled else matrix.values, bias)
    inputs = round_inputs(x, matrix.rounding_unit) if is_tiled else x.float()
    wide = None if bias is None else bias.float()
    return functional.linear(inputs, matrix.dequantized(), wide).to(x.dtype)


_STRIPS_OF = "strips of "
_WITH = " with "
_OFFSETS = {"offsets": torch.float32, "bfloat16 offsets": torch.bfloat16}


def _tensors(
    device: str,
    *,
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype = torch.float32,
    weight: str = "same",
    has_bias: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """x, weight, scales, bias, and perhaps offsets.

    `weight` is `same` (as x), `int8`, `float8`, or one of these, int4 or e2m1 `/<group>`.

    Groups may be `with offsets` or `with bfloat16 offsets`, and scales of that dtype; offsets are
    the last argument then. All of these may be `strips of`.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=random).to(dtype).to(device)
    bias = torch.randn(outputs, generator=random).to(dtype).to(device) if has_bias else None
    if weight == "same":
        matrix = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
        return x, matrix.to(dtype).to(device), None, bias
    if weight.startswith(_STRIPS_OF):
        kind = weight.removeprefix(_STRIPS_OF)
        _, rows, scales, _, *offsets = _tensors(
            "cpu", tokens=0, inputs=inputs, outputs=outputs, dtype=dtype, weight=kind, seed=seed
        )
        if scales is None:
            return x, to_strips(rows).to(device), None, bias
        laid_out = (tensor.to(device) for tensor in to_quantized_strips(rows, scales))
        return x, *laid_out, bias, *(groups_in_strips(each).to(device) for each in offsets)
    if weight == "int8":
        bits = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        scales = torch.rand(outputs, generator=random) / 64 * inputs**-0.5
        return x, bits.to(device), scales.to(device), bias
    if weight.startswith("float8"):
        values = torch.randn(outputs, inputs, generator=random).mul_(16).to(FLOAT8)
        group = int(weight.removeprefix("float8/")) if "/" in weight else inputs
        scales = torch.rand(outputs, inputs // group, generator=random) / 16 * inputs**-0.5
        scales = scales.squeeze(1) if weight == "float8" else scales
        return x, values.to(device), scales.to(device), bias
    kind, _, kind_of_offsets = weight.partition(_WITH)
    kind, size = kind.split("/")
    shape = (outputs, inputs // int(size))
    if kind == "e2m1":
        bits = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
        scales = torch.randint(116, 122, shape, generator=random, dtype=torch.uint8)
        return x, bits.to(device), scales.to(device), bias
    if kind == "int8":
        bits = torch.randint(-128, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        scales = torch.rand(shape, generator=random) / 64 * inputs**-0.5
    else:
        bits = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
        scales = torch.rand(shape, generator=random) / 4 * inputs**-0.5
    if not kind_of_offsets:
        return x, bits.to(device), scales.to(device), bias
    offsets = torch.randn(shape, generator=random) * inputs**-0.5
    narrow = (each.to(device, _OFFSETS[kind_of_offsets]) for each in (scales, offsets))
    return x, bits.to(device), next(narrow), bias, next(narrow)


# Its cases' names are read off the signature.
@functools.wraps(_tensors)
def _build(device: str, *, weight: str = "same", **case: Any) -> Linear:
    x, values, scales, bias, *offsets = _tensors(device, weight=weight, **case)
    return Linear(x, Matrix.of_kind(_kind_of(weight, values), values, scales, *offsets), bias)


def _kind_of(weight: str, values: Tensor) -> int:
    tiling = Tiling.TILES if weight.startswith(_STRIPS_OF) else Tiling.ROWS
    name = re.split(r"[/ ]", weight.removeprefix(_STRIPS_OF))[0]
    if name == "same":
        return Matrix.plain(values, tiling).kind
    number = "e4m3" if name == "float8" else name
    return Matrix(values, Encoding(number), tiling=tiling).kind


def _cost(call: Linear) -> Cost:
    x, matrix = call.x, call.weight
    (tokens, inputs), outputs = x.shape, matrix.outputs
    moved = matrix.nbytes + x.element_size() * tokens * (inputs + outputs)
    return Cost(bytes=moved, flops=2 * tokens * inputs * outputs)


LINEAR = Op(
    # Code that is compiled ahead of time calls the op by a C name derived from this one. It shares
    # a namespace with torch's own ops, where "linear" is taken.
    "streamed_linear",
    Linear,
    reference=reference,
    build=_build,
    cases=[
        {
            "tokens": tokens,
            "inputs": inputs,
            "outputs": outputs,
            "dtype": dtype,
            "weight": weight,
            "has_bias": tokens == 7,
            "seed": tokens + inputs,
        }
        # Less than a tile, tiles with a remainder, and more tokens than fit into a core's cache.
        for tokens, inputs, outputs in [(1, 64, 1), (2, 128, 7), (7, 256, 33), (70, 1024, 10)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for weight in (
            *("same", "int8", "int4/32", "int4/64", "int8/16", "int8/32"),
            *("int4/32 with bfloat16 offsets", "int8/32 with offsets", "float8", "float8/32"),
            *("e2m1/32", "e2m1/64"),
        )
    ]
    + [
        {
            "tokens": tokens,
            "inputs": inputs,
            "outputs": outputs,
            "dtype": dtype,
            "weight": f"{_STRIPS_OF}{weight}",
            "has_bias": tokens == 7,
            "seed": tokens + inputs,
        }
        for tokens, inputs, outputs in [(1, 128, 64), (3, 256, 128), (7, 384, 192), (70, 1024, 64)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for weight in (
            *("int8", "int4/32", "int4/64", "int4/128", "int8/16", "int8/32"),
            *("int4/32 with offsets", "int8/32 with offsets"),
        )
    ]
    + [
        {
            "tokens": tokens,
            "inputs": inputs,
            "outputs": outputs,
            "dtype": torch.bfloat16,
            "weight": f"{_STRIPS_OF}same",
            "has_bias": tokens == 7,
            "seed": tokens + inputs,
        }
        for tokens, inputs, outputs in [(1, 62, 64), (3, 256, 128), (7, 386, 192), (70, 1024, 64)]
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.projections.linear_triton:run"},
)


def linear(x: Tensor, weight: Operand, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once.

    With quantized weights in tiles, x is rounded to 8 bits (`round_inputs`) and multiplied as
    integers; the matrix's `rounding_unit` says how many inputs of a token share one scale.

    The compiled CPU kernel sums along the inputs in one fixed order, so a token's result has the
    same bits alone and in any batch. There are two exceptions, which `LibraryWays.keeping_one`
    excludes. With quantized weights in tiles, many bfloat16 tokens may be multiplied without being
    rounded, where that is faster (`build/ways.py`). With plain weights that are multiplied in
    float32, many tokens are summed in another order (`outer_products.h`).

    Parameters
    ----------
    x
        [T, K] float32, bfloat16 or float16, last dimension contiguous.
    weight
        A matrix [N, K], plain ones in x's dtype. A tensor is a plain matrix in rows.
    bias
        [N] in x's dtype; None for no bias.

    Returns
    -------
    [T, N] in x's dtype.
    """
    matrix = as_matrix(weight)
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
        matrix = matrix._replace(order=None)
    return LINEAR.function(x, matrix, bias)
