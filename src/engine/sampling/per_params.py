"""What is made of sampling parameters, once for all completions that have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from src.core.sampling_params import SamplingParams

T = TypeVar("T")
P = ParamSpec("P")


class PerParams(Generic[P, T]):
    """Makes something of parameters when it is first asked for, and keeps it as long as they live.

    Completions of one prompt share their parameters, and one that was preempted comes back with its
    own. They go by identity: to compare or hash them costs what this is to save. What else is given
    follows from the parameters.
    """

    def __init__(self, make: Callable[Concatenate[SamplingParams, P], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self, params: SamplingParams, *args: P.args, **kwargs: P.kwargs) -> T:
        """What was made of these."""
        key = id(params)
        if key not in self._made:
            self._made[key] = self._make(params, *args, **kwargs)
            weakref.finalize(params, self._made.pop, key, None).atexit = False
        return self._made[key]
