"""Least squares with non-negative coefficients, because costs are not negative."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_TOLERANCE: Final = 1e-10
_REWEIGHTINGS: Final = 6


def nonnegative(features: Array, values: Array) -> Array:
    """The ``x >= 0`` with the least ``|features @ x - values|``.

    Parameters
    ----------
    features
        [observations, features], float64.
    values
        [observations], float64.

    Notes
    -----
    The active-set method of C. Lawson and R. Hanson, "Solving Least Squares Problems" (1974),
    chapter 23.
    """
    # Normalise the columns, so that one tolerance fits all.
    sizes = np.sqrt((features**2).sum(axis=0))
    sizes[sizes == 0] = 1.0
    scaled = features / sizes
    found = np.zeros(scaled.shape[1])
    free = np.zeros(scaled.shape[1], dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(scaled.T @ values).max(initial=0.0)))
    for _ in range(10 * scaled.shape[1] + 10):
        gradient = scaled.T @ (values - scaled @ found)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        found = _step(scaled, values, found, free)
    answer: Array = found / sizes
    return answer


def _step(scaled: Array, values: Array, found: Array, free: NDArray[np.bool_]) -> Array:
    """Least squares over the free columns; columns that would become negative are removed."""
    while True:
        target = np.zeros_like(found)
        target[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
        below = free & (target <= 0)
        if not below.any():
            return target
        ratios = found[below] / np.maximum(found[below] - target[below], 1e-300)
        found = found + ratios.min() * (target - found)
        free &= found > _TOLERANCE
        found[~free] = 0.0
        if not free.any():
            return found


def prices(features: Array, seconds: Array) -> Array:
    """Costs per feature, for times whose scatter grows with their size.

    Observations are weighted by the inverse of their prediction, so a step of 2 ms must be met with
    the same relative accuracy as one of 200 ms. Weights come from predictions, not from measured
    values, so that the sum of predictions is unbiased.

    Parameters
    ----------
    features
        [observations, features], float64, non-negative.
    seconds
        [observations], float64.
    """
    found = nonnegative(features, seconds)
    floor = max(float(seconds.mean()) * 1e-3, 1e-12)
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(np.maximum(features @ found, floor))
        found = nonnegative(features * weights[:, None], seconds * weights)
    return found
