"""`linear`: a projection that reads its weights once, in the dtype in which they are stored.

For few tokens, the cost of a projection is reading the matrix. So weights are widened in registers,
never in memory: compared with float32, bfloat16 reads half, int8 a quarter, int4 an eighth. (Where
a CPU has bfloat16 products, bfloat16 inputs are multiplied by bfloat16 weights directly. Quantized
weights are converted to bfloat16 there: int8 exactly, int4 times its scale to within 2^-9.)

Quantized weights are one format: levels q of 8 bits (int8) or of 4 bits (packed in uint8, q from -8
to 7), with one scale per row or per group of a row's inputs, and perhaps one offset per group:

    w = q * scale - offset

Without offsets nothing is computed for them. 4 bits have groups of a multiple of 32 inputs, 8 bits
of a multiple of 16; a group may be a whole row.

Where the scales of 4 bits are bytes, these are powers of two, and the 4 bits are numbers of e2m1
(`E2M1`): MXFP4 of the OCP Microscaling Formats (2023). There are no offsets then.

Weights may also be packed in strips, the layout of a CPU's dot-product instructions. Strips hold
bfloat16 weights, or quantized weights; for the latter, inputs are rounded to 8 bits and multiplied
as integers. `src.models.weights.methods` produces quantized weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op

INT4_RUN = 32
"""int4: this many weights of a row are packed in 16 bytes; the first half is in the low nibbles."""

SMALLEST_GROUP = 16
"""int8: a group has a multiple of this many inputs (int4: of `INT4_RUN`)."""

LARGEST_UNIT = 64
"""Quantized weights in strips: at most this many inputs of a token share one scale."""

FLOAT8 = torch.float8_e4m3fn
"""The dtype of weights that are 8-bit floating point numbers."""

E2M1 = tuple(s * m for s in (1.0, -1.0) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The numbers of 4 bits: one of the sign, two of the exponent, one of the mantissa."""

STRIP = 64
"""Rows of a strip."""

_OF_STRIPS = (torch.int8, torch.uint8, torch.bfloat16)
_SIGN = -128  # XOR with it maps an int8 value to the bits of value + 128, unsigned.
_LOW_HALVES = 0x0F0F0F0F
_NOTHING = 2.0**-100  # Smaller magnitudes are rounded to zero: their inverse would overflow.


def fits_strips(weight: Tensor, *, in_groups: bool = False) -> bool:
    """Whether a matrix of this shape and dtype (uint8 for packed int4) can be packed in strips.

    Parameters
        in_groups: Whether int8 has a scale per group, not one per row; int4 always has.
    """
    rows, columns = weight.shape
    if weight.dtype == torch.int8 and not in_groups:
        return columns % LARGEST_UNIT == 0
    whole = weight.dtype != torch.bfloat16 or columns % 2 == 0
    return weight.dtype in _OF_STRIPS and whole and rows % STRIP == 0


def to_strips(weight: Tensor) -> Tensor:
    """Pack bfloat16 weights for dot products of input pairs: see [`linear`][src.ops.linear.linear].

    A strip interleaves `STRIP` rows: for each pair of inputs, the pairs of all rows are adjacent.

    Parameters
        weight: [N, K] bfloat16, N a multiple of `STRIP`, K even.

    Returns
        [S, K / 2, 128] bfloat16 of S strips.

    Raises
        ValueError: N, K or the dtype does not fit.
    """
    _require_fit(weight)
    return _in_strips(weight)


def to_quantized_strips(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Pack quantized weights for integer dot products: see [`linear`][src.ops.linear.linear].

    A strip interleaves `STRIP` rows: for every four inputs (int4: eight), the weights of all rows
    are adjacent. The last strip of int8 is padded with zeros.

    Parameters
        weight: As in `dequantize`: [N, K] int8, or [N, K / 2] uint8 of packed int4. N is a multiple
            of `STRIP`; for int8 with a scale per row K is one of `LARGEST_UNIT` instead.
        scales: Of these weights.

    Returns
        int8: [S, K / 4, 256] int8 of S strips, with the bits of value + 128 as unsigned, and
        `scales`, if they are of rows, unchanged. int4: [S, K / 8, 256] uint8. Scales of groups are
        those of `groups_in_strips`.

    Raises
        ValueError: N or K does not fit.
    """
    in_groups = scales.dim() == 2
    _require_fit(weight, in_groups=in_groups)
    rows = weight.shape[0]
    laid_out = groups_in_strips(scales) if in_groups else scales
    if weight.is_meta:
        # Arithmetic on such tensors would import torch's compilers: seconds of a start.
        return weight.new_empty(-(-rows // STRIP), weight.shape[1] // 4, 4 * STRIP), laid_out
    if weight.dtype == torch.int8:
        weight = functional.pad(weight, (0, 0, 0, -rows % STRIP))
        return _in_strips(weight ^ _SIGN), laid_out
    return _in_strips(_in_eights(weight)), laid_out


def _in_eights(packed: Tensor) -> Tensor:
    """Levels as `pack_int4` has them, with those of every eight inputs in four bytes instead.

    The first four are in the low halves. Works on words of four bytes: loading a model does this.
    """
    words = packed.view(torch.int32).view(len(packed), -1, INT4_RUN // 16, 2)
    first, second = words[..., 0], words[..., 1]
    eights = torch.empty_like(words.flatten(2))  # [N, K / 32, 4]
    low, high = eights[..., :2], eights[..., 2:]
    torch.bitwise_and(first, _LOW_HALVES, out=low).bitwise_or_((second & _LOW_HALVES) << 4)
    torch.bitwise_and(first >> 4, _LOW_HALVES, out=high).bitwise_or_(second & ~_LOW_HALVES)
    return eights.view(torch.uint8).view(len(packed), -1)


def groups_in_strips(scales: Tensor) -> Tensor:
    """Scales or offsets of groups, [N, G], as strips have them: [S, G, STRIP]."""
    return scales.view(-1, STRIP, scales.shape[1]).transpose(1, 2).contiguous()


def pack_int4(levels: Tensor) -> Tensor:
    """Pack levels 0 to 15, [N, K] uint8, in rows: [N, K / 2] (see `INT4_RUN`)."""
    if levels.is_meta:  # as in `to_quantized_strips`
        return levels.new_empty(len(levels), levels.shape[1] // 2)
    runs = levels.view(len(levels), -1, 2, INT4_RUN // 2)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).view(len(levels), -1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    runs = packed.view(len(packed), -1, INT4_RUN // 2)  # [N, K / 32, 16]
    return torch.cat((runs & 15, runs >> 4), dim=2).view(len(packed), -1)


def _require_fit(weight: Tensor, *, in_groups: bool = False) -> None:
    if not fits_strips(weight, in_groups=in_groups):
        raise ValueError(f"{tuple(weight.shape)} of {weight.dtype} cannot be cut into strips")


def _in_strips(weight: Tensor) -> Tensor:
    words = weight.view(torch.int32).view(-1, STRIP, weight.shape[1] * weight.element_size() // 4)
    return words.transpose(1, 2).contiguous().view(weight.dtype)


def in_rows(weight: Tensor) -> Tensor:
    """Weights in strips as rows; of 8 bits as they are stored, unsigned."""
    words = weight.view(torch.int32).transpose(1, 2).contiguous()  # [S, STRIP, slices]
    return words.view(weight.dtype).view(weight.shape[0] * STRIP, -1)


def _values_of(weight: Tensor, scales: Tensor) -> tuple[Tensor, int]:
    """Quantized values [N, K] (as stored; uint8 for int4), and what has to be taken from them."""
    if weight.dtype == FLOAT8:
        return weight, 0
    if weight.dtype == torch.int8:
        if weight.dim() == 2:
            return weight, 0
        rows = in_rows(weight) ^ _SIGN
        return rows[: num_outputs(weight, scales)], 0
    if weight.dim() == 2:
        return unpack_int4(weight), 8
    rows = in_rows(weight)
    eights = rows.view(len(rows), -1, 4)  # [N, K / 8, 4]
    return torch.cat((eights & 15, eights >> 4), dim=2).view(len(rows), -1), 8


def is_e2m1(scales: Tensor) -> bool:
    """Whether weights of 4 bits with these scales are numbers of e2m1, and not levels."""
    return scales.dtype == torch.uint8


def powers_of_two(exponents: Tensor) -> Tensor:
    """`2 ** (exponent - 127)` of bytes, in float32; infinite for 255."""
    # Of a float whose bits are an exponent alone; the least is a number below those.
    return (exponents.int() << 23).clamp_(min=1 << 22).view(torch.float32)


def _e2m1_values(weight: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.tensor(E2M1, device=weight.device)
    codes = unpack_int4(weight)
    groups = numbers[codes.int()].view(len(codes), scales.shape[1], -1)
    return groups.mul_(powers_of_two(scales)[:, :, None]).view(len(codes), -1)


def _by_row(scales: Tensor) -> Tensor:
    """Scales or offsets of groups, [N, G], of rows or strips."""
    return scales if scales.dim() == 2 else scales.transpose(1, 2).reshape(-1, scales.shape[1])


def dequantize(weight: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The matrix that quantized weights represent, float32 [N, K]: `q * scale - offset`.

    Parameters
        weight: [N, K] int8 or float8_e4m3fn, or [N, K / 2] uint8 of packed int4, which stores
            q + 8 (see `pack_int4`); or integers in strips (see `to_quantized_strips`).
        scales: float32 [N] for rows of 8 bits; float32 or bfloat16 [N, G] for groups of K / G
            inputs, which int4 always has; in strips, as `to_quantized_strips` returns them. Or
            uint8 [N, G], powers of two of packed e2m1.
        offsets: Of groups, in the shape and dtype of `scales`; None for zeros.
    """
    if is_e2m1(scales):
        return _e2m1_values(weight, scales)
    values, middle = _values_of(weight, scales)
    # In place: until the kernels are built, every step dequantizes all weights here.
    if scales.dim() == 1:
        return values.float().mul_(scales[:, None])
    scales = _by_row(scales)
    groups = values.view(len(values), scales.shape[1], -1).float().sub_(middle)
    groups.mul_(scales[:, :, None].float())
    if offsets is not None:
        groups.sub_(_by_row(offsets)[:, :, None].float())
    return groups.view(len(values), -1)


def round_inputs(x: Tensor, unit: int) -> Tensor:
    """Round inputs [T, K] to 8 bits and return the rounded values as float32.

    Each `unit` inputs of a token become integers from -127 to 127 times one scale. The scale is
    their largest magnitude divided by 127.

    Raises
        ValueError: K is not a multiple of `unit`.
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


def reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """See [`linear`][src.ops.linear.linear]."""
    if scales is None:
        return functional.linear(x, weight if weight.dim() == 2 else in_rows(weight), bias)
    inputs = x.float()
    if weight.dim() == 3:
        inputs = round_inputs(x, rounding_unit(weight, scales))
    wide = None if bias is None else bias.float()
    return functional.linear(inputs, dequantize(weight, scales, offsets), wide).to(x.dtype)


def rounding_unit(weight: Tensor, scales: Tensor) -> int:
    """How many inputs share one scale when they meet quantized weights in strips.

    `LARGEST_UNIT`, or 32 or 16 where groups are no multiple of more.
    """
    if scales.dim() == 1:
        return LARGEST_UNIT
    group = weight.shape[1] * (4 if weight.dtype == torch.int8 else 8) // scales.shape[1]
    return math.gcd(group, LARGEST_UNIT)


def num_outputs(weight: Tensor, scales: Tensor | None) -> int:
    """N of weights as in [`linear`][src.ops.linear.linear]: [N, ...] or in strips."""
    if weight.dim() == 2:
        return weight.shape[0]
    if scales is None or scales.dim() == 3:
        return weight.shape[0] * STRIP
    return scales.shape[0]


def _fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], num_outputs(weight, scales)))


_STRIPS_OF = "strips of "
_WITH = " with "
_OFFSETS = {"offsets": torch.float32, "bfloat16 offsets": torch.bfloat16}


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
    """Random arguments; `weight` is `same` (as x), `int8`, `float8`, or one of these, int4 or e2m1
    `/<group>`.

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
        _, rows, scales, _, *offsets = _build(
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


def _cost(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None = None,
) -> Cost:
    tokens, inputs = x.shape
    outputs = num_outputs(weight, scales)
    moved = (
        weight.nbytes
        + (0 if scales is None else scales.nbytes)
        + (0 if offsets is None else offsets.nbytes)
        + x.element_size() * tokens * (inputs + outputs)
    )
    return Cost(bytes=moved, flops=2 * tokens * inputs * outputs)


LINEAR = Op(
    # Code that is compiled ahead of time calls the op by a C name derived from this one. It shares
    # a namespace with torch's own ops, where "linear" is taken.
    "streamed_linear",
    "(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor? offsets=None) -> Tensor",
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
    lazy={"cuda": "src.ops.triton.linear:run"},
)


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once.

    With quantized weights in strips, x is rounded to 8 bits
    ([`round_inputs`][src.ops.linear.round_inputs]) and multiplied as integers;
    [`rounding_unit`][src.ops.linear.rounding_unit] says how many inputs of a token share one scale.

    The compiled CPU kernel sums along the inputs in one fixed order, so a token's result has the
    same bits alone and in any batch.

    Parameters
        x: [T, K] float32, bfloat16 or float16, last dimension contiguous.
        weight: [N, K] in x's dtype; [N, K] int8 or float8_e4m3fn; or [N, K / 2] uint8 of packed
            int4. Contiguous.
            Or packed in strips ([`to_strips`][src.ops.linear.to_strips],
            [`to_quantized_strips`][src.ops.linear.to_quantized_strips]).
        scales: Scales of quantized weights, see [`dequantize`][src.ops.linear.dequantize]; None if
            the weights are not quantized.
        bias: [N] in x's dtype; None for no bias.
        offsets: Offsets of quantized weights' groups, in the shape of `scales`; None for none.

    Returns
        [T, N] in x's dtype.
    """
    result: Tensor = LINEAR.overload(x, weight, scales, bias, offsets)
    return result
