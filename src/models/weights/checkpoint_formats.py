"""Chooses how a quantized checkpoint's parameters are held, tensor by tensor.

A *scheme* is the form in which a checkpoint stores one matrix: which tensors, and which weight can
hold them as they are. Which matrix has which scheme is the checkpoint's `quantization_config`:
`quantization_config.READERS` has one function per method that a checkpoint may name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from src.models.weights.checkpoint import StoredTensor
from src.models.weights.methods import Held, LinearMethod
from src.models.weights.parameters import NUMBERS, Parameter, Placement, RowPacking
from src.models.weights.stacks import OrderedStackMethod, Stack, StackedMethod
from src.models.weights.transforms import InHalves, PartByPart

_ENDING = ".weight"
# Kinds of parameters that are matrices of a checkpoint, and kinds that a weight may hold packed.
_MATRICES = ("matrix", "head", "experts", "latent")
_HELD = ("matrix", "head", "experts")
# Transforms that do no more than move rows.
_OF_ROWS = (InHalves, PartByPart)


class Scheme(Protocol):
    """The form in which a checkpoint stores a matrix. Equal schemes can share one weight."""

    @property
    def packing(self) -> RowPacking:
        """Its tensors, and how they are read."""

    def method(self, parameter: Parameter, shards: int | None) -> LinearMethod | None:
        """What holds a parameter as it is stored; None: it has to be decoded.

        Its placements all have this scheme.

        Args:
            parameter: a matrix [N, K], of one rank.
            shards: the dimension of which this is one of several ranks' parts; None: none.

        Raises:
            ValueError: the scheme cannot be cut like this.
        """

    def stack(self, inputs: int, *, is_whole: bool) -> Stack | None:
        """How matrices of experts are held as they are stored; None: they have to be decoded.

        A scale may be repeated for the parts of its group that a rank has, or that fit a weight.
        Inputs are not rounded.

        Args:
            inputs: of a matrix, of one rank.
            is_whole: whether there is one rank only.
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

    def opened(self, stored: Mapping[str, StoredTensor]) -> CheckpointFormats:
        """The same with knowledge of the checkpoint's tensors."""
        return replace(
            self, plain=frozenset(n for n, one in stored.items() if one.dtype in NUMBERS)
        )

    def rounding(self, *, inputs: bool) -> CheckpointFormats:
        """The same: whether inputs are rounded is the checkpoint's affair."""
        return self

    def hold(self, parameter: Parameter, world_size: int) -> Held:
        """See `methods.Formats`."""
        schemes = [self._scheme(parameter, each) for each in parameter.placements]
        if not any(schemes):
            return Held(parameter, None)
        placements = tuple(
            each if scheme is None else replace(each, packing=scheme.packing)
            for each, scheme in zip(parameter.placements, schemes, strict=True)
        )
        packed = replace(parameter, placements=placements)
        first = schemes[0]
        is_one = first is not None and all(scheme == first for scheme in schemes)
        if parameter.kind not in _HELD or not is_one or not all(map(_keeps_rows, placements)):
            return Held(packed, None)
        assert first is not None
        if parameter.kind == "experts":
            return _held_stack(packed, first, is_whole=world_size == 1)
        shards = placements[0].shard if world_size > 1 else None
        return Held(packed, first.method(packed, shards))

    def _scheme(self, parameter: Parameter, placement: Placement) -> Scheme | None:
        name = placement.tensor
        if parameter.kind not in _MATRICES or not name.endswith(_ENDING):
            return None
        if placement.part is not None or placement.packing is not None:
            return None
        found = self.schemes.of(name.removesuffix(_ENDING), is_head=parameter.kind == "head")
        return None if name in self.plain else found


def _held_stack(parameter: Parameter, scheme: Scheme, *, is_whole: bool) -> Held:
    """How experts are held that are stored in one scheme."""
    count, _, inputs = parameter.shape
    stack = scheme.stack(inputs, is_whole=is_whole)
    if stack is None:
        return Held(parameter, None)
    placements = tuple(replace(one, packing=stack.packing) for one in parameter.placements)
    method: LinearMethod = StackedMethod(stack.method)
    if stack.is_ordered:
        parts = len(placements) // count
        method = OrderedStackMethod(StackedMethod(stack.method), parts, parameter.dtype)
    return Held(replace(parameter, placements=placements), method)


def _keeps_rows(placement: Placement) -> bool:
    return placement.transform is None or isinstance(placement.transform, _OF_ROWS)
