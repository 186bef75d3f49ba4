"""Status, model information and statistics of an engine."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from src.core.config import ModelSection
from src.core.embedding import EmbeddingRecipe
from src.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotReadyError,
    ShuttingDownError,
    SlipstreamError,
)
from src.core.gguf import is_gguf
from src.core.scoring import LabelRecipe, ScoringRecipe
from src.core.task import Task

# Phases of a start in order, with the fraction of the whole at which each begins.
STARTUP_PHASES: Final = {
    "created": 0.0,
    "importing": 0.0,
    "configuration": 0.1,
    "weights": 0.12,
    "kv_cache": 0.45,
    "kernels": 0.5,
    "compile": 0.55,
    "capture": 0.9,
    "ready": 1.0,
}


# What a model does not do, in errors.
_VERBS: Final[dict[Task, str]] = {
    "generate": "generate text",
    "embed": "embed",
    "classify": "classify",
    "score": "score",
    "token_embed": "embed tokens",
    "token_classify": "classify tokens",
}


class Stall(NamedTuple):
    """Work is pending and no step completes.

    Attributes
    ----------
    phase
        What is waited for: ``planning`` (no step could be planned), ``launching`` (a step has not
        begun on the device), ``device``, ``returning`` (its result is on its way to the loop) or
        ``committing``.
    seconds
        How long work has been pending without a completed step.
    """

    phase: str
    seconds: float


@dataclass(frozen=True)
class EngineStatus:
    """The phase of the engine.

    Attributes
    ----------
    phase
        One of ``STARTUP_PHASES``, or ``failed``, ``draining``, ``closed``.
    progress
        Progress of the start, 0 to 1.
    detail
        One readable line.
    error
        The error that it failed with, or None.
    """

    phase: str = "created"
    progress: float = 0.0
    detail: str = ""
    error: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are admitted."""
        return self.phase == "ready"

    @property
    def healthy(self) -> bool:
        """Whether admitted requests are served."""
        return self.phase in ("ready", "draining")

    def not_ready(self) -> NotReadyError:
        """The error for requests that arrive while the model loads."""
        return NotReadyError(
            f"the model is still loading: {self.detail} ({100 * self.progress:.0f} %)",
            retry_after=5.0,
        )

    def check(self, *, drains: bool) -> None:
        """Refuse a request if the engine does not serve; ``drains``: it was admitted before.

        Raises
        ------
        ShuttingDownError
            The engine drains, or is closed.
        EngineDeadError, ConfigError, ModelLoadError
            The engine has failed.
        """
        if self.phase == "failed":
            assert self.error is not None
            if isinstance(self.error, SlipstreamError):
                # A copy, because an error that is raised repeatedly keeps every traceback alive.
                raise copy.copy(self.error)
            raise EngineDeadError(self.detail) from self.error
        if self.phase == "closed" or (self.phase == "draining" and not drains):
            raise ShuttingDownError("the server is shutting down", retry_after=5.0)


def served_names(section: ModelSection) -> tuple[str, ...]:
    """The names under which a model is served. Answers and metrics use the first.

    By default the name is the hub id, or the last part of a directory's path, or the name of a GGUF
    file without its ending.
    """
    if section.served_model_name:
        return section.served_model_name
    path = Path(section.path).expanduser()
    if is_gguf(path) and path.is_file():
        return (path.stem,)
    return (path.resolve().name if path.is_dir() else section.path,)


class StepInputShape(NamedTuple):
    """A step input of the model's own, of which requests bring values for tokens of their prompt.

    Attributes
    ----------
    name
        Its name.
    shape
        Of one token's value.
    is_integer
        Whether values are integers.
    beyond
        What other tokens have: ``zeros``, or ``onwards``, numbers that go on from the largest.
    below
        Integers are from 0 up to this, exclusive; ``None``: any.
    """

    name: str
    shape: tuple[int, ...]
    is_integer: bool
    beyond: str
    below: int | None


@dataclass(frozen=True)
class ModelInfo:
    """The model as its clients see it.

    ``default_sampling`` has the checkpoint's own sampling parameters, by the names of
    `SamplingParams`. ``default_max_tokens`` is the checkpoint's default number of output tokens;
    ``None`` is as many as fit. ``implementation`` is ``native`` or ``transformers``.
    ``device_type`` is ``cpu`` or ``cuda``. ``step_inputs`` are its own. ``tasks`` are what it may
    be asked for. ``embedding`` says how texts become vectors, ``labels`` what its head says of
    them, and ``scoring`` how two texts get a score. ``uncounted_id`` is a token that no text may
    have, since the model's positions are counted without it.
    """

    name: str
    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    dtype: str
    implementation: str
    device_type: str
    created: int
    default_sampling: dict[str, Any]
    default_max_tokens: int | None = None
    step_inputs: tuple[StepInputShape, ...] = ()
    tasks: tuple[Task, ...] = ("generate",)
    embedding: EmbeddingRecipe | None = None
    labels: LabelRecipe | None = None
    scoring: ScoringRecipe | None = None
    uncounted_id: int | None = None

    def check(self, task: Task) -> None:
        """Refuse a task that it does not do.

        Raises
        ------
        InvalidRequestError
            Names those that it does.
        """
        if task not in self.tasks:
            raise InvalidRequestError(
                f"the model {self.name} does not {_VERBS[task]}: what it can do is "
                f"{', '.join(self.tasks)}",
                param="model",
            )


@dataclass(frozen=True)
class EngineStats:
    """The engine's current figures.

    ``kv_usage`` is the fraction of blocks held by requests. ``bubble`` is the fraction of the time
    with work in which the device waited for the host. ``compiled``: compiled code is in use.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    bubble: float
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    pool_is_whole: bool
    compiled: bool
