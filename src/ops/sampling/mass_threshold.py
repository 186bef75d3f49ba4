"""The value down to which the largest values of a row have a given mass, without sorting.

Top-p, top-k and locally typical sampling all keep the tokens from such a threshold on. Masses are
integers, so that their sums are exact in any order, and a row's threshold is the same in any batch
and by any kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.declaration import Cost, Op
from src.ops.records import Record, result, tensor

UNITS_PER_WEIGHT = 2.0**34
"""Weights are at most 1. 2**18 tokens of 2**34 units add up to 2**52, which float64 holds exactly.
"""

# (shift, bits) of the digits of a 32-bit key, from the most significant.
_DIGITS = ((21, 11), (10, 11), (0, 10))


class MassThreshold(Record, result=result("thresholds", "rows", like="values")):
    """The smallest value with mass such that all larger values together have less than `target`.

    Equal values are kept or dropped together. The order of values is that of floating-point
    numbers, with -0 below 0 and NaNs at both ends by their sign.

    Attributes
    ----------
    values
        [S, V] float32, V up to 2**18; the last dimension is contiguous.
    weights
        [S, V] float32 in [0, 1]: the mass of each value, cut off to a multiple of 2**-34. None:
        each value has the mass 1.
    shares
        [S] float64. With weights, `target` is this share of the row's mass, up to 1; without, it is
        the target itself, up to V.

    Returns
    -------
    [S] float32; NaN for a row whose target is 0, for example because nothing has mass.
    """

    values: Tensor = tensor("rows vocab_size", torch.float32, rows=True)
    weights: Tensor | None = tensor("rows vocab_size", torch.float32, rows=True)
    shares: Tensor = tensor("rows", torch.float64)


def to_units(weights: Tensor) -> Tensor:
    """int64 masses of weights in [0, 1]."""
    return (weights * UNITS_PER_WEIGHT).long()


def reference(call: MassThreshold) -> Tensor:
    """See `MassThreshold`.

    A radix selection by mass: three histograms, from the most significant digit of the keys on,
    each within the bucket that the previous one has chosen.
    """
    keys = _sortable(call.values)  # [S, V] int64
    target = call.shares[:, None]  # [S, 1] float64
    if call.weights is None:
        masses = torch.ones_like(keys)
    else:
        masses = to_units(call.weights)
        target = target * masses.sum(1, keepdim=True).double()
    above = torch.zeros_like(target, dtype=torch.int64)  # mass of keys over the chosen bucket
    prefix = torch.zeros_like(above)  # digits chosen so far
    for shift, bits in _DIGITS:
        digits = keys >> shift  # [S, V], the chosen digits and this one
        in_bucket = torch.where(digits >> bits == prefix, masses, 0) if shift < 21 else masses
        histogram = torch.zeros(len(keys), 1 << bits, dtype=torch.int64, device=keys.device)
        histogram.scatter_add_(1, digits & ((1 << bits) - 1), in_bucket)
        up_to = histogram.cumsum(1)
        larger = above + up_to[:, -1:] - up_to  # mass of keys over each bucket
        digit = ((histogram > 0) & (larger < target)).byte().argmax(1, keepdim=True)
        above = larger.gather(1, digit)
        prefix = (prefix << bits) | digit
    return torch.where(target > 0, _from_sortable(prefix), torch.nan).squeeze(1)


def _sortable(values: Tensor) -> Tensor:
    """float32 to int64 keys in [0, 2**32) of the same order."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + 2**31)


def _from_sortable(keys: Tensor) -> Tensor:
    bits = torch.where(keys < 2**31, -1 - keys, keys - 2**31)
    return bits.to(torch.int32).view(torch.float32)


def _build(
    device: str,
    *,
    rows: int,
    vocab_size: int,
    share: float | None = None,
    weighs: bool = True,
    apart: bool = False,
    spread: float = 3.0,
    seed: int = 0,
) -> MassThreshold:
    """Random weights, some equal and some without mass; `share=None` gives each row another.

    `weighs=False` is top-k; `apart` ranks by other values than the weights, negative ones too.
    """
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=random) * spread
    # Ties, and a vocabulary of which much is banned.
    logits = logits.mul(4).round().div(4) if seed % 2 else logits
    logits[torch.rand(rows, vocab_size, generator=random) < 0.2] = -torch.inf
    weights = (logits - logits.amax(1, keepdim=True)).exp().nan_to_num_(0.0)
    values = weights
    if apart or not weighs:
        values = torch.randn(rows, vocab_size, generator=random).mul(8).round().div(4)
    shares = torch.rand(rows, generator=random).double().clamp(1e-30)
    if share is not None:
        shares = torch.full((rows,), share, dtype=torch.float64)
    if not weighs:
        shares = (shares * vocab_size).ceil()
    return MassThreshold(
        values=values.to(device),
        weights=weights.to(device) if weighs else None,
        shares=shares.to(device),
    )


def _cost(call: MassThreshold) -> Cost:
    # Read once, at least.
    tensors = 1 if call.weights is None or call.weights is call.values else 2
    size = call.values.numel()
    return Cost(bytes=tensors * size * 4 + 12 * len(call.shares), flops=size)


MASS_THRESHOLD = Op(
    "mass_threshold",
    MassThreshold,
    reference=reference,
    build=_build,
    cases=[
        *(
            {"rows": rows, "vocab_size": vocab_size, "spread": spread, "seed": rows + vocab_size}
            for rows, vocab_size in [(1, 1), (4, 3), (5, 257), (8, 1000), (3, 32000)]
            for spread in (0.1, 3.0, 30.0)
        ),
        *(
            {"rows": 3, "vocab_size": 300, "share": share, "seed": seed}
            for seed, share in enumerate((1e-30, 0.5, 1.0))
        ),
        *({"rows": 3, "vocab_size": 2049, "apart": True, "seed": seed} for seed in (0, 1)),
        *({"rows": 4, "vocab_size": 5000, "weighs": False, "seed": seed} for seed in (0, 1)),
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.sampling.mass_threshold_triton:run"},
)

mass_threshold = MASS_THRESHOLD.function
"""The op as a function of the fields of `MassThreshold`."""
