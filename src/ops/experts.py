"""`experts`: the feed-forward layer of a mixture of experts.

Each token is computed by k of E experts, and only the weights of chosen experts are read. So one
token costs as much as reading k experts, and many tokens cost as much as E dense layers. The
(token, expert) pairs are sorted by expert, each expert is multiplied by all of its tokens at once,
and a token's k results are summed in order of rank j. There are no atomic additions, so the order
of every sum is fixed. [`route`][src.ops.routing.route] chooses the experts beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op
from src.ops.linear import LINEAR
from src.ops.linear import reference as reference_linear
from src.ops.matrix import Matrix, Operand, as_matrix

ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1}
"""Activation of the gate -> the number that kernels know it by."""
CLAMPED_SWIGLU: Final = 2
"""The number of `ClampedSwiglu`."""
PAIRS_OF_A_CROWD: Final = 16
"""With more pairs per expert on average, the kernels for GPUs take large tiles."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, as in gpt-oss.

    Attributes
        alpha: Factor of the gate within the sigmoid.
        limit: The gate is at most `limit`; up lies within `[-limit, limit]`.
    """

    alpha: float
    limit: float


Gating: TypeAlias = "str | ClampedSwiglu"
"""How gate and up are joined: a key of `ACTIVATIONS` means `act(gate) * up`."""


def gating_arguments(gating: Gating) -> tuple[int, float, float]:
    """The op's arguments `activation`, `alpha` and `limit`."""
    if isinstance(gating, ClampedSwiglu):
        return CLAMPED_SWIGLU, gating.alpha, gating.limit
    return ACTIVATIONS[gating], 1.0, 0.0


def activate(projected: Tensor, activation: int, alpha: float = 1.0, limit: float = 0.0) -> Tensor:
    """Join [P, 2 I] (gates first) in float32, rounded once: [P, I]."""
    gate, up = projected.float().chunk(2, dim=-1)
    if activation == CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1.0
        gate = gate * (alpha * gate).sigmoid()
    elif activation == ACTIVATIONS["silu"]:
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh")
    return (gate * up).to(projected.dtype)


def reference(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    alpha: float,
    limit: float,
    weighs_inputs: bool,
    deterministic: bool,
    gate_up_kind: int,
    down_kind: int,
    gate_up_offsets: Tensor | None = None,
    down_offsets: Tensor | None = None,
    gate_up_order: Tensor | None = None,
    down_order: Tensor | None = None,
) -> Tensor:
    """See [`experts`][src.ops.experts.experts]."""
    results = hidden.new_zeros((*ids.shape, hidden.shape[1]))  # [T, k, H]
    for expert in ids.unique().tolist():
        if not 0 <= expert < len(gate_up):
            continue
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        x = hidden[tokens]
        if weighs_inputs:
            x = (x.float() * weights[tokens, slots, None]).to(x.dtype)
        projected = reference_linear(
            _in_order(x, _of(gate_up_order, expert)),
            gate_up[expert],
            _of(gate_up_scales, expert),
            _of(gate_up_bias, expert),
            gate_up_kind,
            _of(gate_up_offsets, expert),
        )
        results[tokens, slots] = reference_linear(
            _in_order(activate(projected, activation, alpha, limit), _of(down_order, expert)),
            down[expert],
            _of(down_scales, expert),
            _of(down_bias, expert),
            down_kind,
            _of(down_offsets, expert),
        )
    return combine(results, None if weighs_inputs else weights, ids, len(gate_up))


def _of(tensor: Tensor | None, expert: int) -> Tensor | None:
    return None if tensor is None else tensor[expert]


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x[:, order.long()]


def combine(results: Tensor, weights: Tensor | None, ids: Tensor, num_experts: int) -> Tensor:
    """Sum each token's results [T, k, H] in float32, rounded once: [T, H].

    `weights` [T, k] are their factors; None: 1.
    """
    is_someone = ((ids >= 0) & (ids < num_experts))[:, :, None]
    weighted = results.float() if weights is None else results.float() * weights[:, :, None]
    # `where` instead of a product with 0: results of slots without an expert may be NaN.
    return torch.where(is_someone, weighted, 0.0).sum(dim=1).to(results.dtype)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the (token, expert) pairs by expert, then by token.

    Nothing here waits for a device, and no size depends on which experts were chosen.

    Returns
        [T * k] int64, the pairs' indices into the flattened ids [T, k], pairs without an expert
        last; and [E] int32, where each expert's pairs end.
    """
    is_someone = (ids >= 0) & (ids < num_experts)
    owners, order = ids.where(is_someone, num_experts).flatten().sort(stable=True)
    bounds = torch.arange(1, num_experts + 1, device=ids.device)
    return order, torch.searchsorted(owners, bounds, out_int32=True)


def grouped(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: int = ACTIVATIONS["silu"],
) -> Tensor:
    """The op by torch's grouped matrix product, for unquantized weights in row-major layout.

    No size depends on data, so nothing waits for a device.
    """
    tokens, k = ids.shape
    experts = len(gate_up)
    order, ends = sort_by_expert(ids, experts)
    x = hidden[order // k]  # [P, H]
    projected = functional.grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
    results = functional.grouped_mm(
        activate(projected, activation), down.transpose(1, 2), offs=ends
    )
    place = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * k, device=ids.device))
    return combine(results[place].view(tokens, k, -1), weights, ids, experts)


def _fake(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    alpha: float,
    limit: float,
    weighs_inputs: bool,
    deterministic: bool,
    gate_up_kind: int,
    down_kind: int,
    gate_up_offsets: Tensor | None = None,
    down_offsets: Tensor | None = None,
    gate_up_order: Tensor | None = None,
    down_order: Tensor | None = None,
) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _matrices(
    count: int, outputs: int, inputs: int, dtype: torch.dtype, weight: str, seed: int
) -> tuple[Any, ...]:
    """Kind, weights, scales and offsets of all experts: those of so many layers."""
    layers = [
        LINEAR.build(
            "cpu",
            tokens=0,
            inputs=inputs,
            outputs=outputs,
            dtype=dtype,
            weight=weight,
            seed=seed * count + expert,
        )
        for expert in range(count)
    ]
    _, matrices, scales, _, kinds, *offsets = zip(*layers, strict=True)
    held = (matrices, scales, *(offsets or [(None,)]))
    return kinds[0], *(None if each[0] is None else torch.stack(each) for each in held)


def _build(
    device: str,
    *,
    tokens: int,
    experts: int,
    chosen: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype = torch.float32,
    weight: str = "same",
    padding: int = 0,
    activation: Gating = "silu",
    biased: bool = False,
    weighs_inputs: bool = False,
    deterministic: bool = False,
    ordered: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Random arguments; `weight` is one of those of `linear`. `ordered`: columns have an order.

    Weights and biases of experts that no token chose are NaN. So are the last `padding` tokens,
    whose expert numbers are invalid: -1, or too large.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    scores = torch.randn(tokens, experts, generator=random)
    scores[:, : experts // 4] -= 100.0  # Few or none choose these.
    weights, ids = scores.softmax(dim=-1).topk(chosen, dim=-1)
    if padding:
        x[-padding:], weights[-padding:], ids[-padding:] = torch.nan, torch.nan, -1
        ids[-1] = experts
    gate_up_kind, gate_up, gate_up_scales, gate_up_offsets = _matrices(
        experts, 2 * intermediate, hidden, dtype, weight, seed
    )
    down_kind, down, down_scales, down_offsets = _matrices(
        experts, hidden, intermediate, dtype, weight, seed + 1
    )
    gate_up_bias, down_bias = (
        torch.randn(experts, size, generator=random).to(dtype) if biased else None
        for size in (2 * intermediate, hidden)
    )
    unread = [
        held if scales is None else scales
        for held, scales in ((gate_up, gate_up_scales), (down, down_scales))
    ]
    unread += [bias for bias in (gate_up_bias, down_bias) if bias is not None]
    for expert in range(experts):
        if not (ids == expert).any():
            for held in unread:
                held[expert] = 255 if held.dtype == torch.uint8 else torch.nan
    orders = [
        torch.stack([torch.randperm(size, generator=random) for _ in range(experts)]).int()
        if ordered
        else None
        for size in (hidden, intermediate)
    ]
    scales = (gate_up_scales, down_scales)
    given = (
        *(x, gate_up, down, weights, ids, *scales, gate_up_bias, down_bias),
        *(*gating_arguments(activation), weighs_inputs, deterministic),
        *(gate_up_kind, down_kind, gate_up_offsets, down_offsets, *orders),
    )
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in given)


def _cost(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    alpha: float,
    limit: float,
    weighs_inputs: bool,
    deterministic: bool,
    gate_up_kind: int,
    down_kind: int,
    gate_up_offsets: Tensor | None = None,
    down_offsets: Tensor | None = None,
    gate_up_order: Tensor | None = None,
    down_order: Tensor | None = None,
) -> Cost:
    chosen = ids[(ids >= 0) & (ids < len(gate_up))]
    held = (
        *(gate_up, down, gate_up_scales, down_scales, gate_up_bias, down_bias),
        *(gate_up_offsets, down_offsets, gate_up_order, down_order),
    )
    of_one = sum(tensor[0].nbytes for tensor in held if tensor is not None)
    outputs = Matrix.of_kind(gate_up_kind, gate_up, gate_up_scales).outputs
    products = hidden.shape[1] * (outputs + outputs // 2)
    return Cost(
        bytes=of_one * len(chosen.unique()) + 2 * hidden.nbytes + weights.nbytes + ids.nbytes,
        flops=2 * products * chosen.numel(),
    )


EXPERTS = Op(
    "experts",
    "(Tensor hidden, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, "
    "Tensor? gate_up_scales, Tensor? down_scales, Tensor? gate_up_bias, Tensor? down_bias, "
    "int activation, float alpha, float limit, bool weighs_inputs, bool deterministic, "
    "int gate_up_kind, int down_kind, Tensor? gate_up_offsets=None, Tensor? down_offsets=None, "
    "Tensor? gate_up_order=None, Tensor? down_order=None) -> Tensor",
    reference=reference,
    fake=_fake,
    build=_build,
    cases=[
        {
            "tokens": tokens,
            "experts": experts,
            "chosen": chosen,
            "hidden": hidden,
            "intermediate": intermediate,
            "dtype": dtype,
            "weight": "same",
            "padding": padding,
            "activation": "gelu_tanh" if tokens == 2 else "silu",
            "deterministic": tokens == 33,
            "seed": tokens,
        }
        # One expert with all tokens, several with few tokens, and more tokens than a tile holds.
        for tokens, experts, chosen, hidden, intermediate, padding in [
            (1, 8, 2, 64, 48, 0),
            (2, 1, 1, 32, 16, 0),
            (7, 6, 6, 96, 40, 2),
            (33, 16, 4, 128, 64, 1),
            (200, 4, 2, 256, 32, 0),
        ]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    + [
        {
            "tokens": tokens,
            "experts": 8,
            "chosen": 2,
            "hidden": 192,
            "intermediate": 128,
            "dtype": dtype,
            "weight": weight,
            "padding": tokens // 7,
            "ordered": weight == "int4/64",
            "seed": tokens,
        }
        for tokens in (1, 7, 70)
        for dtype in (torch.float32, torch.bfloat16)
        for weight in (
            *("int8", "strips of int8", "strips of same", "float8", "float8/32", "e2m1/32"),
            *("int4/64", "int4/32 with bfloat16 offsets", "int8/16"),
            *("strips of int4/32 with offsets", "int8/32 with offsets"),
        )
        # In float32 an input of down that is rounded may fall to another step by its last bit.
        if dtype == torch.bfloat16
        or not weight.startswith("strips")
        or (weight == "strips of int8" and tokens < 70)
    ]
    + [
        # The limit is low enough that most gates and ups reach it.
        {
            "tokens": tokens,
            "experts": 8,
            "chosen": 2,
            "hidden": 192,
            "intermediate": 128,
            "dtype": dtype,
            "weight": weight,
            "padding": tokens // 7,
            "biased": True,
            "activation": ClampedSwiglu(1.702, 0.7),
            "weighs_inputs": tokens != 7,
            "seed": tokens,
        }
        for tokens, dtype, weight in [
            (1, torch.float32, "same"),
            (7, torch.float32, "same"),
            (70, torch.float32, "same"),
            (7, torch.bfloat16, "same"),
            (70, torch.bfloat16, "same"),
            (7, torch.float16, "same"),
            (9, torch.float32, "int8"),
            (9, torch.bfloat16, "strips of same"),
            (70, torch.bfloat16, "strips of int8"),
            (1, torch.float32, "e2m1/32"),
            (9, torch.bfloat16, "e2m1/32"),
            (70, torch.float16, "e2m1/32"),
        ]
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.triton.experts:run"},
)


def experts(
    hidden: Tensor,
    gate_up: Operand,
    down: Operand,
    weights: Tensor,
    ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Gating = "silu",
    weighs_inputs: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """`sum_j weights[t, j] * down[e] @ (act(gate[e] @ x) * (up[e] @ x))`, with `e = ids[t, j]`.

    Each projection is summed in float32 and rounded once to hidden's dtype, as `linear` does. The
    gate's activation and its product with up are computed in float32 and rounded once. So is the
    sum of a token's k results, in the order of j.

    With `weighs_inputs`, the weight is a factor of x and not of the result (Llama 4): the sum is
    of `down[e] @ (act(gate[e] @ y) * (up[e] @ y))`, where y is `weights[t, j] * x`, rounded.

    Parameters
        hidden: [T, H] float32, bfloat16 or float16, last dimension contiguous.
        gate_up: A stack of matrices [E, 2 I, H], plain ones in hidden's dtype. Each expert has I
            rows of the gate, then I rows of up. In tiles, I must be a multiple of 64. A tensor is
            a stack of plain matrices in rows.
        down: A stack of matrices [E, H, I], likewise.
        weights: [T, k] float32.
        ids: [T, k] int64, contiguous. An invalid expert number, such as -1, adds nothing; weights
            and hidden may hold anything there. Padding uses this so that no expert is read for it.
        gate_up_bias: [E, 2 I] in hidden's dtype, contiguous; None for no bias.
        down_bias: [E, H], likewise.
        activation: How gate and up are joined.
        weighs_inputs: Whether weights are factors of the experts' inputs.
        deterministic: Whether a token's result has the same bits whatever else is in the batch. The
            compiled CPU kernel always guarantees it, the Triton kernel on request, the reference
            never.

    Returns
        [T, H] in hidden's dtype.
    """
    up, last = as_matrix(gate_up), as_matrix(down)
    result: Tensor = EXPERTS.overload(
        *(hidden, up.values, last.values, weights, ids),
        *(up.scales, last.scales, gate_up_bias, down_bias),
        *(*gating_arguments(activation), weighs_inputs, deterministic, up.kind, last.kind),
        *(up.offsets, last.offsets, up.order, last.order),
    )
    return result
