"""A matrix [N, K] as it lies in memory: its numbers, their scales, and what they mean.

An `Encoding` says how numbers and scales stand for values, a `Tiling` in which order the numbers
lie. A `Matrix` has both beside its tensors, so nobody guesses a format from shapes and dtypes.
`NUMBERS` is the one table of what is known of each kind of number: bits, how it is widened and
rounded, by which number kernels know it, and which devices have kernels for it.

With scales a value is ``number * scale - offset``. A scale is of a row, or of a group of a row's
inputs. Offsets are of groups; without them nothing is computed for them.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

INT4_RUN: Final = 32
"""int4: this many weights of a row are packed in 16 bytes; the first half is in the low nibbles."""

SMALLEST_GROUP: Final = 16
"""int8: a group has a multiple of this many inputs (int4: of `INT4_RUN`)."""

FLOAT8: Final = torch.float8_e4m3fn
"""The dtype of weights that are 8-bit floating point numbers."""

E2M1: Final = tuple(s * m for s in (1.0, -1.0) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The numbers of 4 bits: one of the sign, two of the exponent, one of the mantissa."""

STRIP: Final = 64
"""Rows of a tile."""

LARGEST_UNIT: Final = 64
"""Quantized weights in tiles: at most this many inputs of a token share one scale."""

MIDDLE: Final = 8
"""What is stored for the level 0 of 4 bits."""

_LARGEST_FLOAT8: Final = 448.0
_SIGN = -128  # XOR with it maps an int8 value to the bits of value + 128, unsigned.
_LOW_HALVES = 0x0F0F0F0F


class Tiling(enum.Enum):
    """The order in which the numbers of a matrix lie: row by row, or in tiles of `STRIP` rows.

    Tiles are the layout of a CPU's dot-product instructions: see `to_strips` and
    `to_quantized_strips`. Inputs of quantized weights in tiles are rounded to 8 bits.
    """

    ROWS = "rows"
    TILES = "tiles of 64 rows"


def fits_strips(weight: Tensor, *, in_groups: bool = False) -> bool:
    """Whether a matrix of this shape and dtype (uint8 for packed int4) can be packed in tiles.

    Parameters
    ----------
    in_groups
        Whether int8 has a scale per group, not one per row; int4 always has.
    """
    rows, columns = weight.shape
    if weight.dtype == torch.int8 and not in_groups:
        return columns % LARGEST_UNIT == 0
    whole = weight.dtype != torch.bfloat16 or columns % 2 == 0
    return weight.dtype in (torch.int8, torch.uint8, torch.bfloat16) and whole and rows % STRIP == 0


def to_strips(weight: Tensor) -> Tensor:
    """Pack bfloat16 weights for dot products of input pairs: see `linear`.

    A tile interleaves `STRIP` rows: for each pair of inputs, the pairs of all rows are adjacent.

    Parameters
    ----------
    weight
        [N, K] bfloat16, N a multiple of `STRIP`, K even.

    Returns
    -------
    [S, K / 2, 128] bfloat16 of S tiles.

    Raises
    ------
    ValueError
        N, K or the dtype does not fit.
    """
    _require_fit(weight)
    return _in_strips(weight)


def to_quantized_strips(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Pack quantized weights for integer dot products: see `linear`.

    A tile interleaves `STRIP` rows: for every four inputs (int4: eight), the weights of all rows
    are adjacent. The last tile of int8 is padded with zeros.

    Parameters
    ----------
    weight
        [N, K] int8, or [N, K / 2] uint8 of packed int4. N is a multiple of `STRIP`; for int8 with a
        scale per row K is one of `LARGEST_UNIT` instead.
    scales
        Of these weights.

    Returns
    -------
    int8: [S, K / 4, 256] int8 of S tiles, with the bits of value + 128 as unsigned, and `scales`,
    if they are of rows, unchanged. int4: [S, K / 8, 256] uint8. Scales of groups are those of
    `groups_in_strips`.

    Raises
    ------
    ValueError
        N or K does not fit.
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
    """Scales or offsets of groups, [N, G], as tiles have them: [S, G, STRIP]."""
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


def powers_of_two(exponents: Tensor) -> Tensor:
    """`2 ** (exponent - 127)` of bytes, in float32; infinite for 255."""
    # Of a float whose bits are an exponent alone; the least is a number below those.
    return (exponents.int() << 23).clamp_(min=1 << 22).view(torch.float32)


def _require_fit(weight: Tensor, *, in_groups: bool = False) -> None:
    if not fits_strips(weight, in_groups=in_groups):
        raise ValueError(f"{tuple(weight.shape)} of {weight.dtype} cannot be cut into strips")


def _in_strips(weight: Tensor) -> Tensor:
    words = weight.view(torch.int32).view(-1, STRIP, weight.shape[1] * weight.element_size() // 4)
    return words.transpose(1, 2).contiguous().view(weight.dtype)


def from_strips(weight: Tensor) -> Tensor:
    """Tiles as rows, [N, ...], with those that pad the last tile."""
    words = weight.view(torch.int32).transpose(1, 2).contiguous()  # [S, STRIP, slices]
    return words.view(weight.dtype).view(weight.shape[0] * STRIP, -1)


# Widening: (values, tiling) -> the numbers in float32, [N, K], or with the rows of whole tiles.


def _widened(values: Tensor, tiling: Tiling) -> Tensor:
    return (values if tiling is Tiling.ROWS else from_strips(values)).float()


def _widened_int8(values: Tensor, tiling: Tiling) -> Tensor:
    return (values if tiling is Tiling.ROWS else from_strips(values) ^ _SIGN).float()


def _widened_int4(values: Tensor, tiling: Tiling) -> Tensor:
    if tiling is Tiling.ROWS:
        codes = unpack_int4(values)
    else:
        rows = from_strips(values)
        eights = rows.view(len(rows), -1, 4)  # [N, K / 8, 4]
        codes = torch.cat((eights & 15, eights >> 4), dim=2).view(len(rows), -1)
    return codes.float().sub_(MIDDLE)


def _widened_e2m1(values: Tensor, tiling: Tiling) -> Tensor:
    return torch.tensor(E2M1, device=values.device)[unpack_int4(values).int()]


# Rounding: groups float32 [N, G, group] -> values [N, ...] and scales [N, G], without offsets.


def _rounded_levels(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    scales = groups.abs().amax(dim=2).div_(most).clamp_(min=1e-30)
    levels = (groups / scales[..., None]).round_().clamp_(-most, most)
    return levels.to(torch.int8).flatten(1), scales


def _rounded_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    return _rounded_levels(groups, 127)


def _rounded_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    levels, scales = _rounded_levels(groups, 7)
    return pack_int4((levels + MIDDLE).view(torch.uint8)), scales


def _rounded_float8(groups: Tensor) -> tuple[Tensor, Tensor]:
    most = groups.abs().amax(dim=2, keepdim=True)
    scales = torch.where(most == 0, 1.0, most / _LARGEST_FLOAT8)
    values = (groups / scales).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(FLOAT8)
    return values.flatten(1), scales.squeeze(2)


def _rounded_e2m1(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values become multiples of half a power of two."""
    largest = groups.abs().amax(dim=2, keepdim=True)
    # So that the largest is less than 2, where numbers are evenly spaced.
    exponents = largest.clamp_min_(1e-30).log2().floor().clamp_(-126, 126)
    halves = (groups.abs() * torch.exp2(1 - exponents)).round_().clamp_(max=3)
    codes = halves.to(torch.uint8) | ((groups < 0).to(torch.uint8) << 3)
    return pack_int4(codes.flatten(1)), (exponents.squeeze(2) + 127).to(torch.uint8)


def _not_rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    raise TypeError("floating point weights have no scales")


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a CUDA device has a compute capability, or there is none here at all.

    Each device is asked once: launches ask. One without a number is another one from time to time.
    """
    # torch's compiler warns of caches: it looks into what they hold the results of.
    if device.index is None or torch.compiler.is_compiling():
        return _ask_capability(device, least)
    return _has_capability(device, least)


def _ask_capability(device: torch.device, least: tuple[int, int]) -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= least


_has_capability = functools.cache(_ask_capability)


@dataclass(frozen=True, slots=True)
class Number:
    """A kind of number, and everything that depends on it alone.

    Attributes
    ----------
    bits
        Of a number.
    dtype
        Of the tensor that holds them; 4 bits are packed in pairs (`pack_int4`).
    kind
        By which kernels know such numbers in rows.
    tiled_kind
        By which kernels know them in tiles; None: they are never tiled.
    unit
        Groups have a multiple of this many inputs.
    widen
        The numbers of a matrix, in float32.
    round
        Values and scales of groups: float32 [N, G, group] -> [N, ...] and [N, G].
    kernels
        Devices whose `linear` has a kernel for such numbers in rows.
    expert_kernels
        The same of `experts`.
    capability
        Of the first CUDA devices that convert such numbers.
    """

    name: str
    bits: int
    dtype: torch.dtype
    kind: int
    tiled_kind: int | None
    unit: int
    widen: Callable[[Tensor, Tiling], Tensor]
    round: Callable[[Tensor], tuple[Tensor, Tensor]] = _not_rounded
    kernels: frozenset[str] = frozenset({"cpu", "cuda"})
    expert_kernels: frozenset[str] = frozenset({"cpu", "cuda"})
    capability: tuple[int, int] = (0, 0)

    def is_known_to(self, device: torch.device) -> bool:
        """Whether a CUDA device that is there converts such numbers; others do."""
        if self.capability == (0, 0) or device.type != "cuda":
            return True
        return has_capability(device, self.capability)


NUMBERS: Final = {
    number.name: number
    for number in (
        Number("float32", 32, torch.float32, 0, None, 1, _widened),
        Number("bfloat16", 16, torch.bfloat16, 1, 17, 1, _widened),
        Number("float16", 16, torch.float16, 2, None, 1, _widened),
        Number("int8", 8, torch.int8, 8, 9, SMALLEST_GROUP, _widened_int8, _rounded_int8),
        Number("int4", 4, torch.uint8, 4, 5, INT4_RUN, _widened_int4, _rounded_int4),
        Number(
            "e4m3", 8, FLOAT8, 12, None, SMALLEST_GROUP, _widened, _rounded_float8,
            capability=(8, 9),
        ),
        Number(
            "e2m1", 4, torch.uint8, 6, None, INT4_RUN, _widened_e2m1, _rounded_e2m1,
            kernels=frozenset({"cpu"}),
        ),
    )
}  # fmt: skip
"""Name -> what is known of a kind of number."""

KINDS: Final = {number.kind: (number, Tiling.ROWS) for number in NUMBERS.values()} | {
    number.tiled_kind: (number, Tiling.TILES)
    for number in NUMBERS.values()
    if number.tiled_kind is not None
}
"""The number by which kernels know a matrix -> what its values are, and how they lie."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What the numbers of a matrix stand for.

    Attributes
    ----------
    number
        Key of `NUMBERS`.
    group
        Inputs that share a scale. None: a row has one, or there are none.
    scale
        Dtype of scales and offsets; None: there are no scales. uint8: powers of two (see
        `powers_of_two`).
    has_offsets
        Whether groups have offsets.
    """

    number: str
    group: int | None = None
    scale: torch.dtype | None = None
    has_offsets: bool = False

    @property
    def traits(self) -> Number:
        """What is known of its numbers."""
        return NUMBERS[self.number]

    def has_kernel(self, inputs: int, device: torch.device, *, is_stack: bool) -> bool:
        """Whether the device has a kernel for rows of so many inputs, of one matrix or experts.

        What has none is decoded when a model is loaded.
        """
        if self.scale is None:
            return True
        devices = self.traits.expert_kernels if is_stack else self.traits.kernels
        is_known = device.type in devices and self.traits.is_known_to(device)
        is_whole = inputs % INT4_RUN == 0 and (self.group or inputs) % self.traits.unit == 0
        return is_known and is_whole

    def parts(self, rows: int, inputs: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of the tensors of a matrix in rows; one scale of a row is [N, 1]."""
        traits = self.traits
        columns = inputs // 2 if traits.bits == 4 else inputs
        parts = {"values": ((rows, columns), traits.dtype)}
        if self.scale is not None:
            groups = (rows, inputs // (self.group or inputs))
            parts["scales"] = (groups, self.scale)
            if self.has_offsets:
                parts["offsets"] = (groups, self.scale)
        return parts

    def round(self, values: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix [N, K], rounded to this encoding; see `parts`."""
        groups = values.float().unflatten(1, (-1, self.group or values.shape[1]))
        rounded, scales = self.traits.round(groups)
        parts = {"values": rounded, "scales": scales}
        return parts | ({"offsets": torch.zeros_like(scales)} if self.has_offsets else {})

    def __str__(self) -> str:
        """As logs and listings have it."""
        if self.scale is None:
            return self.number
        by = "per row" if self.group is None else f"in groups of {self.group}"
        return f"{self.number} {by}{' with offsets' * self.has_offsets}"


_PLAIN: Final = {
    number.dtype: Encoding(number.name)
    for number in NUMBERS.values()
    if number.round is _not_rounded
}
# Of every call of a projection: a frozen dataclass takes longer to make than to find.
_encoding = functools.cache(Encoding)


class Matrix(NamedTuple):
    """A matrix [N, K], or a stack of E such [E, N, K] whose tensors begin with E.

    Attributes
    ----------
    values
        [N, K], or [N, K / 2] of 4 bits; in tiles as `to_strips` and `to_quantized_strips` return
        them. Contiguous.
    encoding
        What values and scales stand for.
    scales
        Of rows, [N]; of groups, [N, G], in tiles [S, G, STRIP]. None without scales.
    offsets
        Of groups, in the shape and dtype of `scales`; None without offsets.
    order
        int32 [K], which input each column is for; None: column k is for input k.
    tiling
        How values, and scales of groups, lie.
    """

    values: Tensor
    encoding: Encoding
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    tiling: Tiling = Tiling.ROWS

    @classmethod
    def plain(cls, values: Tensor, tiling: Tiling = Tiling.ROWS) -> Matrix:
        """The matrix of floating point weights that have no scales."""
        return cls(values, _PLAIN[values.dtype], tiling=tiling)

    @classmethod
    def of_kind(
        cls, kind: int, values: Tensor, scales: Tensor | None, offsets: Tensor | None = None
    ) -> Matrix:
        """The matrix of an op's arguments; see `KINDS`.

        Raises
        ------
        ValueError
            There is no such kind, its values have another dtype, or its scales are of neither rows
            nor groups, or of floats, which have none.
        """
        if kind not in KINDS or KINDS[kind][0].dtype != values.dtype:
            raise ValueError(f"no matrix of kind {kind} has values of {values.dtype}")
        number, tiling = KINDS[kind]
        if scales is not None and number.round is _not_rounded:
            raise ValueError(f"weights of {number.name} have no scales")
        matrix = cls(values, _encoding(number.name), scales, offsets, None, tiling)
        if scales is None:
            return matrix
        dims, group = scales.dim() - matrix.is_stack, None
        if dims != 1:
            groups = scales.shape[-1 if dims == 2 else -2] if dims > 1 else 0
            if not groups:
                raise ValueError(f"scales {tuple(scales.shape)} are of neither rows nor groups")
            group = matrix.inputs // groups
        # While shapes are traced, a size may be a symbol, which has no hash.
        made = _encoding if group is None or isinstance(group, int) else Encoding
        encoding = made(number.name, group, scales.dtype, offsets is not None)
        return matrix._replace(encoding=encoding)

    @property
    def kind(self) -> int:
        """The number by which kernels know its values."""
        traits = self.encoding.traits
        kind = traits.kind if self.tiling is Tiling.ROWS else traits.tiled_kind
        assert kind is not None, f"{self.encoding} is never tiled"
        return kind

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.values.dim() > (2 if self.tiling is Tiling.ROWS else 3)

    @property
    def inputs(self) -> int:
        """K."""
        bits = self.encoding.traits.bits
        if self.tiling is Tiling.TILES:
            return self.values.shape[-2] * (32 // bits)
        return self.values.shape[-1] * (2 if bits == 4 else 1)

    @property
    def outputs(self) -> int:
        """N."""
        if self.tiling is Tiling.ROWS:
            return self.values.shape[-2]
        if self.scales is None or self.encoding.group is not None:
            return self.values.shape[-3] * STRIP
        return self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (E, N, K) of a stack, whatever its encoding and tiling."""
        stacked = self.values.shape[:1] if self.is_stack else ()
        return (*stacked, self.outputs, self.inputs)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.encoding.group or self.inputs

    @property
    def rounding_unit(self) -> int:
        """How many inputs of a token share one scale, when they meet these tiles.

        `LARGEST_UNIT`, or 32 or 16 where groups are no multiple of more.
        """
        return math.gcd(self.encoding.group or LARGEST_UNIT, LARGEST_UNIT)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {name: each for name, each in self._asdict().items() if isinstance(each, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in self.tensors().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> Matrix:
        """The same matrix with a function of each tensor in its place."""
        changed: dict[str, Any] = {name: function(own) for name, own in self.tensors().items()}
        return self._replace(**changed)

    def of(self, expert: int) -> Matrix:
        """One matrix of a stack."""
        return self.map(lambda each: each[expert])

    def stacked(self, count: int) -> Matrix:
        """The stack of `count` matrices that lie below each other in this one."""
        return self.map(lambda each: each.unflatten(0, (count, -1)))

    def simplified(self) -> Matrix:
        """The same matrix with a scale per row, if it is int8 with one group and no offsets."""
        scales = self.scales
        if self.encoding.number != "int8" or self.offsets is not None or scales is None:
            return self
        if scales.dim() == 1 or scales.shape[1] != 1:
            return self
        return self._replace(scales=scales.squeeze(1), encoding=replace(self.encoding, group=None))

    def tiled(self) -> Matrix:
        """The same matrix, or stack, in tiles; as it is if it cannot be cut into them."""
        assert self.tiling is Tiling.ROWS
        if self.scales is None:
            if self.values.dtype != torch.bfloat16 or not fits_strips(self.values):
                return self
            return self._replace(values=to_strips(self.values), tiling=Tiling.TILES)
        if self.encoding.traits.tiled_kind is None or not fits_strips(
            self.values, in_groups=self.encoding.group is not None
        ):
            return self
        values, scales = to_quantized_strips(self.values, self.scales)
        offsets = None if self.offsets is None else groups_in_strips(self.offsets)
        return self._replace(values=values, scales=scales, offsets=offsets, tiling=Tiling.TILES)

    def dequantized(self) -> Tensor:
        """Its values in float32, [N, K] or [E, N, K], with columns in the order of inputs."""
        if self.is_stack:
            return torch.stack(
                [self.of(expert).dequantized() for expert in range(len(self.values))]
            )
        numbers = self.encoding.traits.widen(self.values, self.tiling)[: self.outputs]
        if self.scales is not None:
            # In place: until the kernels are built, every step dequantizes all weights here.
            groups = numbers.view(len(numbers), self.inputs // self.group, self.group)
            groups.mul_(self._factors(self.scales))
            if self.offsets is not None:
                groups.sub_(self._factors(self.offsets))
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order.long(), numbers)

    def _factors(self, scales: Tensor) -> Tensor:
        """Scales or offsets in float32, [N, G, 1]."""
        if self.encoding.group is None:
            return scales[:, None, None]
        if self.tiling is Tiling.TILES:
            scales = scales.transpose(1, 2).reshape(-1, scales.shape[1])
        wide = powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
        return wide[:, :, None]


Operand: TypeAlias = "Tensor | Matrix"
"""What an op multiplies by. A tensor stands for plain weights in rows, see `Matrix.plain`."""


def as_matrix(weight: Operand) -> Matrix:
    """The matrix that an operand is."""
    return Matrix.plain(weight) if isinstance(weight, Tensor) else weight


def of_levels(
    levels: Tensor,
    bits: int,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    tiled: bool = False,
) -> Matrix:
    """Pack levels as a checkpoint has them: `w = level * scale - offset`, exactly.

    Unsigned levels (0 to 2^bits - 1) are moved to the middle of their range, and offsets with
    them; offsets of zero are dropped. So an offset is `zero * scale` where a format has zero
    points (GPTQ, AWQ), and minus the minimum where it has minima (GGUF). 4 bits are packed where
    groups are a multiple of 32 inputs. Everything else is held in 8 bits.

    On the meta device, where values are not known, offsets are never dropped: where a format is
    symmetric, give signed levels and no offsets.

    Parameters
    ----------
    levels
        [N, K], uint8 (unsigned levels) or int8 (signed ones).
    bits
        Of a level, 2 to 8. Levels are in the range of so many bits.
    scales
        [N, G] of any float dtype, or [N].
    offsets
        [N, G] likewise, or None.
    tiled
        Whether to lay it out in tiles for integer products, if it can be cut into them.

    Raises
    ------
    ValueError
        K is not a multiple of 32, or groups are no multiple of 16 inputs.
    """
    rows, inputs = levels.shape
    scales = scales.float().reshape(rows, -1)
    groups = scales.shape[1]
    if inputs % INT4_RUN or groups == 0 or inputs % (groups * SMALLEST_GROUP):
        raise ValueError(f"rows of {inputs} weights cannot be cut into {groups} groups")
    shift = None if offsets is None else offsets.float().reshape(rows, groups)
    if levels.dtype == torch.uint8:
        levels, shift = _signed(levels, bits, scales, shift)
    if shift is not None and not shift.is_meta and not shift.any():
        shift = None
    encoding = Encoding("int8", inputs // groups, torch.float32, shift is not None)
    if bits <= 4 and inputs // groups % INT4_RUN == 0:
        encoding = replace(encoding, number="int4")
        levels = pack_int4((levels if levels.is_meta else levels + MIDDLE).view(torch.uint8))
    matrix = Matrix(levels.contiguous(), encoding, scales.contiguous(), shift).simplified()
    return matrix.tiled() if tiled else matrix


def _signed(
    levels: Tensor, bits: int, scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unsigned levels around the middle of their range, and the offsets that this needs."""
    if levels.is_meta:
        # Arithmetic on such tensors would import torch's compilers: seconds of a start.
        return levels.view(torch.int8), scales
    middle = 2 ** (bits - 1)
    moved = scales * -middle
    # Wraps below zero, as it should.
    return (levels - middle).view(torch.int8), moved if offsets is None else offsets + moved
