"""What every drafter is to the engine, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from src.core.config import SpeculationSection
from src.engine.speculation.lookup import Lookup
from src.engine.speculation.widths import Guess


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


# Method -> the drafter that it asks for.
DRAFTERS: Final[Mapping[str, Callable[[SpeculationSection], Drafter]]] = MappingProxyType(
    {
        "suffix": lambda section: Lookup(least=2, longest=24),
        "ngram": lambda section: Lookup(
            least=section.prompt_lookup_min, longest=section.prompt_lookup_max
        ),
    }
)
