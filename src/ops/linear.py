"""`linear`: a projection whose weights are read once, in the type in which they are held.

Few tokens against a large matrix cost what reading the matrix costs, so weights are widened in
registers and never in memory: bfloat16 halves what float32 reads, int8 a quarter, int4 an eighth.
(Where a CPU multiplies bfloat16, tokens of that meet bfloat16 weights, and quantized ones that are
rounded to it: int8 exactly, int4 with its scale to within 2^-9.)
How quantized weights come about is `src.models.quantization`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op

INT4_RUN = 32
"""int4: this many weights of a row lie in 16 bytes, the first half of them in the low halves."""


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """The matrix that quantized weights stand for, float32 [N, K].

    Parameters
        weight: [N, K] int8, or [N, K / 2] uint8 of packed int4 (see `INT4_RUN`).
        scales: float32 [N] of int8 rows; [N, K / group] of int4 groups, whose value is
            `(q - 8) * scale`.
    """
    if weight.dtype == torch.int8:
        return weight.float() * scales[:, None]
    rows = len(weight)
    runs = weight.view(rows, -1, 1, INT4_RUN // 2)  # [N, K / 32, 1, 16]
    values = torch.cat((runs & 15, runs >> 4), dim=2).float() - 8  # [N, K / 32, 2, 16]
    return (values.view(rows, scales.shape[1], -1) * scales[:, :, None]).view(rows, -1)


def reference(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """See [`linear`][src.ops.linear.linear]."""
    if scales is None:
        return functional.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return functional.linear(x.float(), dequantize(weight, scales), wide).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


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
    """Random values; `weight` is `same` (as x), `int8`, or `int4/<group>`."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=random).to(dtype).to(device)
    bias = torch.randn(outputs, generator=random).to(dtype).to(device) if has_bias else None
    if weight == "same":
        matrix = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
        return x, matrix.to(dtype).to(device), None, bias
    if weight == "int8":
        bits = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8)
        scales = torch.rand(outputs, generator=random) / 64 * inputs**-0.5
        return x, bits.to(device), scales.to(device), bias
    group = int(weight.removeprefix("int4/"))
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=random) / 4 * inputs**-0.5
    return x, packed.to(device), scales.to(device), bias


def _cost(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Cost:
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    moved = (
        weight.nbytes
        + (0 if scales is None else scales.nbytes)
        + x.element_size() * tokens * (inputs + outputs)
    )
    return Cost(bytes=moved, flops=2 * tokens * inputs * outputs)


LINEAR = Op(
    # Code that is compiled ahead of time calls it by a C name made of this one, in a namespace that
    # is torch's too: hence not just "linear".
    "streamed_linear",
    "(Tensor x, Tensor weight, Tensor? scales, Tensor? bias) -> Tensor",
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
        # Less than a tile, tiles with a rest, and more tokens than stay close to a core.
        for tokens, inputs, outputs in [(1, 64, 1), (2, 128, 7), (7, 256, 33), (70, 1024, 10)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for weight in ("same", "int8", "int4/32", "int4/64")
    ],
    cost=_cost,
)


def linear(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once.

    The compiled CPU kernel sums along the inputs in one fixed order, so a token's result is the
    same bits alone and in any batch.

    Parameters
        x: [T, K] float32, bfloat16 or float16, last dimension contiguous.
        weight: [N, K] in x's dtype; [N, K] int8; or [N, K / 2] uint8 of packed int4. Contiguous.
        scales: None, or the scales of quantized weights, see
            [`dequantize`][src.ops.linear.dequantize].
        bias: None, or [N] in x's dtype.

    Returns
        [T, N] in x's dtype.
    """
    result: Tensor = LINEAR.overload(x, weight, scales, bias)
    return result
