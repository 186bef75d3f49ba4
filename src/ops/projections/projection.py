"""A projection: a matrix, and how the inputs that it meets are rounded.

Formats with 8-bit activations round a projection's inputs. A scale is of one token, or of a block
of a token's inputs, or it is fixed. So no token's result depends on the other tokens of a step, and
a scale of a whole step is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from src.ops.matrix import FLOAT8, Matrix, has_capability
from src.ops.projections.float8_product import float8_product
from src.ops.projections.linear import linear

Scaled: TypeAlias = Literal["token", "block", "static"]
"""What shares a scale of inputs: a token, a block of a token's inputs, or all there ever are."""

_LARGEST_FLOAT8: Final = 448.0
# compressed-tensors divides by half of the range -128 to 127.
_HALF_OF_INT8: Final = 127.5
# Of devices for which cuBLAS has products with scales per row.
_ROWWISE_CAPABILITY: Final = (9, 0)


def token_scales(x: Tensor, largest: float, bound: Tensor | None = None) -> Tensor:
    """The scale of each token, float32 [..., 1]: its largest magnitude becomes `largest`.

    `bound`, float32 [1], is the most that counts as the largest magnitude.
    """
    most = x.float().abs().amax(dim=-1, keepdim=True)
    if bound is not None:
        most = torch.minimum(most, bound)
    return torch.where(most == 0, 1.0, most / largest)


def to_float8(x: Tensor, scales: Tensor) -> Tensor:
    """Inputs divided by scales, as 8-bit floating point numbers."""
    return (x.float() / scales).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(FLOAT8)


def to_int8(x: Tensor, scales: Tensor) -> Tensor:
    """Inputs divided by scales, as integers from -128 to 127 in x's dtype, which holds them."""
    return (x.float() / scales).round().clamp(-128, 127).to(x.dtype)


class InputRounding(NamedTuple):
    """How a projection's inputs are rounded to 8 bits.

    Attributes
    ----------
    scaled
        What shares a scale. Blocks are as long as the matrix's groups.
    number
        `int8` or `e4m3`.
    input_scale
        float32 [1, 1], the static scale.
    bound
        float32 [1], the most that counts as a token's largest magnitude.
    """

    scaled: Scaled
    number: Literal["int8", "e4m3"]
    input_scale: Tensor | None = None
    bound: Tensor | None = None

    def scales(self, x: Tensor) -> Tensor:
        """The scales of x's tokens, float32 [T, 1], or [1, 1] if static."""
        if self.input_scale is not None:
            return self.input_scale
        largest = _LARGEST_FLOAT8 if self.number == "e4m3" else _HALF_OF_INT8
        return token_scales(x, largest, self.bound)


class Projection(NamedTuple):
    """Multiplies by a matrix; None: inputs are multiplied as they are.

    Inputs of quantized tiles are rounded by the op, whatever this says.
    """

    matrix: Matrix
    rounding: InputRounding | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        rounding = () if self.rounding is None else self.rounding._asdict().items()
        own = {name: each for name, each in rounding if isinstance(each, Tensor)}
        return self.matrix.tensors() | own

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in self.tensors().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> Projection:
        """The same projection with a function of each tensor in its place."""
        rounding = self.rounding
        if rounding is not None:
            given = rounding._asdict().items()
            changed: dict[str, Any] = {n: function(t) for n, t in given if isinstance(t, Tensor)}
            rounding = rounding._replace(**changed)
        return Projection(self.matrix.map(function), rounding)

    def dequantized(self) -> Tensor:
        """The matrix in float32, [N, K]."""
        return self.matrix.dequantized()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`round(x) @ matrix.T + bias`: [T, K] to [T, N] in x's dtype."""
        matrix, rounding = self.matrix, self.rounding
        if rounding is None:
            return linear(x, matrix, bias)
        if rounding.scaled == "block":
            # Blocks are groups of the matrix.
            blocks = x.unflatten(-1, (-1, matrix.group))
            scales = rounding.scales(blocks)
            rounded = (to_float8(blocks, scales).float() * scales).flatten(-2).to(x.dtype)
            return linear(rounded, matrix, bias)
        scales = rounding.scales(x)
        if rounding.number == "int8":
            rounded = to_int8(x, scales)
        else:
            rounded = to_float8(x, scales)
            if _multiplies_float8(x, matrix):
                assert matrix.scales is not None
                by_token = scales.expand(rounded.shape[0], 1)
                return float8_product(
                    rounded, matrix.values, by_token, matrix.scales, bias, x.dtype
                )
            rounded = rounded.to(x.dtype)
        sums = linear(rounded, matrix).float() * scales
        return (sums if bias is None else sums + bias).to(x.dtype)


def _multiplies_float8(x: Tensor, matrix: Matrix) -> bool:
    """Whether the device multiplies 8-bit floating point numbers with scales per row."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16:
        return False
    if any(size % 16 for size in matrix.values.shape):
        return False
    return has_capability(x.device, _ROWWISE_CAPABILITY)
