"""What a drafter with weights takes of memory, and what it is given to draft with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from src.core.config import Config
from src.core.memory_report import WeightPart
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler
from src.engine.speculation import BatchDrafter
from src.models import LayerKVSpec, ServedModel
from src.text import Tokenizer


class DraftMemory(NamedTuple):
    """What a drafter takes beside the model.

    Attributes
    ----------
    layers
        What its layers keep of a sequence. They are the last ones of the engine's KV memory.
    parts
        Its weights and tables.
    largest
        Runs what it computes at most in a step, of the hidden states [T, W] that the step before
        has left; returns what it keeps beside the next step. None: next to nothing.
    """

    layers: tuple[LayerKVSpec, ...] = ()
    parts: tuple[WeightPart, ...] = ()
    largest: Callable[[Tensor], Tensor | None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and tables."""
        return sum(part.bytes for part in self.parts)


NO_MEMORY = DraftMemory()


@dataclass(frozen=True)
class DraftPlace:
    """An engine's rows, where a drafter works.

    Attributes
    ----------
    kv_cache
        The drafter's own layers of the engine's KV memory.
    """

    rows: RowState
    sampler: Sampler
    kv_cache: KVCache


class DraftSource(Protocol):
    """A loaded drafter, which has no engine yet."""

    @property
    def memory(self) -> DraftMemory:
        """What it takes."""

    def drafter(self, place: DraftPlace) -> BatchDrafter:
        """The drafter of an engine."""


class Source(NamedTuple):
    """How a method's drafter is read.

    Attributes
    ----------
    taps
        From its path, and the model's number of layers: those whose inputs it reads. None: it reads
        none.
    comes_with
        Whether the checkpoint of a model has such a drafter, which is read from there. None: it has
        a path of its own.
    compares_tokens
        Whether it needs the model's tokenizer, to compare vocabularies.
    """

    load: LoadSource
    taps: Callable[[Path, int], tuple[int, ...]] | None = None
    comes_with: Callable[[Path], bool] | None = None
    compares_tokens: bool = False


class LoadSource(Protocol):
    """Reads a drafter."""

    def __call__(
        self,
        path: Path,
        config: Config,
        target: ServedModel,
        tokenizer: Tokenizer | None,
        *,
        outlines: bool,
    ) -> DraftSource:
        """Read a drafter for a model.

        Parameters
        ----------
        path
            Its directory or file; the model's, if it comes with that.
        target
            The model that it drafts for.
        tokenizer
            The model's; ``None``: vocabularies are told by their sizes alone.
        outlines
            Whether only its memory is asked for. Then no weights are read.

        Raises
        ------
        ModelLoadError
            It is damaged, or not made for this model; the message says what was expected.
        """
