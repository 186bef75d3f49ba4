"""Chooses how a quantized checkpoint's parameters are held, tensor by tensor.

A *scheme* is the form in which a checkpoint stores one matrix: which tensors, and which weight can
hold them as they are. Which matrix has which scheme is the checkpoint's `quantization_config`:
`quantization_config.READERS` has one function per method that a checkpoint may name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from src.models.weights.parameters import NUMBERS, Method, Parameter, Placement, RowPacking
from src.models.weights.transforms import InHalves, PartByPart

_ENDING = ".weight"
# Kinds of parameters that are matrices of a checkpoint, and kinds that a weight may hold packed.
_MATRICES = ("matrix", "head", "experts", "latent")
_HELD = ("matrix", "head", "experts")
# Transforms that do no more than move rows.
_OF_ROWS = (InHalves, PartByPart)


class Scheme(Protocol):
    """The form in which a checkpoint stores a matrix. Equal schemes can share one matrix."""

    @property
    def packing(self) -> RowPacking:
        """Its tensors, and how they are read."""

    def hold(self, parameter: Parameter, shards: int | None) -> tuple[RowPacking, Method] | None:
        """How a parameter is packed and held as it is stored; None: it has to be decoded.

        Its placements all have this scheme. A scale may be repeated for the parts of its group that
        a rank has of experts, or that fit a matrix. Inputs of experts are not rounded.

        Parameters
        ----------
        parameter
            a matrix [N, K] or a stack [E, N, K], of one rank.
        shards
            The dimension of which this is one of several ranks' parts; None: none.

        Raises
        ------
        ValueError
            The scheme cannot be cut like this.
        """


class Schemes(Protocol):
    """Which matrices of a checkpoint are stored in which scheme, as its configuration says it."""

    def of(self, module: str, *, is_head: bool) -> Scheme | None:
        """The scheme of the matrix of a module; None: it is stored plainly."""


@dataclass(frozen=True, slots=True)
class CheckpointFormats:
    """Holds matrices as the checkpoint stores them, where there is a weight for that.

    A parameter is decoded to the model's dtype if its parts are stored in different ways.

    Attributes
    ----------
    plain
        Names of the checkpoint's tensors that are not quantized, whatever its configuration says.
    """

    name: str
    schemes: Schemes
    plain: frozenset[str] = frozenset()

    def opened(self, stored: Mapping[str, torch.dtype]) -> CheckpointFormats:
        """The same with knowledge of the checkpoint's tensors: name -> dtype."""
        return replace(
            self, plain=frozenset(name for name, dtype in stored.items() if dtype in NUMBERS)
        )

    def rounding(self, *, inputs: bool) -> CheckpointFormats:
        """The same: whether inputs are rounded is the checkpoint's affair."""
        return self

    def hold(self, parameter: Parameter, world_size: int) -> Parameter:
        """See `methods.Formats`."""
        schemes = [self._scheme(parameter, each) for each in parameter.placements]
        if not any(schemes):
            return parameter
        placements = tuple(
            each if scheme is None else replace(each, packing=scheme.packing)
            for each, scheme in zip(parameter.placements, schemes, strict=True)
        )
        packed = replace(parameter, placements=placements)
        first = schemes[0]
        is_one = first is not None and all(scheme == first for scheme in schemes)
        if parameter.kind not in _HELD or not is_one or not all(map(_keeps_rows, placements)):
            return packed
        assert first is not None
        held = first.hold(packed, placements[0].shard if world_size > 1 else None)
        if held is None:
            return packed
        packing, method = held
        placements = tuple(replace(one, packing=packing) for one in placements)
        return replace(packed, placements=placements, method=method)

    def _scheme(self, parameter: Parameter, placement: Placement) -> Scheme | None:
        name = placement.tensor
        if parameter.kind not in _MATRICES or not name.endswith(_ENDING):
            return None
        if placement.part is not None or placement.packing is not None:
            return None
        found = self.schemes.of(name.removesuffix(_ENDING), is_head=parameter.kind == "head")
        return None if name in self.plain else found


def _keeps_rows(placement: Placement) -> bool:
    return placement.transform is None or isinstance(placement.transform, _OF_ROWS)
