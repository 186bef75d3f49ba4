"""A cache of objects made from sampling parameters, shared by completions that have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from src.core.sampling_params import SamplingParams

T = TypeVar("T")
P = ParamSpec("P")


class PerParams(Generic[P, T]):
    """Makes an object from parameters at the first call, and keeps it as long as they live.

    Completions of one prompt share their parameters object, and a preempted request keeps its own.
    The key is the object's identity, because comparing or hashing parameters is what this saves.
    Other arguments must be determined by the parameters.
    """

    def __init__(self, make: Callable[Concatenate[SamplingParams, P], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self, params: SamplingParams, *args: P.args, **kwargs: P.kwargs) -> T:
        """The object for these parameters."""
        key = id(params)
        if key not in self._made:
            self._made[key] = self._make(params, *args, **kwargs)
            weakref.finalize(params, self._made.pop, key, None).atexit = False
        return self._made[key]
