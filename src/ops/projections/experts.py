"""`experts`: the feed-forward layer of a mixture of experts.

Each token is computed by k of E experts, and only the weights of chosen experts are read. So one
token costs as much as reading k experts, and many tokens cost as much as E dense layers. The
(token, expert) pairs are sorted by expert, each expert is multiplied by all of its tokens at once,
and a token's k results are summed in order of rank j. There are no atomic additions, so the order
of every sum is fixed. `route` chooses the experts beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from src.ops.declaration import Cost, Op
from src.ops.matrix import Matrix
from src.ops.projections.linear import LINEAR, Linear, multiply
from src.ops.projections.matrix_field import MatrixField
from src.ops.records import Record, nested, number, result, tensor

ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1}
"""Activation of the gate -> the number that kernels know it by."""
_NAMES: Final = {number: name for name, number in ACTIVATIONS.items()}
CLAMPED_SWIGLU: Final = 2
"""The number of `ClampedSwiglu`."""
PAIRS_OF_A_CROWD: Final = 16
"""With more pairs per expert on average, the kernels for GPUs take large tiles."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, as in gpt-oss.

    Attributes
    ----------
    alpha
        Factor of the gate within the sigmoid.
    limit
        The gate is at most `limit`; up lies within `[-limit, limit]`.
    """

    alpha: float
    limit: float


Gating: TypeAlias = "str | ClampedSwiglu"
"""How gate and up are joined: a key of `ACTIVATIONS` means `act(gate) * up`."""


def gating_arguments(gating: Gating) -> tuple[int, float, float]:
    """The flat arguments `activation`, `alpha` and `limit`."""
    if isinstance(gating, ClampedSwiglu):
        return CLAMPED_SWIGLU, gating.alpha, gating.limit
    return ACTIVATIONS[gating], 1.0, 0.0


class _GatingParts:
    """How a `Gating` is flattened; see `records.NestedField`."""

    PARTS: Final = (("activation", "int"), ("alpha", "float"), ("limit", "float"))
    parts = staticmethod(gating_arguments)

    @staticmethod
    def of(activation: int, alpha: float, limit: float) -> Gating:
        if activation == CLAMPED_SWIGLU:
            return ClampedSwiglu(alpha, limit)
        return _NAMES[activation]


class Experts(Record, result=result("out", "tokens hidden", like="x")):
    """`sum_j weights[t, j] * down[e] @ (act(gate[e] @ x) * (up[e] @ x))`, with `e = ids[t, j]`.

    Each projection is summed in float32 and rounded once to x's dtype, as `linear` does. The gate's
    activation and its product with up are computed in float32 and rounded once. So is the sum of a
    token's k results, in the order of j.

    With `weighs_inputs`, the weight is a factor of x and not of the result (Llama 4): the sum is
    of `down[e] @ (act(gate[e] @ y) * (up[e] @ y))`, where y is `weights[t, j] * x`, rounded.

    Attributes
    ----------
    x
        [T, H] float32, bfloat16 or float16, last dimension contiguous.
    gate_up
        A stack of matrices [E, 2 I, H], plain ones in x's dtype. Each expert has I rows of the
        gate, then I rows of up. In tiles, I must be a multiple of 64.
    down
        A stack of matrices [E, H, I], likewise.
    weights
        [T, k] float32.
    ids
        [T, k] int64, contiguous. An invalid expert number, such as -1, adds nothing; weights and x
        may hold anything there. Padding uses this so that no expert is read for it.
    gate_up_bias
        [E, 2 I] in x's dtype, contiguous; None for no bias.
    down_bias
        [E, H], likewise.
    activation
        How gate and up are joined.
    weighs_inputs
        Whether weights are factors of the experts' inputs.
    deterministic
        Whether a token's result has the same bits whatever else is in the batch. The compiled CPU
        kernel always guarantees it, the Triton kernel on request, the reference never.

    Returns
    -------
    [T, H] in x's dtype.
    """

    x: Tensor = tensor("tokens hidden", rows=True)
    gate_up: Matrix = nested(
        by=MatrixField(
            "gate_up", "experts 2*intermediate hidden", prefix="gate_up_", is_ordered=True
        )
    )
    down: Matrix = nested(
        by=MatrixField("down", "experts hidden intermediate", prefix="down_", is_ordered=True)
    )
    weights: Tensor = tensor("tokens chosen", torch.float32)
    ids: Tensor = tensor("tokens chosen", torch.int64)
    gate_up_bias: Tensor | None = tensor("experts 2*intermediate", default=None)
    down_bias: Tensor | None = tensor("experts hidden", default=None)
    activation: Gating = nested(by=_GatingParts, default="silu")
    weighs_inputs: bool = number(default=False)
    deterministic: bool = number(on_cpu=False, default=False)


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


def reference(call: Experts) -> Tensor:
    """See `Experts`."""
    hidden, weights, ids = call.x, call.weights, call.ids
    count = len(call.gate_up.values)
    joining = gating_arguments(call.activation)
    results = hidden.new_zeros((*ids.shape, hidden.shape[1]))  # [T, k, H]
    for expert in ids.unique().tolist():
        if not 0 <= expert < count:
            continue
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        x = hidden[tokens]
        if call.weighs_inputs:
            x = (x.float() * weights[tokens, slots, None]).to(x.dtype)
        projected = _multiply(x, call.gate_up.of(expert), _of(call.gate_up_bias, expert))
        results[tokens, slots] = _multiply(
            activate(projected, *joining), call.down.of(expert), _of(call.down_bias, expert)
        )
    return combine(results, None if call.weighs_inputs else weights, ids, count)


def _of(tensor: Tensor | None, expert: int) -> Tensor | None:
    return None if tensor is None else tensor[expert]


def _multiply(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    if matrix.order is not None:
        x, matrix = x[:, matrix.order.long()], matrix._replace(order=None)
    return multiply(x, matrix, bias)


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
    -------
    [T * k] int64, the pairs' indices into the flattened ids [T, k], pairs without an expert last;
    and [E] int32, where each expert's pairs end.
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


def _matrices(
    count: int, outputs: int, inputs: int, dtype: torch.dtype, weight: str, seed: int
) -> Matrix:
    """A stack of those of so many layers."""
    layers: list[Matrix] = [
        Linear.of_flat(
            *LINEAR.build(
                "cpu",
                tokens=0,
                inputs=inputs,
                outputs=outputs,
                dtype=dtype,
                weight=weight,
                seed=seed * count + expert,
            )
        ).weight
        for expert in range(count)
    ]
    stacked: dict[str, Any] = {
        name: torch.stack([each.tensors()[name] for each in layers]) for name in layers[0].tensors()
    }
    return layers[0]._replace(**stacked)


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
) -> Experts:
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
    gate_up = _matrices(experts, 2 * intermediate, hidden, dtype, weight, seed)
    down = _matrices(experts, hidden, intermediate, dtype, weight, seed + 1)
    gate_up_bias, down_bias = (
        torch.randn(experts, size, generator=random).to(dtype) if biased else None
        for size in (2 * intermediate, hidden)
    )
    unread = [each.values if each.scales is None else each.scales for each in (gate_up, down)]
    unread += [bias for bias in (gate_up_bias, down_bias) if bias is not None]
    for expert in range(experts):
        if not (ids == expert).any():
            for held in unread:
                held[expert] = 255 if held.dtype == torch.uint8 else torch.nan
    if ordered:
        gate_up, down = (
            each._replace(
                order=torch.stack(
                    [torch.randperm(size, generator=random) for _ in range(experts)]
                ).int()
            )
            for each, size in ((gate_up, hidden), (down, intermediate))
        )
    return Experts(
        x=x.to(device),
        gate_up=gate_up.map(lambda each: each.to(device)),
        down=down.map(lambda each: each.to(device)),
        weights=weights.to(device),
        ids=ids.to(device),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.to(device),
        down_bias=None if down_bias is None else down_bias.to(device),
        activation=activation,
        weighs_inputs=weighs_inputs,
        deterministic=deterministic,
    )


def _cost(call: Experts) -> Cost:
    x, ids, gate_up, down = call.x, call.ids, call.gate_up, call.down
    chosen = ids[(ids >= 0) & (ids < len(gate_up.values))]
    held = [*gate_up.tensors().values(), *down.tensors().values()]
    held += [bias for bias in (call.gate_up_bias, call.down_bias) if bias is not None]
    of_one = sum(each[0].nbytes for each in held)
    products = x.shape[1] * (gate_up.outputs + gate_up.outputs // 2)
    moved = 2 * x.nbytes + call.weights.nbytes + ids.nbytes
    return Cost(bytes=of_one * len(chosen.unique()) + moved, flops=2 * products * chosen.numel())


EXPERTS = Op(
    "experts",
    Experts,
    reference=reference,
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
    lazy={"cuda": "src.ops.projections.experts_triton:run"},
)

experts = EXPERTS.function
"""The op as a function of the fields of `Experts`."""
