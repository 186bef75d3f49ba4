"""`float8_product`: 8-bit inputs times 8-bit weights, with a scale per token and one per output.

Torch has such a product for devices that multiply these numbers. It is behind an op because torch's
own shape rule asks whether there is one token, so that compiled code would hold for some numbers of
tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.declaration import Case, Cost, Op
from src.ops.matrix import FLOAT8
from src.ops.records import Record, number, result, tensor


class Float8Product(Record, result=result("out", "tokens outputs", like="x", dtype="dtype")):
    """`(x * input_scales) @ (weight * scales).T + bias`: [T, K] and [N, K] to [T, N].

    Attributes
    ----------
    x
        [T, K] float8_e4m3fn, contiguous; on CUDA K and N are multiples of 16.
    weight
        [N, K] float8_e4m3fn, contiguous.
    input_scales
        [T, 1] float32, any strides.
    scales
        [N] float32, contiguous.
    bias
        [N] of the result's dtype, or None.
    dtype
        Of the result; on CUDA bfloat16.
    """

    x: Tensor = tensor("tokens inputs", FLOAT8)
    weight: Tensor = tensor("outputs inputs", FLOAT8)
    input_scales: Tensor = tensor("tokens _", torch.float32, rows=True)
    scales: Tensor = tensor("outputs", torch.float32)
    bias: Tensor | None = tensor("outputs")
    dtype: torch.dtype = number()


def reference(call: Float8Product) -> Tensor:
    """See `Float8Product`."""
    sums = call.x.float() @ call.weight.float().t() * call.input_scales * call.scales
    return (sums if call.bias is None else sums + call.bias.float()).to(call.dtype)


@Float8Product.taking_flat
def on_hopper(call: Float8Product) -> Tensor:
    """The product of cuBLAS or CUTLASS, for compute capability 9.0 and later."""
    if len(call.x) == 0:
        return call.x.new_empty((0, len(call.weight)), dtype=call.dtype)
    product: Tensor = torch._scaled_mm(
        call.x,
        call.weight.t(),
        scale_a=call.input_scales.contiguous(),
        scale_b=call.scales[None, :],
        bias=call.bias,
        out_dtype=call.dtype,
    )
    return product


def _build(
    device: str,
    *,
    tokens: int = 3,
    inputs: int = 64,
    outputs: int = 48,
    has_bias: bool = False,
    is_static: bool = False,
    seed: int = 0,
) -> Float8Product:
    """Random codes; static: one scale for all tokens, which is not repeated in memory."""
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=random) * 8 for n in (tokens, outputs))
    input_scales = torch.rand(tokens, 1, generator=random) / 64 + 0.001
    scales = torch.rand(outputs, generator=random) / 64 + 0.001
    bias = torch.randn(outputs, generator=random).to(device, torch.bfloat16)
    if is_static:
        input_scales = torch.full((1, 1), 0.01)
    return Float8Product(
        x.to(FLOAT8).to(device),
        weight.to(FLOAT8).to(device),
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


def _cost(call: Float8Product) -> Cost:
    x, weight = call.x, call.weight
    results = len(x) * len(weight)
    moved = x.numel() + weight.numel() + 4 * (len(x) + len(weight)) + results * call.dtype.itemsize
    return Cost(bytes=moved, flops=2 * results * x.shape[1])


FLOAT8_PRODUCT = Op(
    "float8_product",
    Float8Product,
    reference=reference,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.projections.float8_product:on_hopper"},
)

float8_product = FLOAT8_PRODUCT.function
"""The op as a function of the fields of `Float8Product`."""
