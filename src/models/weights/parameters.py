"""Descriptions of a model's parameters: shapes, kinds, and their tensors in a checkpoint.

Allocation, loading, quantization, layout and dummy values all read this one table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from src.ops.host_memory import LARGE_PAGE, lazy_zeros
from src.ops.matrix import Matrix
from src.ops.projections.projection import Projection

# matrix: a projection [out, in], which a method may hold in another format.
# head: the projection to logits, where errors matter most.
# experts: a stack of matrices [experts, out, in].
# router: chooses or weighs experts; always in float32.
# latent: makes keys and values of latents; its mixer takes it as it is.
# vector: norms, biases and other small parameters.
# embedding: a table whose rows are looked up.
# classifier: of a head that makes scores of labels; always plain.
Kind: TypeAlias = Literal[
    "matrix", "head", "experts", "router", "latent", "vector", "embedding", "classifier"
]
Index: TypeAlias = tuple[int | slice, ...]

WEIGHT = "weight"
"""The role of a tensor that is not packed, and the name of the only part of a plain parameter."""


class Transform(Protocol):
    """A function of a checkpoint's tensor; see `weights.transforms`."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have to fill a part of this shape."""

    def __call__(self, stored: Tensor) -> Tensor:
        """The values for the parameter. ``stored`` has the shape that `stored_shape` gives."""


class StoredForm(NamedTuple):
    """What a checkpoint must hold under a name.

    ``shapes`` are those that it may have. Without ``is_optional`` it must be there.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False


NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of tensors that are not packed."""


class Packing(Protocol):
    """A form in which a checkpoint stores values in other tensors; see `weights.packing`."""

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """The checkpoint's tensors for values of this shape: their role -> their form.

        ``tensor`` is the name that the values have if they are not packed.

        Raises
        ------
        ValueError
            Values of this shape cannot be packed so.
        """

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The values that the tensors stand for, in float32. ``stored`` is by role.

        Raises
        ------
        ValueError
            The tensors contradict each other.
        """


@runtime_checkable
class RowPacking(Packing, Protocol):
    """A form of a matrix [N, K] whose tensors a weight can hold, row by row.

    Attributes
    ----------
    is_of_rows
        Whether the checkpoint's tensors have the matrix's rows too, so that some can be read alone.
    """

    @property
    def is_of_rows(self) -> bool:
        """See the class."""

    def rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of the matrix: of every part, dimension 0 is a row [N, ...].

        If there is a dimension 1, it is of columns, or of groups of columns. So rows can be
        reordered and cut, and columns can be cut at the bounds of groups.

        Raises
        ------
        ValueError
            The tensors contradict each other.
        """


Weight: TypeAlias = "Tensor | Projection"
"""What a projection multiplies by; a tensor is a plain matrix in rows."""

Value: TypeAlias = "Tensor | Projection | Matrix"
"""What stands for a parameter; a stack of matrices is of experts."""


class Method(Protocol):
    """Makes the value of one parameter from its parts; see `weights.methods`."""

    @property
    def name(self) -> str:
        """The method's name in errors and logs."""

    def staging(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Allocate the parts of a matrix [N, K] or a stack [E, N, K], for placements to fill.

        They are a plain ``weight``, or what `RowPacking.rows` returns.
        """

    def place(self, part: Tensor, kind: str, index: Index) -> Tensor:
        """The view of ``part``, which has ``kind``, for the rows at ``index``."""

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix of these values, rounded to the format: for dummy weights."""

    def make(self, parts: Mapping[str, Tensor]) -> Value:
        """Make the value; on the meta device its shapes only.

        Raises
        ------
        ValueError
            This matrix cannot be held in this format.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts along the first dimension of a checkpoint's tensor."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one checkpoint tensor, or of a part of it, in a parameter.

    Attributes
    ----------
    tensor
        Its name in the checkpoint.
    index
        The part of the parameter that it fills, a contiguous view. Empty: all of it.
    shard
        The dimension of the checkpoint's tensor that is sharded over the ranks; None: not sharded.
    transform
        Applied to the checkpoint's tensor, or to this rank's part, before it is copied: for example
        a transposition or a permutation of rows. None: the tensor is read directly into place.
    part
        The part of the checkpoint's tensor that is read; ``shard`` and ``transform`` are of this
        part. None: all of it.
    packing
        The form of the values if they are packed. ``shard`` and ``transform`` are of the values.
    """

    tensor: str
    index: Index = ()
    shard: int | None = None
    transform: Transform | None = None
    part: Part | None = None
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model, perhaps fused from several tensors of a checkpoint.

    Attributes
    ----------
    shape
        Of this rank's part, in elements, before quantization.
    fill
        The value of dummy weights; None: random values, scaled for a matrix.
    dtype
        Its dtype if it is not quantized.
    method
        What makes its value; None: it is a plain tensor, and packed values are decoded.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    placements: tuple[Placement, ...]
    fill: float | None
    dtype: torch.dtype
    method: Method | None = None


def rows_of(
    names: Sequence[str], sizes: Sequence[int], *, shard: int | None = 0
) -> tuple[Placement, ...]:
    """Placements of tensors that are stacked along the rows of one fused parameter.

    With one name the checkpoint has them fused already, in the same order.

    Raises
    ------
    ValueError
        The number of names is neither the number of sizes nor one.
    """
    if len(names) == 1:
        return (Placement(names[0], shard=shard),)
    if len(names) != len(sizes):
        raise ValueError(f"{len(names)} tensors for {len(sizes)} parts of a parameter")
    placements, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        placements.append(Placement(name, (slice(start, start + size),), shard))
        start += size
    return tuple(placements)


def view_of(parameter: Tensor, placement: Placement) -> Tensor:
    """A view of the part of a parameter that a placement fills."""
    return parameter[placement.index] if placement.index else parameter


def shape_at(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of the part of a tensor at an index."""
    sizes = []
    for size, each in zip(shape, index, strict=False):
        if isinstance(each, slice):
            sizes.append(len(range(*each.indices(size))))
    return (*sizes, *shape[len(index) :])


def stored_shape(own: tuple[int, ...], placement: Placement, world_size: int) -> tuple[int, ...]:
    """The shape that the checkpoint's values must have, of one part if there are parts."""
    transform = placement.transform
    shape = list(own if transform is None else transform.stored_shape(own))
    if placement.shard is not None:
        shape[placement.shard] *= world_size
    return tuple(shape)


def stored_forms(
    shape: tuple[int, ...], placement: Placement, world_size: int
) -> dict[str, StoredForm]:
    """The checkpoint's tensors for a part of this shape: their role -> their form.

    Raises
    ------
    ValueError
        Values of this shape cannot be packed in the placement's form.
    """
    whole = stored_shape(shape, placement, world_size)
    if placement.packing is None:
        forms = {WEIGHT: StoredForm(placement.tensor, (whole,), NUMBERS)}
    else:
        forms = placement.packing.forms(placement.tensor, whole)
    if placement.part is None:
        return forms
    count = placement.part.count
    return {
        role: form._replace(shapes=tuple((count, *each) for each in form.shapes))
        for role, form in forms.items()
    }


def own_part(stored: Tensor, placement: Placement, rank: int, world_size: int) -> Tensor:
    """A view of this rank's part of a checkpoint's values, or of one of their parts in rows.

    What does not have the dimension, as scales of whole rows have no columns, is of all ranks.
    """
    dim = placement.shard
    if dim is None or world_size == 1 or dim >= stored.dim() or stored.shape[dim] == 1:
        return stored
    size = stored.shape[dim] // world_size
    return stored.narrow(dim, rank * size, size)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a parameter; on the CPU in large pages that are not touched yet."""
    if device.type == "cpu":
        return lazy_zeros(tuple(shape), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def allocate_unset(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate what is written whole, or replaced, before anything reads it.

    `allocate` would touch the pages of what is too small for large ones. Indices are 0: compilers
    call a model's code before its weights are read, and a GPU ends a process that reads beyond.
    """
    if dtype in (torch.int32, torch.int64):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    if math.prod(shape) * dtype.itemsize < LARGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return allocate(shape, dtype, device)
