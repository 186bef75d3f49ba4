"""Truncations of a row's distribution, without sorting the vocabulary.

All but one keep a token if and only if its logit is at least a threshold of its row, so tokens with
equal logits are kept or dropped together and the result does not depend on any order:

- top-n-sigma keeps v where its logit is at least max - n * sigma, of logits that are not banned;
- min-p keeps v where p(v) >= min_p * max p;
- top-k keeps v where fewer than k tokens are strictly likelier;
- top-p keeps v where strictly likelier tokens have less than top_p of the mass that those before it
  left.

Locally typical sampling comes before top-p. It ranks tokens by how far their surprise -log p is
from its mean, the entropy, and keeps v where the strictly more typical ones have less than
typical_p of the mass that those before it left. So it may drop the likeliest tokens.

Without ties at the threshold these are the sets that sorting gives. Masses are integers (weights
relative to the maximum, in units of 2**-34), so their sums are exact in any order, and the kept set
of a row does not depend on its batch. Deviations are summed in float64 in one fixed order. For the
same reason the algorithm for a row depends only on the row's own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from src.core.sampling_params import SamplingParams
from src.engine.sampling.logits import BANNED
from src.ops.sampling.mass_threshold import UNITS_PER_WEIGHT, mass_threshold, to_units

# Up to this k torch.topk selects the k largest values of a row, sorted, and top-p uses only those.
# Above it, or without top-k, thresholds are found in the whole row: on a GPU by `mass_threshold`,
# which never waits for the device, on the CPU by faster methods that read the data.
MAX_SHORT_K = 1024

# A top_p or typical_p of 0 keeps the first token, as the smallest positive value does.
_LEAST_MASS = 1e-30


@dataclass(frozen=True)
class Column:
    """One number of a row in the device's table.

    Attributes
    ----------
    name
        Of the field of `Truncation` that it becomes.
    off
        Its value where it drops nothing.
    value
        Its value for a request that is not greedy.
    """

    name: str
    off: float
    value: Callable[[SamplingParams], float]


def _min_p_offset(params: SamplingParams) -> float:
    return params.temperature * math.log(params.min_p) if params.min_p else -math.inf


COLUMNS = (
    Column("top_p", 1.0, lambda params: max(params.top_p, _LEAST_MASS)),
    Column("min_p_offsets", -math.inf, _min_p_offset),
    Column("top_n_sigma", 0.0, lambda params: params.top_n_sigma),
    Column("typical_p", 1.0, lambda params: max(params.typical_p, _LEAST_MASS)),
)
# A row's numbers where nothing of COLUMNS is asked for.
OFF = tuple(column.off for column in COLUMNS)


def numbers_of(params: SamplingParams) -> tuple[float, ...]:
    """A row's numbers, in the order of ``COLUMNS``; a greedy row keeps its likeliest token."""
    return OFF if params.is_greedy else tuple(column.value(params) for column in COLUMNS)


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
    top_n_sigma
        [n, 1] float64, 0 where off; ``None`` if off everywhere.
    typical_p
        [n, 1] float64, 1 where off; ``None`` if off everywhere.
    """

    temperatures: Tensor
    min_p_offsets: Tensor | None
    top_k: Tensor | None
    max_top_k: int
    top_p: Tensor | None
    top_n_sigma: Tensor | None = None
    typical_p: Tensor | None = None

    @classmethod
    def of(
        cls,
        temperatures: Tensor,
        top_k: Tensor,
        numbers: Tensor,
        asking: Sequence[tuple[int, tuple[float, ...]]],
    ) -> Truncation:
        """The parameters of rows with the same path.

        Parameters
        ----------
        temperatures, top_k
            [n] float32 and int64.
        numbers
            [n, C] float64: the columns of ``COLUMNS``.
        asking
            The same on the host: (top_k, numbers) of each row. A parameter that none asks for costs
            nothing.
        """
        columns = zip(*(given for _, given in asking), strict=True)
        asked = {
            column.name: numbers[:, index, None]
            for index, (column, values) in enumerate(zip(COLUMNS, columns, strict=True))
            if any(value != column.off for value in values)
        }
        offsets = asked.pop("min_p_offsets", None)
        max_top_k = max(k for k, _ in asking)
        return cls(
            temperatures=temperatures[:, None],
            min_p_offsets=None if offsets is None else offsets.float(),
            top_k=top_k[:, None] if max_top_k else None,
            max_top_k=max_top_k,
            top_p=asked.pop("top_p", None),
            **asked,
        )

    def part(self, rows: slice) -> Truncation:
        """The parameters of some of the rows."""
        parts: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in parts.items():
            if isinstance(value, Tensor):
                parts[name] = value[rows]
        return Truncation(**parts)


Path: TypeAlias = Callable[[Tensor, Truncation], None]


def path_of(top_k: int, numbers: tuple[float, ...]) -> Path | None:
    """What truncates a row with these parameters; ``None`` if none drops anything."""
    asked = {
        column.name for column, value in zip(COLUMNS, numbers, strict=True) if value != column.off
    }
    if is_short(top_k) and "typical_p" not in asked:
        return truncate_short
    if top_k or asked & {"top_p", "typical_p"}:
        return truncate_long
    return truncate_by_floor if asked else None


def is_short(top_k: int) -> bool:
    """Whether the k likeliest tokens are selected by `topk`."""
    return 0 < top_k <= MAX_SHORT_K


def truncate_by_floor(logits: Tensor, rows: Truncation) -> None:
    """Min-p and top-n-sigma only. Sets dropped tokens of [n, V] float32 to -inf, in place."""
    floor = _floor(logits, logits.amax(1, keepdim=True), rows)
    logits.masked_fill_(logits < floor, -torch.inf)


def truncate_short(logits: Tensor, rows: Truncation) -> None:
    """Top-k with k up to ``MAX_SHORT_K`` in every row, with any but typical-p, in place."""
    assert rows.top_k is not None
    largest = logits.topk(rows.max_top_k).values  # [n, K] float32, descending
    kth = largest.gather(1, rows.top_k - 1)  # [n, 1]
    floor = torch.maximum(_floor(logits, largest[:, :1], rows), kth)
    threshold = floor
    if rows.top_p is not None:
        index = torch.arange(rows.max_top_k, device=logits.device)  # [K]
        kept = (index < rows.top_k) & (largest >= floor)  # [n, K]
        # In float64 the weight of a token does not depend on the tensor's shape.
        exponents = (largest - largest[:, :1]).double() / rows.temperatures.double()
        masses = to_units(torch.where(kept, exponents.exp(), 0.0))  # [n, K] int64
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
    """Any combination of all parameters, in place."""
    if logits.device.type != "cpu":
        _truncate_long(logits, rows, kth_by_mass, lowest_by_mass, farthest_by_mass)
        return
    for index in range(len(logits)):  # a row at a time stays in the cache
        row = slice(index, index + 1)
        part = rows.part(row)
        _truncate_long(logits[row], part, kth_by_selection, lowest_by_pruning, farthest_by_sorting)


def warm_up(logits: Tensor) -> None:
    """Run every kernel that truncates rows of logits [n, V] float32, which are overwritten.

    Off the CPU; there are none on it.
    """
    asked = torch.ones(len(logits), 1, dtype=torch.float64, device=logits.device)
    rows = Truncation(
        temperatures=asked.float(),
        min_p_offsets=None,
        top_k=asked.long(),
        max_top_k=MAX_SHORT_K + 1,
        top_p=asked,
        typical_p=asked,
    )
    truncate_long(logits, rows)


def _truncate_long(
    logits: Tensor,
    rows: Truncation,
    kth: Callable[[Tensor, Tensor], Tensor],
    lowest: Callable[[Tensor, Tensor], Tensor],
    farthest: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    maxima = logits.amax(1, keepdim=True)
    floor = _floor(logits, maxima, rows)
    if rows.top_k is not None:
        kth_logits = kth(logits, rows.top_k)
        floor = torch.where(rows.top_k > 0, torch.maximum(floor, kth_logits), floor)
    dropped = logits < floor
    if rows.top_p is not None or rows.typical_p is not None:
        weights = logits.sub(maxima).div_(rows.temperatures).exp_()  # [n, V] float32
        weights.masked_fill_(dropped, 0.0).nan_to_num_(0.0)
    if rows.typical_p is not None:
        distances = _distances(maxima.sub(logits).div_(rows.temperatures), weights)
        most = farthest(distances, weights, rows.typical_p)
        dropped |= (distances > most) & (rows.typical_p < 1.0)
        weights.masked_fill_(dropped, 0.0)
    if rows.top_p is not None:
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
    total = int(to_units(weights).sum())
    target = float(top_p) * float(total)
    row = weights[0].numpy()  # its sort is many times faster than torch's
    bound = (total - target) / UNITS_PER_WEIGHT / len(row)
    candidates = np.sort(row[row >= bound * (1 - 1e-6)])[::-1]  # safe against rounding to float32
    masses = (candidates * np.float32(UNITS_PER_WEIGHT)).astype(np.int64)
    before = np.cumsum(masses) - masses
    # Of equal weights only the first must pass: the mass before it is the strictly larger mass.
    count = int(np.count_nonzero((before < target) & (masses > 0)))
    return weights.new_full((1, 1), float(candidates[count - 1]) if count else 0.0)


def kth_by_mass(logits: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest logit of each row [n, V], by ``top_k`` [n, 1] int64; [n, 1]."""
    return _threshold(logits, None, top_k.double())


def lowest_by_mass(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight of each row [n, V] that top-p keeps, by ``top_p`` [n, 1] float64; [n, 1].

    ``weights`` are float32 in [0, 1]. NaN, which drops nothing, where nothing has mass.
    """
    return _threshold(weights, weights, top_p)


def farthest_by_sorting(distances: Tensor, weights: Tensor, typical_p: Tensor) -> Tensor:
    """The largest distance [1, 1] that typical-p keeps of one row [1, V]. Only for the CPU."""
    masses = to_units(weights)[0].numpy()
    heavy = np.flatnonzero(masses)
    distance = distances[0].numpy()[heavy]
    order = np.argsort(distance, kind="stable")
    mass = masses[heavy][order]
    before = np.cumsum(mass) - mass
    # Of equal distances only the first must pass: before it lies the strictly nearer mass.
    count = int(np.count_nonzero(before < float(typical_p) * float(mass.sum())))
    farthest = float(distance[order[count - 1]]) if count else math.inf
    return distances.new_full((1, 1), farthest)


def farthest_by_mass(distances: Tensor, weights: Tensor, typical_p: Tensor) -> Tensor:
    """The largest distance [n, 1] that typical-p keeps of each row.

    ``distances`` and ``weights`` are [n, V] float32, at least 0; ``typical_p`` is [n, 1] float64.
    """
    return -_threshold(-distances, weights, typical_p)


def _threshold(values: Tensor, weights: Tensor | None, shares: Tensor) -> Tensor:
    return mass_threshold(values, weights, shares.flatten().contiguous())[:, None]


def _distances(surprises: Tensor, weights: Tensor) -> Tensor:
    """How far each token's surprise is from the entropy, [n, V] float32; inf without mass.

    Parameters
    ----------
    surprises
        [n, V] float32: -log p, without what is the same for all tokens of a row.
    weights
        [n, V] float32: relative to the likeliest token's, 0 where dropped.
    """
    masses = to_units(weights)
    # A weight times its surprise is at most 1/e.
    parts = to_units((weights * surprises).nan_to_num_(0.0))
    mean = parts.sum(1, keepdim=True).double() / masses.sum(1, keepdim=True).double()
    distances = (surprises.double() - mean).abs_().float()
    return distances.masked_fill_(masses == 0, torch.inf).nan_to_num_(torch.inf, torch.inf)


def _floor(logits: Tensor, maxima: Tensor, rows: Truncation) -> Tensor:
    """[n, 1] float32: the smallest logit to keep; NaN, which drops nothing, for NaN."""
    floor = torch.full_like(maxima, -torch.inf)
    if rows.min_p_offsets is not None:
        floor = maxima + rows.min_p_offsets
    if rows.top_n_sigma is not None:
        by_sigma = maxima.double() - rows.top_n_sigma * _deviations(logits, maxima)
        by_sigma = torch.where(rows.top_n_sigma > 0.0, by_sigma, -torch.inf)
        floor = torch.maximum(floor, by_sigma.float())
    return floor


def _deviations(logits: Tensor, maxima: Tensor) -> Tensor:
    """The standard deviation of each row's logits that are not banned, [n, 1] float64."""
    # What processors and penalties lower without bound is clamped right above a ban. It is meant as
    # one, and is no logit of the model's either.
    valid = logits > BANNED / 10
    count = valid.sum(1, keepdim=True)
    centred = torch.where(valid, logits.double() - maxima, 0.0)
    centred -= _sum_in_order(centred) / count
    centred.masked_fill_(~valid, 0.0)
    return (_sum_in_order(centred.square_()) / count).sqrt_()


def _sum_in_order(values: Tensor) -> Tensor:
    """The sum [n, 1] of each row of [n, V] float64, in an order that only V decides.

    `torch.sum` splits rows into parts by the shape of the whole tensor and by threads.
    """
    while (width := values.shape[1]) > 1:
        half = (width + 1) // 2
        folded = values[:, :half].clone()
        folded[:, : width - half] += values[:, half:]
        values = folded
    return values
