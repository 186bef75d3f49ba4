"""What every drafter is to the engine, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np

from src.core.config import SpeculationSection
from src.core.step_message import DeviceRequest
from src.engine.speculation.guess import Guess
from src.engine.speculation.history import SharedHistory
from src.engine.speculation.lookup import Lookup
from src.engine.speculation.prediction import Predicted


class Drafter(Protocol):
    """Guesses the next tokens of a row. The device thread calls it."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """Up to ``most`` guesses of what follows ``tokens``; ``None`` if it has no idea.

        Parameters
        ----------
        row
            The row, whose request may be another than at the last call.
        tokens
            [n] int32: prompt and output of the row so far. A view; it must not be kept.
        """
        ...


@runtime_checkable
class Follower(Drafter, Protocol):
    """A drafter that knows the rows' requests. The device thread calls it."""

    def install(self, row: int, request: DeviceRequest) -> None:
        """The row has this request from now on; it may be one that had it, or another, before."""
        ...

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """The row's request has ended; ``tokens`` [n] int32 are its prompt and output, a view."""
        ...


# Source -> the drafter that it asks for.
DRAFTERS: Final[Mapping[str, Callable[[SpeculationSection], Drafter]]] = MappingProxyType(
    {
        "prediction": lambda section: Predicted(),
        "history": lambda section: SharedHistory(section.shared_history_bytes),
        "suffix": lambda section: Lookup(least=3, longest=24),
        "ngram": lambda section: Lookup(
            least=section.prompt_lookup_min, longest=section.prompt_lookup_max, source="ngram"
        ),
    }
)

# Method -> the sources that are asked, in this order.
SOURCES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "auto": ("prediction", "suffix", "history"),
        "suffix": ("prediction", "suffix", "history"),
        "ngram": ("prediction", "ngram"),
    }
)
