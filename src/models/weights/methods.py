"""How a parameter's value is made: from plain weights that are rounded, or from what is stored.

Models never refer to a method: they call `layers.linear`. Norms, biases and the embedding keep the
model's dtype. So do activations, unless weights are laid out in tiles (then a projection rounds its
inputs to 8 bits and multiplies integers), or a checkpoint's format rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from src.models.weights.parameters import (
    WEIGHT,
    Index,
    Method,
    Parameter,
    RowPacking,
    Value,
    allocate_unset,
)
from src.ops.matrix import Encoding, Matrix
from src.ops.projections import rounding
from src.ops.projections.projection import InputRounding, Projection, Scaled

VALUES: Final = "values"
SCALES: Final = "scales"
OFFSETS: Final = "offsets"
ORDER: Final = "order"
INPUT_SCALE: Final = "input_scale"

_DUMMY_INPUT_SCALE = 0.05


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounds a checkpoint's own weights to few bits; see `parameters.Method`.

    Rounding to evenly spaced values needs no calibration data.

    Attributes
    ----------
    tiled
        Whether to lay weights out in tiles for integer products, with inputs rounded to 8 bits.
        Matrices that cannot be cut into tiles stay in rows.
    """

    number: rounding.Method
    group_size: int
    tiled: bool

    @property
    def name(self) -> str:
        """See `parameters.Method`."""
        return f"quantization = {self.number!r}"

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `parameters.Method`."""
        return {WEIGHT: allocate_unset(shape, dtype, device)}

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `parameters.Method`."""
        return part[index] if index else part

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `parameters.Method`."""
        return {WEIGHT: values}

    def make(self, parts: Mapping[str, Tensor]) -> Projection:
        """See `parameters.Method`."""
        return Projection(
            rounding.quantize(parts[WEIGHT], self.number, self.group_size, tiled=self.tiled)
        )


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """How a format rounds the inputs of its projections; see `projection.InputRounding`."""

    scaled: Scaled
    number: Literal["int8", "e4m3"]
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Holds a matrix, or a stack of them, as a checkpoint stores it; see `parameters.Method`.

    Attributes
    ----------
    dtype
        Of the parameter if it has to be decoded, because its columns have different orders.
    inputs
        How inputs are rounded; None: not at all. Stacks never round theirs.
    starts
        The first rows of the parts of each matrix that have an order of their columns each. Empty:
        columns have no order.
    tiled
        As of `Rounded`.
    drops_offsets
        Whether offsets that are all zeros are left out.
    """

    name: str
    encoding: Encoding
    dtype: torch.dtype = torch.float32
    inputs: RoundedInputs | None = None
    starts: tuple[int, ...] = ()
    tiled: bool = False
    drops_offsets: bool = False

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """See `parameters.Method`."""
        *count, rows, inputs = shape
        parts = {
            kind: allocate_unset((*count, *of_one), _staged(own), device)
            for kind, (of_one, own) in self.encoding.parts(rows, inputs).items()
        }
        if self._is_static:
            parts[INPUT_SCALE] = allocate_unset((rows, 1), torch.float32, device)
        if self.starts:
            orders = (*count, len(self.starts), inputs)
            parts[ORDER] = torch.zeros(orders, dtype=torch.int32, device=device)
        return parts

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """See `parameters.Method`. Of orders there is one for each part of a matrix."""
        if kind != ORDER:
            return part[index] if index else part
        rows = index[-1] if index and isinstance(index[-1], slice) else slice(None)
        expert = index[:-1] if index and isinstance(index[-1], slice) else index
        return part[(*expert, self.starts.index(rows.start or 0))]

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """See `parameters.Method`. One matrix after the other, since copies are larger."""
        if values.dim() == 3:
            encoded = [self.encode(matrix) for matrix in values]
            return {kind: torch.stack([each[kind] for each in encoded]) for kind in encoded[0]}
        parts = {
            k: part.view(_staged(part.dtype)) for k, part in self.encoding.round(values).items()
        }
        if self._is_static:
            parts[INPUT_SCALE] = torch.full_like(parts[SCALES][:, :1], _DUMMY_INPUT_SCALE)
        if self.starts:
            order = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
            parts[ORDER] = order.repeat(len(self.starts), 1)
        return parts

    def make(self, parts: Mapping[str, Tensor]) -> Value:
        """See `parameters.Method`. Matrices whose columns have different orders are decoded.

        Inputs that several matrices share have the largest of their static scales.
        """
        count = len(parts[VALUES]) if parts[VALUES].dim() == 3 else None
        matrix = self._matrix(
            {kind: part if count is None else part.flatten(0, 1) for kind, part in parts.items()}
        )
        if count is not None:
            matrix = matrix.stacked(count)
        orders = parts.get(ORDER)
        if orders is not None:
            if not orders.is_meta and not (orders == orders[..., :1, :]).all():
                return self._decoded(matrix, orders)
            matrix = matrix._replace(order=orders[..., 0, :].contiguous())
        return matrix if count is not None else Projection(matrix, self._rounding(parts))

    @property
    def _is_static(self) -> bool:
        return self.inputs is not None and self.inputs.scaled == "static"

    def _matrix(self, parts: Mapping[str, Tensor]) -> Matrix:
        """The matrix of parts that are of one, without its order."""
        encoding, offsets = self.encoding, parts.get(OFFSETS)
        if self.drops_offsets and offsets is not None and not offsets.is_meta and not offsets.any():
            encoding, offsets = replace(encoding, has_offsets=False), None
        scales = parts[SCALES].squeeze(1) if encoding.group is None else parts[SCALES]
        values = parts[VALUES].view(encoding.traits.dtype)
        matrix = Matrix(values, encoding, scales, offsets).simplified()
        return matrix.tiled() if self.tiled else matrix

    def _rounding(self, parts: Mapping[str, Tensor]) -> InputRounding | None:
        inputs, scale, bound = self.inputs, None, None
        if inputs is None:
            return None
        if self._is_static:
            given = parts[INPUT_SCALE]
            scale = (given[:1] if given.is_meta else given.amax()).reshape(1, 1)
        if inputs.bound is not None:
            bound = parts[SCALES].new_full((1,), inputs.bound)
        return InputRounding(inputs.scaled, inputs.number, scale, bound)

    def _decoded(self, matrix: Matrix, orders: Tensor) -> Tensor:
        """The values of a matrix or a stack whose parts have orders [..., P, K] of their own."""
        if matrix.is_stack:
            each = zip(range(len(orders)), orders, strict=True)
            return torch.stack([self._decoded(matrix.of(expert), own) for expert, own in each])
        dense = matrix.dequantized()
        decoded = torch.empty(dense.shape, dtype=self.dtype, device=dense.device)
        stops = (*self.starts[1:], len(dense))
        for start, stop, order in zip(self.starts, stops, orders.long(), strict=True):
            decoded[start:stop, order] = dense[start:stop].to(self.dtype)
        return decoded


def _staged(dtype: torch.dtype) -> torch.dtype:
    # As bytes: rows of these are reordered, for which torch has no code of 8-bit floats.
    is_narrow = dtype.is_floating_point and dtype.itemsize == 1
    return torch.uint8 if is_narrow else dtype


@runtime_checkable
class StoredPacking(RowPacking, Protocol):
    """A form that a family gives its parameters, and that a matrix can have.

    All placements of such a parameter have this form, and transforms that only move rows.
    """

    def method(self) -> Method:
        """What holds a parameter in this form."""


class Formats(Protocol):
    """Chooses how each parameter is held, by its kind and by its tensors in the checkpoint."""

    @property
    def name(self) -> str | None:
        """The formats' name in logs; None if every parameter is plain."""

    def hold(self, parameter: Parameter, world_size: int) -> Parameter:
        """The parameter with its method and what is packed. It is of one of ``world_size`` ranks.

        A parameter without placements is a tied head: it gets the values of the embedding if there
        is a method, and is the embedding itself if there is none.

        Raises
        ------
        ValueError
            It cannot be held, or cannot be cut into so many parts.
        """


class StoredFormats(Formats, Protocol):
    """Formats that a checkpoint has by itself."""

    @property
    def name(self) -> str:
        """See `Formats`."""

    def opened(self, stored: Mapping[str, torch.dtype]) -> StoredFormats:
        """The same with knowledge of the checkpoint's tensors: name -> dtype."""

    def rounding(self, *, inputs: bool) -> StoredFormats:
        """The same, with inputs rounded to 8 bits where weights are few bits, or as they are."""


@dataclass(frozen=True, slots=True)
class ByKind:
    """The method per kind of parameter; None: a plain tensor of the parameter's dtype.

    Experts that a checkpoint packs in a form with a method of its own are held by that.
    """

    matrix: Method | None = None
    head: Method | None = None
    name: str | None = None

    def hold(self, parameter: Parameter, world_size: int) -> Parameter:
        """See `Formats`."""
        method = {"matrix": self.matrix, "head": self.head}.get(parameter.kind)
        packing = parameter.placements[0].packing if parameter.placements else None
        if isinstance(packing, StoredPacking):
            method = packing.method()
        return replace(parameter, method=method)


# Name in the configuration -> function of group size and whether inputs are rounded. The head
# always has 8 bits, because its errors go directly into the logits.
_FORMATS: dict[str, Callable[[int, bool], Formats]] = {
    "int8": lambda group, rounds: ByKind(
        Rounded("int8", group, rounds), Rounded("int8", group, rounds), "int8"
    ),
    "int4": lambda group, rounds: ByKind(
        Rounded("int4", group, rounds), Rounded("int8", group, rounds), "int4"
    ),
}


def formats_of(name: str | None, group_size: int, *, rounds_inputs: bool) -> Formats:
    """The formats that ``model.quantization`` asks for."""
    return ByKind() if name is None else _FORMATS[name](group_size, rounds_inputs)


def plain(weight: Value) -> Tensor:
    """The weight as a tensor.

    Raises
    ------
    TypeError
        It is quantized.
    """
    if not isinstance(weight, Tensor):
        raise TypeError("expected a weight in the model's dtype, got a quantized one")
    return weight
