"""What every drafter is to the engine, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from src.core.config import SpeculationSection
from src.core.plan import RowStep
from src.core.step_message import DeviceRequest
from src.engine.speculation.effort import Effort
from src.engine.speculation.guess import Guess
from src.engine.speculation.history import SharedHistory
from src.engine.speculation.lookup import Lookup, RestrictedLookup
from src.engine.speculation.prediction import Predicted

UNDER_GRAMMARS: Final = "suffix under grammars"
"""`suffix` beside drafters with weights, for rows that these are not asked for."""

SURE: Final = 16
"""The length of a match that counts for guesses that are from no match, but from a model."""


KeptHidden: TypeAlias = Literal["none", "sampled", "all"]
"""Which hidden states of a step are kept: none, those that tokens are sampled from, [S, H], or
those of all its tokens, [T, H], padding perhaps behind them."""


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


class BatchDrafter:
    """A drafter that computes the guesses of all rows of a step at once, such as a model.

    Attributes
    ----------
    wants_hidden
        Which of the model's hidden states it reads.
    source
        Who guesses.
    guesses
        Row -> its guesses for this step, which `compute` leaves here.
    effort
        Whether it rests. Then it is not called in a step, but for `vacate`.
    """

    wants_hidden: KeptHidden = "none"
    source: ClassVar[str] = ""

    def __init__(self) -> None:
        self.guesses: dict[int, Guess] = {}
        self.effort = Effort()

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        return self.guesses.get(row)

    def vacate(self, row: int) -> None:
        """The row has another request now."""

    def rest(self) -> None:
        """Steps go by without it from now on: what it has of them later lacks their tokens."""

    def finish(self, ends: Callable[[int], bool]) -> None:
        """Read what these rows have unread: they have ended, or do not go on in the next step.

        Their blocks may be shared already, and are not overwritten yet.
        """

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """Begin a step: guess for some of its rows, into ``guesses``. Called at every step.

        Parameters
        ----------
        rows
            What the step computes, exactly, and without drafts.
        asked
            Row -> how many guesses are wanted of it, at most.
        """
        raise NotImplementedError

    def keep(self, last: Mapping[int, tuple[int, int]], hidden_s: Tensor) -> None:
        """End a step: keep what rows were sampled from, if those hidden states are wanted.

        Parameters
        ----------
        last
            Row -> index among ``hidden_s`` of what its newest token was sampled from, and how many
            tokens the row has, that one included.
        hidden_s
            [S, H], on the device.
        """

    def keep_all(self, computed: Mapping[int, tuple[int, int, int]], hidden_t: Tensor) -> None:
        """End a step: keep hidden states of all tokens that count, if they are wanted.

        Parameters
        ----------
        computed
            Row -> index among ``hidden_t`` of its first token, that token's position, and how many
            of its tokens count: wrong guesses do not.
        hidden_t
            [T, H], on the device.
        """


@runtime_checkable
class Screening(Drafter, Protocol):
    """A drafter that says quickly that it has no idea, which is so most of the time."""

    def may_guess(self, row: int, tokens: np.ndarray) -> bool:
        """Whether `propose` may have an idea. It changes nothing, and is much faster.

        Parameters
        ----------
        row, tokens
            See `propose`.
        """
        ...


@runtime_checkable
class Follower(Drafter, Protocol):
    """A drafter that knows the rows' requests. The device thread calls it.

    Attributes
    ----------
    reads_texts
        Whether `leave` reads tokens. Else it may get none: it takes time to find where they end.
    """

    reads_texts: bool

    def install(self, row: int, request: DeviceRequest) -> None:
        """The row has this request from now on; it may be one that had it, or another, before."""
        ...

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """The row's request has ended; ``tokens`` [n] int32 are its prompt and output, a view.

        There are none if its last step has failed, and perhaps if nobody reads any.
        """
        ...


@runtime_checkable
class Lagging(Drafter, Protocol):
    """A drafter that puts off what nobody should wait for. The device thread calls it."""

    def catch_up(self) -> None:
        """Do a part of what it has put off, far less than a step takes. Called behind each step."""
        ...


# Source -> the drafter that it asks for.
DRAFTERS: Final[Mapping[str, Callable[[SpeculationSection], Drafter]]] = MappingProxyType(
    {
        "prediction": lambda section: Predicted(),
        "history": lambda section: SharedHistory(section.shared_history_bytes),
        "suffix": lambda section: Lookup(least=3, longest=24),
        UNDER_GRAMMARS: lambda section: RestrictedLookup(least=3, longest=24),
        "ngram": lambda section: Lookup(
            least=section.prompt_lookup_min, longest=section.prompt_lookup_max, source="ngram"
        ),
    }
)

# Method -> the sources that are asked, in this order. One that is not in `DRAFTERS` has weights
# (`engine.drafters`); a method has one of these at most.
SOURCES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "auto": ("prediction", "suffix", "history", "mtp"),
        "suffix": ("prediction", "suffix", "history"),
        "ngram": ("prediction", "ngram"),
        "draft": ("prediction", UNDER_GRAMMARS, "draft"),
        "medusa": ("prediction", UNDER_GRAMMARS, "medusa"),
        "eagle3": ("prediction", UNDER_GRAMMARS, "eagle3"),
        "mtp": ("prediction", UNDER_GRAMMARS, "mtp"),
    }
)
