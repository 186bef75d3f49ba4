"""Holds the matrices of a GGUF file in the precision that the file has, with no second rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from src.core.gguf import TYPES_BY_NAME
from src.models.gguf.types import BLOCK_TYPES, BlockType, decode, require_finite
from src.models.weights.methods import OFFSETS, SCALES, VALUES, Stored
from src.models.weights.parameters import NUMBERS, WEIGHT, Parameter, Placement, StoredForm
from src.models.weights.transforms import InHalves, PartByPart
from src.ops.matrix import INT4_RUN, MIDDLE, STRIP, Encoding, pack_int4

# Transforms that do no more than move rows.
_OF_ROWS: Final = (InHalves, PartByPart)
_VALUES_AT_ONCE: Final = 2**17  # decoded at a time, so that their float32 copy stays in caches


def _common(kinds: Sequence[BlockType]) -> Encoding:
    """The encoding in which matrices of these types can lie below each other, each exactly."""
    group = math.gcd(*(kind.group for kind in kinds))
    number = "int4" if max(kind.bits for kind in kinds) == 4 else "int8"
    has_offsets = any(kind.has_offsets for kind in kinds)
    return Encoding(number, group, torch.float32, has_offsets)


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """A matrix [N, K] as rows of blocks; see `parameters.RowPacking`.

    Attributes
    ----------
    kind
        Name of the type.
    encoding
        Of the matrix that holds it.
    dtype
        Of values that are decoded.
    """

    kind: str
    encoding: Encoding
    dtype: torch.dtype

    @property
    def is_of_rows(self) -> bool:
        """See `parameters.RowPacking`."""
        return True

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""
        block, size = TYPES_BY_NAME[self.kind].block, TYPES_BY_NAME[self.kind].size
        if shape[-1] % block:
            raise ValueError(f"rows of {shape[-1]} values must be blocks of {block}")
        stored = (*shape[:-1], shape[-1] // block * size)
        return {WEIGHT: StoredForm(tensor, (stored,), (torch.uint8,))}

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`; in the model's dtype."""
        raw, kind = stored[WEIGHT], TYPES_BY_NAME[self.kind]
        blocks = raw.view(-1, kind.size)
        values = torch.empty((len(blocks), kind.block), dtype=self.dtype)
        at_once = _VALUES_AT_ONCE // kind.block
        for some, decoded in zip(blocks.split(at_once), values.split(at_once), strict=True):
            decoded.copy_(decode(some, self.kind))
        return values.view(*raw.shape[:-1], -1)

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `parameters.RowPacking`."""
        raw, size = stored[WEIGHT], TYPES_BY_NAME[self.kind].size
        kind, encoding = BLOCK_TYPES[self.kind], self.encoding
        assert encoding.group is not None
        blocks = raw.view(-1, size)
        if kind.is_packed and encoding == _common([kind]):
            return self._as_stored(blocks, len(raw))
        levels, scales, offsets = kind.unpack(blocks)
        own = levels.shape[1] // scales.shape[1] // encoding.group
        if own > 1:
            scales = scales.repeat_interleave(own, dim=1)
            offsets = None if offsets is None else offsets.repeat_interleave(own, dim=1)
        if encoding.has_offsets and offsets is None:
            offsets = torch.zeros_like(scales)
        if encoding.number == "int4":
            if kind.has_offsets:
                # The weight's levels are counted from the middle.
                assert offsets is not None
                offsets = offsets - scales * MIDDLE
            else:
                levels = levels + MIDDLE
            values = pack_int4(levels.view(torch.uint8).view(len(raw), -1))
        else:
            values = levels.view(len(raw), -1)
        return _parts_of(len(raw), values, scales, offsets)

    def _as_stored(self, blocks: Tensor, rows: int) -> dict[str, Tensor]:
        """`rows` of a type whose blocks hold what `pack_int4` would make of their levels."""
        values, scales, offsets = BLOCK_TYPES[self.kind].packed(blocks)
        if offsets is not None:
            # The weight's levels are counted from the middle.
            offsets = offsets - scales * MIDDLE
        return _parts_of(rows, values, scales, offsets)


def _parts_of(
    rows: int, values: Tensor, scales: Tensor, offsets: Tensor | None
) -> dict[str, Tensor]:
    require_finite(scales, offsets)
    parts = {VALUES: values.view(rows, -1), SCALES: scales.view(rows, -1)}
    return parts if offsets is None else parts | {OFFSETS: offsets.view(rows, -1)}


@dataclass(frozen=True, slots=True)
class ShiftedNorm:
    """The weights of norms to which a converter has added 1."""

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `parameters.Packing`."""
        return {WEIGHT: StoredForm(tensor, (shape,), NUMBERS)}

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `parameters.Packing`."""
        return stored[WEIGHT].float() - 1


@dataclass(frozen=True, slots=True)
class GGUFFormats:
    """Holds every parameter as a file stores it; see `methods.Formats`.

    A parameter is decoded to the model's dtype if no weight can hold it packed: the embedding, and
    matrices of which parts are not quantized.

    Attributes
    ----------
    kinds
        The types of tensors that have blocks, by their names.
    embedding
        Name of the embedding, whose blocks a tied head has too.
    shifted_norms
        Whether 1 has been added to the weights of norms.
    """

    kinds: Mapping[str, str]
    embedding: str
    shifted_norms: bool
    rounds_inputs: bool = False
    name: str = "gguf"

    def rounding(self, *, inputs: bool) -> GGUFFormats:
        """The same, with inputs rounded or not."""
        return replace(self, rounds_inputs=inputs)

    def opened(self, stored: Mapping[str, torch.dtype]) -> GGUFFormats:
        """The same: a file's header has told all."""
        return self

    def hold(self, parameter: Parameter, world_size: int) -> Parameter:
        """See `methods.Formats`."""
        placements = parameter.placements
        if parameter.kind == "head" and not placements:
            placements = (Placement(self.embedding),)
            parameter = replace(parameter, placements=placements)
            if self.embedding not in self.kinds:
                return replace(parameter, placements=())
        if self.shifted_norms and parameter.kind == "vector":
            placements = tuple(_shifted(each) for each in placements)
            return replace(parameter, placements=placements)
        kinds = [self.kinds.get(each.tensor) for each in placements]
        known = [kind for kind in kinds if kind is not None]
        if not known:
            return parameter
        encoding = _common([BLOCK_TYPES[kind] for kind in known])
        packed = tuple(
            each
            if kind is None
            else replace(each, packing=BlockPacking(kind, encoding, parameter.dtype))
            for each, kind in zip(placements, kinds, strict=True)
        )
        parameter = replace(parameter, placements=packed)
        if len(known) < len(kinds) or not _is_held(parameter, encoding):
            return parameter
        name = f"levels of {encoding.traits.bits} bits"
        tiled = self.rounds_inputs
        if parameter.kind == "experts":
            name, tiled = f"experts of {name}", tiled and _fits_tiles(parameter)
        return replace(parameter, method=Stored(name, encoding, tiled=tiled))


def _fits_tiles(parameter: Parameter) -> bool:
    """Whether the matrices of a stack, and gates and ups among them, are whole tiles."""
    for placement in parameter.placements:
        rows = placement.index[1] if len(placement.index) > 1 else slice(None)
        assert isinstance(rows, slice)
        if len(range(*rows.indices(parameter.shape[1]))) % STRIP:
            return False
    return True


def _is_held(parameter: Parameter, encoding: Encoding) -> bool:
    """Whether a matrix can hold a parameter packed."""
    keeps_rows = all(
        each.part is None and (each.transform is None or isinstance(each.transform, _OF_ROWS))
        for each in parameter.placements
    )
    unit = math.lcm(encoding.group or 1, INT4_RUN)
    fits = len(parameter.shape) in (2, 3) and parameter.shape[-1] % unit == 0
    return parameter.kind in ("matrix", "head", "experts") and keeps_rows and fits


def _shifted(placement: Placement) -> Placement:
    is_norm = placement.tensor.endswith("norm.weight")
    return replace(placement, packing=ShiftedNorm()) if is_norm else placement
