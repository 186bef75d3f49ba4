"""Linear methods: the formats of a projection's weights, and how each format multiplies.

A method knows which tensors a checkpoint stores for a matrix, and makes a *weight* from them: a
tensor, or a named tuple of tensors with its own `multiply`. Models never refer to a method: they
call `layers.linear`.

Two methods round weights at load: int8 by row, symmetric, and int4 by group, with an offset
(`rounding`). Norms, biases and the embedding keep the model's dtype. So do activations, unless
weights are laid out in strips: then a projection rounds its inputs to 8 bits and multiplies
integers. Rounding to evenly spaced values needs no calibration data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from src import ops
from src.models.weights.checkpoint import StoredTensor
from src.models.weights.parameters import WEIGHT, Index, Parameter, RowPacking, allocate_unset
from src.models.weights.rounding import round_to_int4, round_to_int8
from src.ops.cpu.build import kernel_library
from src.ops.cpu.kernel_library import DTYPES
from src.ops.linear import (
    INT4_RUN,
    SMALLEST_GROUP,
    dequantize,
    fits_strips,
    groups_in_strips,
    pack_int4,
    to_quantized_strips,
)

Method = Literal["int8", "int4"]

_ROWS_AT_ONCE = 1024  # rows quantized at a time, so that what is computed of them stays small


class QuantizedWeight(NamedTuple):
    """A quantized matrix [N, K]: levels q of 8 or 4 bits, `w = q * scale - offset`.

    Tensors have the shapes below, or those that `to_quantized_strips` makes. `grouped` makes one
    from the levels of any checkpoint's format.
    """

    values: torch.Tensor  # int8 [N, K], or uint8 [N, K / 2] of packed q + 8 (`pack_int4`)
    # float32 [N]; or float32 or bfloat16 [N, G] of groups of K / G inputs. Or uint8 [N, G]: powers
    # of two, of values that are numbers of e2m1 and no levels.
    scales: torch.Tensor
    offsets: torch.Tensor | None = None  # [N, G] of the same dtype, or None for zeros

    @classmethod
    def grouped(
        cls,
        levels: torch.Tensor,
        bits: int,
        scales: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        in_strips: bool = False,
    ) -> QuantizedWeight:
        """Pack levels as a checkpoint has them: `w = level * scale - offset`, exactly.

        Unsigned levels (0 to 2^bits - 1) are moved to the middle of their range, and offsets with
        them; offsets of zero are dropped. So an offset is `zero * scale` where a format has zero
        points (GPTQ, AWQ), and minus the minimum where it has minima (GGUF). 4 bits are packed
        where groups are a multiple of 32 inputs. Everything else is held in 8 bits.

        On the meta device, where values are not known, offsets are never dropped: where a format is
        symmetric, give signed levels and no offsets.

        Args:
            levels: [N, K], uint8 (unsigned levels) or int8 (signed ones).
            bits: of a level, 2 to 8. Levels are in the range of so many bits.
            scales: [N, G] of any float dtype, or [N].
            offsets: [N, G] likewise, or None.
            in_strips: whether to lay it out in strips for integer products, which round inputs to
                8 bits; see `to_quantized_strips`. Matrices that cannot be cut into strips stay in
                rows.

        Raises:
            ValueError: K is not a multiple of 32, or groups are no multiple of 16 inputs.
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
        if bits <= 4 and inputs // groups % INT4_RUN == 0:
            from_zero = levels if levels.is_meta else levels + 8
            values = pack_int4(from_zero.view(torch.uint8))
        else:
            values = levels.contiguous()
            if groups == 1 and shift is None:
                scales = scales.squeeze(1)
        return cls(values, scales.contiguous(), shift)._laid_out(in_strips=in_strips)

    @classmethod
    def packed(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        *,
        in_strips: bool = False,
    ) -> QuantizedWeight:
        """Take tensors that are packed as the class has them; ``in_strips`` as of `grouped`."""
        return cls(values, scales, offsets)._laid_out(in_strips=in_strips)

    def _laid_out(self, *, in_strips: bool) -> QuantizedWeight:
        """In strips if that is asked for and possible."""
        values, scales, offsets = self
        if not (in_strips and fits_strips(values, in_groups=scales.dim() == 2)):
            return self
        shift = None if offsets is None else groups_in_strips(offsets)
        return QuantizedWeight(*to_quantized_strips(values, scales), shift)

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and offsets."""
        shift = 0 if self.offsets is None else self.offsets.nbytes
        return self.values.nbytes + self.scales.nbytes + shift

    def dequantized(self) -> torch.Tensor:
        """The matrix in float32, [N, K]."""
        return dequantize(self.values, self.scales, self.offsets)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""
        return ops.linear(x, self.values, self.scales, bias, self.offsets)


class PackedParameter(Protocol):
    """A named tuple of tensors, or None, that stand for a parameter."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""

    def __iter__(self) -> Iterator[Any]:
        """Its fields."""

    def _asdict(self) -> dict[str, Any]:
        """Its fields by name."""

    def dequantized(self) -> Tensor:
        """The parameter in float32, in its shape."""


class PackedWeight(PackedParameter, Protocol):
    """One that stands for a matrix [N, K]."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [T, K] to [T, N] in x's dtype."""


Weight: TypeAlias = torch.Tensor | PackedWeight
Kept: TypeAlias = torch.Tensor | PackedParameter


class LinearMethod(Protocol):
    """A format of weights, for one parameter."""

    @property
    def name(self) -> str:
        """The method's name in errors and logs."""

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Allocate the parts of a matrix [N, K], into which its placements are read.

        They are a plain ``weight``, or what `parameters.RowPacking.rows` returns.
        """

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """The view of ``part``, which has ``kind``, for the matrix's rows at ``index``."""

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix of these values, rounded to the format: for dummy weights."""

    def make(self, parts: Mapping[str, Tensor]) -> Kept:
        """Make the weight; on the meta device its shapes only.

        Raises:
            ValueError: this matrix cannot be held in this format.
        """


@dataclass(frozen=True, slots=True)
class RoundingMethod:
    """Rounds a checkpoint's own weights to few bits.

    Attributes
    ----------
    rounds_inputs
        Whether to lay weights out in strips for integer products, with inputs rounded to 8 bits,
        see `to_quantized_strips`. Matrices that cannot be cut into strips stay in rows.
    """

    method: Method
    group_size: int
    rounds_inputs: bool

    @property
    def name(self) -> str:
        """See `LinearMethod`."""
        return f"quantization = {self.method!r}"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        return {WEIGHT: allocate_unset(shape, dtype, device)}

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `LinearMethod`."""
        return part[index] if index else part

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `LinearMethod`."""
        return {WEIGHT: values}

    def make(self, parts: Mapping[str, Tensor]) -> Weight:
        """See `LinearMethod`."""
        return quantize(parts[WEIGHT], self.method, self.group_size, in_strips=self.rounds_inputs)


@runtime_checkable
class HeldPacking(RowPacking, Protocol):
    """A form that a family gives its parameters, and that a weight can hold.

    All placements of such a parameter have this form, and transforms that only move rows.
    """

    def method(self) -> LinearMethod:
        """What holds a parameter in this form."""


class Held(NamedTuple):
    """How a parameter is held: with what is packed in its placements, and by which method.

    Without a method it is a plain tensor of the parameter's dtype, and packed values are decoded.
    """

    parameter: Parameter
    method: LinearMethod | None


class Formats(Protocol):
    """Chooses how each parameter is held, by its kind and by its tensors in the checkpoint."""

    @property
    def name(self) -> str | None:
        """The formats' name in logs; None if every parameter is plain."""

    def hold(self, parameter: Parameter, world_size: int) -> Held:
        """How a parameter is held. Its shape is of one rank out of ``world_size``.

        A parameter without placements is a tied head: it gets the values of the embedding if there
        is a method, and is the embedding itself if there is none.

        Raises:
            ValueError: it cannot be held, or cannot be cut into so many parts.
        """


class StoredFormats(Formats, Protocol):
    """Formats that a checkpoint has by itself."""

    @property
    def name(self) -> str:
        """See `Formats`."""

    def opened(self, stored: Mapping[str, StoredTensor]) -> StoredFormats:
        """The same with knowledge of the checkpoint's tensors."""

    def rounding(self, *, inputs: bool) -> StoredFormats:
        """The same, with inputs rounded to 8 bits where weights are few bits, or as they are."""


@dataclass(frozen=True, slots=True)
class ByKind:
    """The method per kind of parameter; None: a plain tensor of the parameter's dtype.

    Experts that a checkpoint packs in a form with a method of its own are held by that.
    """

    matrix: LinearMethod | None = None
    head: LinearMethod | None = None
    name: str | None = None

    def hold(self, parameter: Parameter, world_size: int) -> Held:
        """See `Formats`."""
        method = {"matrix": self.matrix, "head": self.head}.get(parameter.kind)
        packing = parameter.placements[0].packing if parameter.placements else None
        if isinstance(packing, HeldPacking):
            method = packing.method()
        return Held(parameter, method)


# Name in the configuration -> function of group size and whether inputs are rounded. The head
# always has 8 bits, because its errors go directly into the logits.
_FORMATS: dict[str, Callable[[int, bool], Formats]] = {
    "int8": lambda group, rounds: ByKind(
        RoundingMethod("int8", group, rounds), RoundingMethod("int8", group, rounds), "int8"
    ),
    "int4": lambda group, rounds: ByKind(
        RoundingMethod("int4", group, rounds), RoundingMethod("int8", group, rounds), "int4"
    ),
}


def formats_of(name: str | None, group_size: int, *, rounds_inputs: bool) -> Formats:
    """The formats that ``model.quantization`` asks for."""
    return ByKind() if name is None else _FORMATS[name](group_size, rounds_inputs)


def _signed(
    levels: torch.Tensor, bits: int, scales: torch.Tensor, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned levels around the middle of their range, and the offsets that this needs."""
    if levels.is_meta:
        # Arithmetic on such tensors would import torch's compilers: seconds of a start.
        return levels.view(torch.int8), scales
    middle = 2 ** (bits - 1)
    moved = scales * -middle
    # Wraps below zero, as it should.
    return (levels - middle).view(torch.int8), moved if offsets is None else offsets + moved


def largest_of(scales: torch.Tensor) -> torch.Tensor:
    """The largest of a matrix's static scales of its inputs, [1, 1]."""
    return (scales[:1] if scales.is_meta else scales.amax()).reshape(1, 1)


def plain(weight: Kept) -> torch.Tensor:
    """The weight as a tensor.

    Raises:
        TypeError: it is quantized.
    """
    if not isinstance(weight, Tensor):
        raise TypeError("expected a weight in the model's dtype, got a quantized one")
    return weight


def quantize(
    weight: torch.Tensor, method: Method, group_size: int, *, in_strips: bool = False
) -> QuantizedWeight:
    """Quantize a matrix [N, K] of any float dtype.

    Args:
        weight: finite values.
        method: `int8` has one scale per row and values -127 to 127; `int4` has values -8 to 7, and
            a scale and an offset, in bfloat16, per `group_size` values of a row.
        group_size: of int4; a multiple of 32 that divides K.
        in_strips: whether to lay it out in strips for integer products, see
            `to_quantized_strips`. Matrices that cannot be cut into strips stay in rows.

    Raises:
        ValueError: K is not a multiple of 32, or for int4 not of the group size.
    """
    inputs = weight.shape[1]
    unit = group_size if method == "int4" else INT4_RUN
    if inputs % unit or unit % INT4_RUN:
        raise ValueError(f"rows of {inputs} weights cannot be cut into groups of {unit}")
    if weight.is_meta:
        return _outlined(weight, method, unit, in_strips=in_strips)
    library = kernel_library()
    if library is not None and weight.is_cpu and weight.dtype in DTYPES:
        kind = torch.int8 if method == "int8" else torch.uint8
        return QuantizedWeight(
            *library.quantize(weight.contiguous(), kind, unit, in_strips=in_strips)
        )
    parts: list[tuple[Tensor, ...]] = [
        round_to_int8(rows.float()) if method == "int8" else round_to_int4(rows.float(), unit)
        for rows in weight.split(_ROWS_AT_ONCE)
    ]
    rounded = QuantizedWeight(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return rounded._laid_out(in_strips=in_strips)


def _outlined(
    weight: torch.Tensor, method: Method, group_size: int, *, in_strips: bool
) -> QuantizedWeight:
    """The shapes only. Running the operations on meta tensors would take a second per start."""
    (rows, inputs), is_int8 = weight.shape, method == "int8"
    values = torch.empty(
        *(rows, inputs if is_int8 else inputs // 2),
        dtype=torch.int8 if is_int8 else torch.uint8,
        device="meta",
    )
    if is_int8:
        outline = QuantizedWeight(values, torch.empty(rows, device="meta"))
    else:
        groups = (rows, inputs // group_size)
        scales = torch.empty(groups, dtype=torch.bfloat16, device="meta")
        outline = QuantizedWeight(values, scales, scales.new_empty(groups))
    return outline._laid_out(in_strips=in_strips)
