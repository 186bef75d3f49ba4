"""The layouts in which AWQ, GPTQ and compressed-tensors pack integers into 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from src.models.weights.parameters import NUMBERS, StoredForm
from src.models.weights.schemes.columns import Columns, of_shape
from src.models.weights.schemes.integers import Integers

_WORD = 32  # bits
_WORDS = (torch.int32,)
_COUNTS = (torch.int32, torch.int64)
# How GPTQ stores zero points, see `GptqLayout`.
Zeros: TypeAlias = Literal["as they are", "less one", "words less one"]
# AWQ: the columns of a word's nibbles, from the lowest on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """The unsigned levels of words along a dimension, the lowest bits first, as uint8."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    moved = words.movedim(dim, -1)
    levels = (moved[..., None] >> shifts).bitwise_and_(2**bits - 1).to(torch.uint8)
    return levels.flatten(-2).movedim(-1, dim)


def _divided(size: int, by: int, what: str) -> int:
    if size % by:
        raise ValueError(f"{size} {what} are not a multiple of {by}")
    return size // by


def _checked(groups: Tensor, count: int) -> Tensor:
    if groups.numel() and (groups.min() < 0 or groups.max() >= count):
        raise ValueError(f"g_idx must be from 0 to {count - 1}")
    return groups.long()


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """AWQ's ``gemm``: words along the outputs of [K, N], in an order of their own."""

    columns: Columns
    bits: int = 4
    is_symmetric: bool = False
    is_reordered: bool = False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `integers.Layout`."""
        rows, inputs = shape
        module, words = tensor.removesuffix("weight"), _divided(rows, 8, "outputs")
        groups = self.columns.count(inputs)
        return {
            "levels": StoredForm(f"{module}qweight", ((inputs, words),), _WORDS),
            "zeros": StoredForm(f"{module}qzeros", ((groups, words),), _WORDS),
            "scales": StoredForm(f"{module}scales", ((groups, rows),), NUMBERS),
        }

    def read(self, stored: Mapping[str, Tensor]) -> Integers:
        """See `integers.Layout`."""
        levels, zeros = (_in_order(stored[role]).T for role in ("levels", "zeros"))
        return Integers(levels.contiguous(), stored["scales"].float().T, zeros.float())


def _in_order(words: Tensor) -> Tensor:
    nibbles = unpack_words(words, 4, 1).unflatten(1, (-1, 8))
    levels = torch.empty_like(nibbles)
    levels[:, :, _AWQ_COLUMNS] = nibbles
    return levels.flatten(1)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """GPTQ: words along the inputs of [K, N].

    Attributes
    ----------
    zeros
        How zero points are stored: as they are, or less one, which is the first version. One below
        0 is the largest level; or else the whole word is less one per level, and 0 borrows from the
        level above.
    is_symmetric
        Then the zero point is in the middle, whatever the checkpoint has stored.
    """

    bits: int
    columns: Columns
    is_symmetric: bool
    is_reordered: bool
    zeros: Zeros

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `integers.Layout`."""
        rows, inputs = shape
        module, per_word = tensor.removesuffix("weight"), _WORD // self.bits
        groups = self.columns.count(inputs)
        words = (groups, _divided(rows, per_word, "outputs"))
        levels = (_divided(inputs, per_word, "inputs"), rows)
        return {
            "levels": StoredForm(f"{module}qweight", (levels,), _WORDS),
            "zeros": StoredForm(f"{module}qzeros", (words,), _WORDS, self.is_symmetric),
            "scales": StoredForm(f"{module}scales", ((groups, rows),), NUMBERS),
            "groups": StoredForm(f"{module}g_idx", ((inputs,),), _COUNTS, not self.is_reordered),
        }

    def read(self, stored: Mapping[str, Tensor]) -> Integers:
        """See `integers.Layout`."""
        levels = unpack_words(stored["levels"], self.bits, 0).T.contiguous()
        scales = stored["scales"].float().T
        zeros = None
        if self.is_symmetric:
            levels = (levels - 2 ** (self.bits - 1)).view(torch.int8)
        else:
            zeros = self._zeros(stored["zeros"]).T.float()
        groups = stored.get("groups")
        if groups is not None:
            groups = _checked(groups, scales.shape[1])
            in_order = torch.arange(levels.shape[1]) // (self.columns.size or levels.shape[1])
            if not self.is_reordered and not torch.equal(groups, in_order):
                raise ValueError("g_idx is not in order, although desc_act is false")
        return Integers(levels, scales, zeros, groups if self.is_reordered else None)

    def _zeros(self, words: Tensor) -> Tensor:
        """Zero points, uint8 [G, N], of words [G, N * bits / 32]."""
        most = 2**self.bits - 1
        if self.zeros == "words less one":
            # 1 in each level; int32 wraps.
            words = words + (2**_WORD - 1) // most
        levels = unpack_words(words, self.bits, 1)
        return (levels + 1).bitwise_and_(most) if self.zeros == "less one" else levels


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """compressed-tensors' ``pack-quantized``: words along the inputs of [N, K].

    Signed levels, and zero points, are stored as unsigned ones.
    """

    bits: int
    columns: Columns
    is_symmetric: bool
    is_reordered: bool

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `integers.Layout`."""
        rows, inputs = shape
        per_word, groups = _WORD // self.bits, self.columns.count(inputs)
        scales: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if self.columns.size is None:
            scales = (*scales, (), (1,), (rows,))
        forms = {
            "levels": StoredForm(f"{tensor}_packed", ((rows, -(-inputs // per_word)),), _WORDS),
            "scales": StoredForm(f"{tensor}_scale", scales, NUMBERS),
            "shape": StoredForm(f"{tensor}_shape", ((2,),), _COUNTS, True),
        }
        if not self.is_symmetric:
            words = (-(-rows // per_word), groups)
            forms["zeros"] = StoredForm(f"{tensor}_zero_point", (words,), _WORDS)
        if self.is_reordered:
            forms["groups"] = StoredForm(f"{tensor}_g_idx", ((inputs,),), _COUNTS)
        return forms

    def read(self, stored: Mapping[str, Tensor]) -> Integers:
        """See `integers.Layout`."""
        words = stored["levels"]
        rows, inputs = len(words), words.shape[1] * (_WORD // self.bits)
        if "shape" in stored:
            given = stored["shape"].tolist()
            if given[0] != rows or not 0 <= inputs - given[1] < _WORD // self.bits:
                raise ValueError(f"weight_shape is {given}, but there are {rows} rows of {inputs}")
            inputs = given[1]
        levels = unpack_words(words, self.bits, 1)[:, :inputs].contiguous()
        scales = stored["scales"].float()
        scales = of_shape(scales, rows) if self.columns.size is None else scales
        zeros = None
        if self.is_symmetric:
            levels = (levels - 2 ** (self.bits - 1)).view(torch.int8)
        else:
            zeros = unpack_words(stored["zeros"], self.bits, 0)[:rows].float()
        groups = stored.get("groups")
        return Integers(
            levels, scales, zeros, None if groups is None else _checked(groups, scales.shape[1])
        )


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """compressed-tensors' ``int-quantized``: signed bytes [N, K]."""

    bits: int
    columns: Columns
    is_symmetric: bool
    is_static: bool
    is_reordered: bool = False

    def forms(self, tensor: str, shape: tuple[int, ...]) -> dict[str, StoredForm]:
        """See `integers.Layout`."""
        rows, groups = shape[0], self.columns.count(shape[1])
        shapes: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if self.columns.size is None:
            shapes = (*shapes, (), (1,), (rows,))
        forms = {
            "levels": StoredForm(tensor, (shape,), (torch.int8,)),
            "scales": StoredForm(f"{tensor}_scale", shapes, NUMBERS),
        }
        if not self.is_symmetric:
            forms["zeros"] = StoredForm(f"{tensor}_zero_point", shapes, (torch.int8,))
        if self.is_static:
            name = f"{tensor.removesuffix('weight')}input_scale"
            forms["input_scale"] = StoredForm(name, ((), (1,)), NUMBERS)
        return forms

    def read(self, stored: Mapping[str, Tensor]) -> Integers:
        """See `integers.Layout`."""
        levels, rows = stored["levels"], len(stored["levels"])
        scales = stored["scales"].float()
        scales = of_shape(scales, rows) if self.columns.size is None else scales
        if self.is_symmetric:
            return Integers(levels, scales, None)
        zeros = stored["zeros"].float()
        zeros = of_shape(zeros, rows) if self.columns.size is None else zeros
        # Unsigned, as every layout's levels with zero points.
        middle = 2 ** (self.bits - 1)
        return Integers((levels.int() + middle).to(torch.uint8), scales, zeros + middle)
