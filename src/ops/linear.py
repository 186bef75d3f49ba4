"""`linear`: a projection whose weights are read once, in the type in which they are held.

Few tokens against a large matrix cost what reading the matrix costs, so weights are widened in
registers and never in memory: bfloat16 halves what float32 reads, int8 a quarter, int4 an eighth.
(Where a CPU multiplies bfloat16, tokens of that meet bfloat16 weights, and quantized ones that are
rounded to it: int8 exactly, int4 with its scale to within 2^-9.)
Weights may also lie in strips, as a CPU's products of neighbouring inputs take them: bfloat16, or
quantized ones, which are multiplied by inputs that are rounded to 8 bits, as integers.
How quantized weights come about is `src.models.quantization`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op

INT4_RUN = 32
"""int4: this many weights of a row lie in 16 bytes, the first half of them in the low halves."""

LARGEST_UNIT = 64
"""Weights in strips: this many inputs of a token are rounded by one scale, at most."""

STRIP = 64
"""Rows of a strip."""

_SIGN = -128  # Changed in all bits of int8, it makes them those of the value + 128, unsigned.
_NOTHING = 2.0**-100  # Smaller magnitudes are rounded to zero: their inverse would not be finite.


def fits_strips(weight: Tensor) -> bool:
    """Whether a matrix of this shape and dtype (of packed int4: uint8) can lie in strips."""
    rows, columns = weight.shape
    if weight.dtype == torch.int8:
        return columns % LARGEST_UNIT == 0
    whole = weight.dtype == torch.uint8 or (weight.dtype == torch.bfloat16 and columns % 2 == 0)
    return whole and rows % STRIP == 0


def to_strips(weight: Tensor) -> Tensor:
    """Lay bfloat16 weights out for products of pairs: see [`linear`][src.ops.linear.linear].

    Every two weights of `STRIP` rows lie together.

    Parameters
        weight: [N, K] bfloat16, N a multiple of `STRIP`, K even.

    Returns
        [S, K / 2, 128] bfloat16 of S strips.

    Raises
        ValueError: N, K or the dtype is none of these.
    """
    _require_fit(weight)
    return _in_strips(weight)


def to_quantized_strips(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Lay quantized weights out for products of integers: see [`linear`][src.ops.linear.linear].

    Every four (of int4, eight) weights of `STRIP` rows lie together. A last strip of int8 is filled
    up with zeros.

    Parameters
        weight: as of `dequantize`: [N, K] int8, K a multiple of `LARGEST_UNIT`, or [N, K / 2] uint8
            of packed int4, N a multiple of `STRIP`.
        scales: float32, of these weights.

    Returns
        [S, K / 4, 256] int8 of S strips, whose bits are those of values + 128, unsigned, and
        `scales`; or [S, K / 8, 256] uint8 and scales [S, K / group, STRIP].

    Raises
        ValueError: N or K is none of these.
    """
    _require_fit(weight)
    rows = weight.shape[0]
    if weight.dtype == torch.int8:
        weight = functional.pad(weight, (0, 0, 0, -rows % STRIP))
        return _in_strips(weight ^ _SIGN), scales
    runs = weight.view(rows, -1, INT4_RUN // 2)  # [N, K / 32, 16]
    values = torch.cat((runs & 15, runs >> 4), dim=2).view(rows, -1, 2, 4)  # [N, K / 8, 2, 4]
    bytes_of_eight = values[:, :, 0] | (values[:, :, 1] << 4)  # [N, K / 8, 4]
    groups = scales.view(-1, STRIP, scales.shape[1]).transpose(1, 2).contiguous()
    return _in_strips(bytes_of_eight.view(rows, -1)), groups


def _require_fit(weight: Tensor) -> None:
    if not fits_strips(weight):
        raise ValueError(f"{tuple(weight.shape)} of {weight.dtype} cannot be cut into strips")


def _in_strips(weight: Tensor) -> Tensor:
    words = weight.view(torch.int32).view(-1, STRIP, weight.shape[1] * weight.element_size() // 4)
    return words.transpose(1, 2).contiguous().view(weight.dtype)


def _in_rows(weight: Tensor) -> Tensor:
    words = weight.view(torch.int32).transpose(1, 2).contiguous()  # [S, STRIP, slices]
    return words.view(weight.dtype).view(weight.shape[0] * STRIP, -1)


def _values_of(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Quantized values [N, K] and scales [N], or [N, K / group]: int8, or uint8 of packed int4."""
    is_int8 = weight.dtype == torch.int8
    if weight.dim() == 2:
        if is_int8:
            return weight, scales
        runs = weight.view(len(weight), -1, INT4_RUN // 2)  # [N, K / 32, 16]
        return torch.cat((runs & 15, runs >> 4), dim=2).view(len(weight), -1), scales
    rows = _in_rows(weight)
    if is_int8:
        return rows[: len(scales)] ^ _SIGN, scales
    eights = rows.view(len(rows), -1, 4)  # [N, K / 8, 4]
    values = torch.cat((eights & 15, eights >> 4), dim=2).view(len(rows), -1)
    return values, scales.transpose(1, 2).reshape(len(rows), -1)


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """The matrix that quantized weights stand for, float32 [N, K].

    Parameters
        weight: [N, K] int8, or [N, K / 2] uint8 of packed int4 (see `INT4_RUN`); or either in
            strips (see `to_quantized_strips`).
        scales: float32 [N] of int8 rows; [N, K / group] of int4 groups, whose value is
            `(q - 8) * scale`; in strips as `to_quantized_strips` leaves them.
    """
    values, scales = _values_of(weight, scales)
    # In place: until kernels are built a start has all weights pass through here in every step.
    if scales.dim() == 1:
        return values.float().mul_(scales[:, None])
    groups = values.view(len(values), scales.shape[1], -1).float().sub_(8)
    return groups.mul_(scales[:, :, None]).view(len(values), -1)


def round_inputs(x: Tensor, unit: int) -> Tensor:
    """Inputs [T, K] rounded to 8 bits, as the float32 that they become.

    Each `unit` of a token's inputs become integers of -127 to 127 times one scale, their largest
    magnitude divided by 127.

    Raises
        ValueError: K is not a multiple of `unit`.
    """
    tokens, inputs = x.shape
    if inputs % unit:
        raise ValueError(f"expected a multiple of {unit} inputs to be rounded, got {inputs}")
    units = x.float().view(tokens, inputs // unit, unit)
    largest = units.abs().amax(dim=2, keepdim=True)
    # Not 127 / largest, which torch rounds twice: the reciprocal, and then the product.
    inverse = torch.where(largest < _NOTHING, 0.0, torch.full_like(largest, 127.0) / largest)
    return ((units * inverse).round() * (largest / 127)).view(tokens, inputs)


def reference(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """See [`linear`][src.ops.linear.linear]."""
    if scales is None:
        return functional.linear(x, weight if weight.dim() == 2 else _in_rows(weight), bias)
    inputs = x.float()
    if weight.dim() == 3:
        inputs = round_inputs(x, rounding_unit(weight, scales))
    wide = None if bias is None else bias.float()
    return functional.linear(inputs, dequantize(weight, scales), wide).to(x.dtype)


def rounding_unit(weight: Tensor, scales: Tensor) -> int:
    """How many inputs are rounded by one scale, beside weights in strips with these scales.

    `LARGEST_UNIT`, and 32 beside int4 whose groups are no multiple of that.
    """
    group = LARGEST_UNIT if scales.dim() == 1 else weight.shape[1] * 8 // scales.shape[1]
    return LARGEST_UNIT if group % LARGEST_UNIT == 0 else INT4_RUN


def num_outputs(weight: Tensor, scales: Tensor | None) -> int:
    """N of weights and scales as of [`linear`][src.ops.linear.linear]: [N, ...] or in strips."""
    if weight.dim() == 2:
        return weight.shape[0]
    if scales is None:
        return weight.shape[0] * STRIP
    return scales.shape[0] if scales.dim() == 1 else scales.shape[0] * scales.shape[2]


def _fake(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], num_outputs(weight, scales)))


_STRIPS_OF = "strips of "


def _build(
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
    """Random values; `weight` is `same` (as x), `int8`, or `int4/<group>`, or `strips of` these."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=random).to(dtype).to(device)
    bias = torch.randn(outputs, generator=random).to(dtype).to(device) if has_bias else None
    if weight == "same":
        matrix = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
        return x, matrix.to(dtype).to(device), None, bias
    if weight.startswith(_STRIPS_OF):
        kind = weight.removeprefix(_STRIPS_OF)
        _, rows, scales, _ = _build(
            "cpu", tokens=0, inputs=inputs, outputs=outputs, dtype=dtype, weight=kind, seed=seed
        )
        if scales is None:
            return x, to_strips(rows).to(device), None, bias
        return x, *(tensor.to(device) for tensor in to_quantized_strips(rows, scales)), bias
    if weight == "int8":
        bits = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        scales = torch.rand(outputs, generator=random) / 64 * inputs**-0.5
        return x, bits.to(device), scales.to(device), bias
    group = int(weight.removeprefix("int4/"))
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=random) / 4 * inputs**-0.5
    return x, packed.to(device), scales.to(device), bias


def _cost(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Cost:
    tokens, inputs = x.shape
    outputs = num_outputs(weight, scales)
    moved = (
        weight.nbytes
        + (0 if scales is None else scales.nbytes)
        + x.element_size() * tokens * (inputs + outputs)
    )
    return Cost(bytes=moved, flops=2 * tokens * inputs * outputs)


LINEAR = Op(
    # Code that is compiled ahead of time calls it by a C name made of this one, in a namespace that
    # is torch's too: hence not just "linear".
    "streamed_linear",
    "(Tensor x, Tensor weight, Tensor? scales, Tensor? bias) -> Tensor",
    reference=reference,
    fake=_fake,
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
        # Less than a tile, tiles with a rest, and more tokens than stay close to a core.
        for tokens, inputs, outputs in [(1, 64, 1), (2, 128, 7), (7, 256, 33), (70, 1024, 10)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for weight in ("same", "int8", "int4/32", "int4/64")
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
        for weight in ("int8", "int4/32", "int4/64", "int4/128")
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
)


def linear(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 (rounded inputs: also in integers), rounded once.

    The compiled CPU kernel sums along the inputs in one fixed order, so a token's result is the
    same bits alone and in any batch.

    Parameters
        x: [T, K] float32, bfloat16 or float16, last dimension contiguous.
        weight: [N, K] in x's dtype; [N, K] int8; or [N, K / 2] uint8 of packed int4. Contiguous.
            Or in strips ([`to_strips`][src.ops.linear.to_strips],
            [`to_quantized_strips`][src.ops.linear.to_quantized_strips]). Beside quantized ones x is
            rounded to 8 bits ([`round_inputs`][src.ops.linear.round_inputs]), some inputs of a
            token by one scale ([`rounding_unit`][src.ops.linear.rounding_unit]), and products are
            integers.
        scales: None, or the scales of quantized weights, see
            [`dequantize`][src.ops.linear.dequantize].
        bias: None, or [N] in x's dtype.

    Returns
        [T, N] in x's dtype.
    """
    result: Tensor = LINEAR.overload(x, weight, scales, bias)
    return result
