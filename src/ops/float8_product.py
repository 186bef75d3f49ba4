"""`float8_product`: 8-bit inputs times 8-bit weights, with a scale per token and one per output.

Torch has such a product for devices that multiply these numbers. It is behind an op because torch's
own shape rule asks whether there is one token, so that compiled code would hold for some numbers of
tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.ops.declaration import Case, Cost, Op


def reference(
    x: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See [`float8_product`][src.ops.float8_product.float8_product]."""
    sums = x.float() @ weight.float().t() * input_scales * scales
    return (sums if bias is None else sums + bias.float()).to(dtype)


def on_hopper(
    x: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of cuBLAS or CUTLASS, for compute capability 9.0 and later."""
    if len(x) == 0:
        return x.new_empty((0, len(weight)), dtype=dtype)
    product: Tensor = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=input_scales.contiguous(),
        scale_b=scales[None, :],
        bias=bias,
        out_dtype=dtype,
    )
    return product


def _fake(
    x: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _build(
    device: str,
    *,
    tokens: int = 3,
    inputs: int = 64,
    outputs: int = 48,
    has_bias: bool = False,
    is_static: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Random codes; static: one scale for all tokens, which is not repeated in memory."""
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=random) * 8 for n in (tokens, outputs))
    input_scales = torch.rand(tokens, 1, generator=random) / 64 + 0.001
    scales = torch.rand(outputs, generator=random) / 64 + 0.001
    bias = torch.randn(outputs, generator=random).to(device, torch.bfloat16)
    if is_static:
        input_scales = torch.full((1, 1), 0.01)
    return (
        x.to(torch.float8_e4m3fn).to(device),
        weight.to(torch.float8_e4m3fn).to(device),
        input_scales.to(device).expand(tokens, 1),
        scales.to(device),
        bias if has_bias else None,
        torch.bfloat16,
    )


def _grid() -> list[Case]:
    """No token, one, odd numbers and many; sizes that fill no tile."""
    return [
        {"tokens": tokens, "inputs": inputs, "outputs": outputs, "has_bias": has_bias}
        | {"is_static": is_static, "seed": tokens}
        for tokens, inputs, outputs in ((0, 64, 48), (1, 16, 16), (3, 96, 48), (130, 512, 272))
        for has_bias in (False, True)
        for is_static in (False, True)
    ]


def _cost(
    x: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Cost:
    results = len(x) * len(weight)
    moved = x.numel() + weight.numel() + 4 * (len(x) + len(weight)) + results * dtype.itemsize
    return Cost(bytes=moved, flops=2 * results * x.shape[1])


FLOAT8_PRODUCT = Op(
    "float8_product",
    "(Tensor x, Tensor weight, Tensor input_scales, Tensor scales, Tensor? bias, ScalarType dtype) "
    "-> Tensor",
    reference=reference,
    fake=_fake,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.float8_product:on_hopper"},
)


def float8_product(
    x: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`(x * input_scales) @ (weight * scales).T + bias`: [T, K] and [N, K] to [T, N].

    Parameters
        x: [T, K] float8_e4m3fn, contiguous; on CUDA K and N are multiples of 16.
        weight: [N, K] float8_e4m3fn, contiguous.
        input_scales: [T, 1] float32, any strides.
        scales: [N] float32, contiguous.
        bias: [N] of the result's dtype, or None.
        dtype: Of the result; on CUDA bfloat16.
    """
    product: Tensor = FLOAT8_PRODUCT.overload(x, weight, input_scales, scales, bias, dtype)
    return product
