"""Min-p, top-k and top-p without sorting the vocabulary.

All three keep a token if and only if its logit is at least a threshold of its row, so tokens with
equal logits are kept or dropped together and the result does not depend on any order:

- min-p keeps v where p(v) >= min_p * max p;
- top-k keeps v where fewer than k tokens are strictly likelier;
- top-p keeps v where strictly likelier tokens have less than top_p of the mass that min-p and
  top-k left.

Without ties at the threshold these are the sets that sorting gives. Masses are integers (weights
relative to the maximum, in units of 2**-34), so their sums are exact in any order, and the kept set
of a row does not depend on its batch. For the same reason the algorithm for a row depends only on
the row's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Up to this k torch.topk selects the k largest values of a row, sorted, and top-p uses only those.
# Above it, or without top-k, thresholds are found in the whole row: on a GPU by radix selection,
# which never waits for the device, on the CPU by faster methods that read the data.
MAX_SHORT_K = 1024

# Weights are at most 1. 2**18 tokens of 2**34 units add up to 2**52, which float64 holds exactly.
_UNITS_PER_WEIGHT = 2.0**34

# (shift, bits) of the digits of a 32-bit key, from the most significant.
_DIGITS = ((21, 11), (10, 11), (0, 10))


@dataclass(frozen=True)
class Truncation:
    """Parameters of ``n`` rows with the same kind of truncation.

    Attributes
    ----------
    temperatures
        [n, 1] float32, over 0.
    min_p_offsets
        [n, 1] float32: temperature * log(min_p), -inf where off; ``None`` if off everywhere.
    top_k
        [n, 1] int64, 0 where off; ``None`` if off everywhere.
    max_top_k
        The largest k, on the host.
    top_p
        [n, 1] float64, 1 where off; ``None`` if off everywhere.
    """

    temperatures: Tensor
    min_p_offsets: Tensor | None
    top_k: Tensor | None
    max_top_k: int
    top_p: Tensor | None

    def part(self, rows: slice) -> Truncation:
        """The parameters of some of the rows."""
        return Truncation(
            self.temperatures[rows],
            None if self.min_p_offsets is None else self.min_p_offsets[rows],
            None if self.top_k is None else self.top_k[rows],
            self.max_top_k,
            None if self.top_p is None else self.top_p[rows],
        )


def is_short(top_k: int) -> bool:
    """Whether a row with this k is truncated by :func:`truncate_short`."""
    return 0 < top_k <= MAX_SHORT_K


def truncate_min_p(logits: Tensor, rows: Truncation) -> None:
    """Min-p only. Sets dropped tokens of ``logits`` [n, V] float32 to -inf, in place."""
    floor = _floor(logits.amax(1, keepdim=True), rows)
    logits.masked_fill_(logits < floor, -torch.inf)


def truncate_short(logits: Tensor, rows: Truncation) -> None:
    """Top-k with k up to ``MAX_SHORT_K`` in every row, with min-p and top-p, in place."""
    assert rows.top_k is not None
    largest = logits.topk(rows.max_top_k).values  # [n, K] float32, descending
    kth = largest.gather(1, rows.top_k - 1)  # [n, 1]
    floor = torch.maximum(_floor(largest[:, :1], rows), kth)
    threshold = floor
    if rows.top_p is not None:
        index = torch.arange(rows.max_top_k, device=logits.device)  # [K]
        kept = (index < rows.top_k) & (largest >= floor)  # [n, K]
        # In float64 the weight of a token does not depend on the tensor's shape.
        exponents = (largest - largest[:, :1]).double() / rows.temperatures.double()
        masses = _to_units(torch.where(kept, exponents.exp(), 0.0))  # [n, K] int64
        # Tokens tied with the k-th that are not among the first k count as well.
        tied = (logits >= kth).sum(1, keepdim=True, dtype=torch.int32) - rows.top_k
        kth_mass = masses.gather(1, rows.top_k - 1)
        target = rows.top_p * (masses.sum(1, keepdim=True) + tied * kth_mass).double()
        before = masses.cumsum(1) - masses
        # Of equal logits only the first must pass: the mass before it is the strictly larger mass.
        last = ((before < target) & (masses > 0)).sum(1, keepdim=True) - 1
        lowest = largest.gather(1, last.clamp_(min=0))
        threshold = torch.where(rows.top_p < 1.0, lowest, floor)
    logits.masked_fill_(logits < threshold, -torch.inf)


def truncate_long(logits: Tensor, rows: Truncation) -> None:
    """Any combination of min-p, top-k and top-p, in place."""
    if logits.device.type != "cpu":
        _truncate_long(logits, rows, kth_by_radix, lowest_by_radix)
        return
    for index in range(len(logits)):  # a row at a time stays in the cache
        row = slice(index, index + 1)
        _truncate_long(logits[row], rows.part(row), kth_by_selection, lowest_by_pruning)


def _truncate_long(
    logits: Tensor,
    rows: Truncation,
    kth: Callable[[Tensor, Tensor], Tensor],
    lowest: Callable[[Tensor, Tensor], Tensor],
) -> None:
    maxima = logits.amax(1, keepdim=True)
    floor = _floor(maxima, rows)
    if rows.top_k is not None:
        kth_logits = kth(logits, rows.top_k)
        floor = torch.where(rows.top_k > 0, torch.maximum(floor, kth_logits), floor)
    dropped = logits < floor
    if rows.top_p is not None:
        weights = logits.sub(maxima).div_(rows.temperatures).exp_()  # [n, V] float32
        weights.masked_fill_(dropped, 0.0).nan_to_num_(0.0)
        dropped |= (weights < lowest(weights, rows.top_p)) & (rows.top_p < 1.0)
    logits.masked_fill_(dropped, -torch.inf)


def kth_by_selection(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest logit [1, 1] of one row [1, V]. Reads ``top_k``, so only for the CPU."""
    k = int(top_k)
    if not k:
        return logits.new_full((1, 1), -torch.inf)
    return logits.kthvalue(logits.shape[1] - k + 1, keepdim=True).values


def lowest_by_pruning(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight [1, 1] that top-p keeps of one row [1, V]. Reads it: only for the CPU.

    Let D be the mass that may be dropped. All tokens with less than D / V together have less than
    D, so all of them are dropped. Only the others, typically few, are sorted.
    """
    total = int(_to_units(weights).sum())
    target = float(top_p) * float(total)
    row = weights[0].numpy()  # its sort is many times faster than torch's
    bound = (total - target) / _UNITS_PER_WEIGHT / len(row)
    candidates = np.sort(row[row >= bound * (1 - 1e-6)])[::-1]  # safe against rounding to float32
    masses = (candidates * np.float32(_UNITS_PER_WEIGHT)).astype(np.int64)
    before = np.cumsum(masses) - masses
    # Of equal weights only the first must pass: the mass before it is the strictly larger mass.
    count = int(np.count_nonzero((before < target) & (masses > 0)))
    return weights.new_full((1, 1), float(candidates[count - 1]) if count else 0.0)


def kth_by_radix(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest logit of each row [n, V], by ``top_k`` [n, 1] int64; [n, 1]."""
    keys = _sortable(logits)
    return _from_sortable(_lowest_kept(keys, torch.ones_like(keys), top_k.double()))


def lowest_by_radix(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight of each row [n, V] that top-p keeps, by ``top_p`` [n, 1] float64; [n, 1].

    ``weights`` are float32 in [0, 1].
    """
    masses = _to_units(weights)
    target = top_p * masses.sum(1, keepdim=True).double()
    # Bits of a non-negative float order like the float itself.
    lowest = _lowest_kept(weights.view(torch.int32).long(), masses, target)
    return lowest.to(torch.int32).view(torch.float32)


def _floor(maxima: Tensor, rows: Truncation) -> Tensor:
    """[n, 1] float32: the smallest logit that min-p keeps; NaN, which drops nothing, for NaN."""
    if rows.min_p_offsets is None:
        return torch.full_like(maxima, -torch.inf)
    return maxima + rows.min_p_offsets


def _to_units(weights: Tensor) -> Tensor:
    """int64 masses of weights in [0, 1]."""
    return (weights * _UNITS_PER_WEIGHT).long()


def _lowest_kept(keys: Tensor, masses: Tensor, target: Tensor) -> Tensor:
    """The smallest key with mass for which all larger keys together have less mass than ``target``.

    A radix selection by mass: three histograms, from the most significant digit of the keys on,
    each within the bucket that the previous one has chosen.

    Parameters
    ----------
    keys
        [n, V] int64 in [0, 2**32).
    masses
        [n, V] int64, at least 0.
    target
        [n, 1] float64. If nothing has mass, the result is 0.

    Returns
    -------
    [n, 1] int64
    """
    above = torch.zeros_like(target, dtype=torch.int64)  # mass of keys over the chosen bucket
    prefix = torch.zeros_like(above)  # digits chosen so far
    for shift, bits in _DIGITS:
        digits = keys >> shift  # [n, V], the chosen digits and this one
        in_bucket = torch.where(digits >> bits == prefix, masses, 0) if shift < 21 else masses
        histogram = torch.zeros(len(keys), 1 << bits, dtype=torch.int64, device=keys.device)
        histogram.scatter_add_(1, digits & ((1 << bits) - 1), in_bucket)
        up_to = histogram.cumsum(1)
        larger = above + up_to[:, -1:] - up_to  # mass of keys over each bucket
        digit = ((histogram > 0) & (larger < target)).byte().argmax(1, keepdim=True)
        above = larger.gather(1, digit)
        prefix = (prefix << bits) | digit
    return prefix


def _sortable(values: Tensor) -> Tensor:
    """float32 to int64 keys in [0, 2**32) of the same order."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + 2**31)


def _from_sortable(keys: Tensor) -> Tensor:
    bits = torch.where(keys < 2**31, -1 - keys, keys - 2**31)
    return bits.to(torch.int32).view(torch.float32)
