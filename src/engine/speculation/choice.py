"""Which drafters serve an engine, and why none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

from src.core.config import Config, SpeculationSection
from src.core.draft_counts import DraftCounts
from src.core.errors import ConfigError
from src.engine.speculation.drafter import DRAFTERS, SOURCES, Drafter
from src.engine.speculation.guess import FORCED
from src.engine.speculation.history import TOKEN_BYTES, require_size, size_of
from src.engine.speculation.on_device import Bounds
from src.engine.speculation.verification import Speculation
from src.models import LayerKVSpec, ServedModel, device_of
from src.models.tasks import may_generate

logger = logging.getLogger(__name__)

# Devices that draft themselves: see docs/speculation-cuda.md.
_DRAFTING_DEVICES: frozenset[str] = frozenset({"cuda"})
# The most rows of a step with drafts in a model with recurrent states. With more rows a draft costs
# as much as a token, so few have some.
_STATE_BACKUPS: Final = 8


class Traits(NamedTuple):
    """What decides who may draft for a model.

    Attributes
    ----------
    device_type
        Of the device that serves it.
    has_states, has_windows
        Whether it keeps recurrent states, and whether some of its layers have windows.
    has_own_inputs
        Whether it has step inputs of its own.
    generates
        Whether it generates text.
    """

    device_type: str
    has_states: bool = False
    has_windows: bool = False
    has_own_inputs: bool = False
    generates: bool = True

    @classmethod
    def of(cls, config: Config, model: ServedModel, further: Sequence[LayerKVSpec] = ()) -> Traits:
        """Those of a model, or of its outline; ``further`` are layers of a drafter with weights."""
        layers = (*model.kv_cache_spec(), *further)
        return cls(
            device_of(model).type,
            has_states=any(layer.per == "sequence" for layer in layers),
            has_windows=any(layer.window is not None for layer in layers),
            has_own_inputs=bool(model.own_inputs),
            generates=may_generate(model, config.model.tasks),
        )


class Choice(NamedTuple):
    """Who drafts, in the order in which they are asked; nobody, and the reason."""

    sources: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        return ", ".join(self.sources) if self.sources else f"nothing drafts: {self.reason}"


def state_backups(choice: Choice, traits: Traits) -> int:
    """How many rows may have drafts in a step of a model with recurrent states."""
    return _STATE_BACKUPS if choice.sources and traits.has_states else 0


def history_bytes(section: SpeculationSection, choice: Choice) -> int:
    """Bytes that are kept of outputs, which drafts are taken from."""
    if "history" not in choice.sources:
        return 0
    return size_of(section.shared_history_bytes) * TOKEN_BYTES


def most_drafts(section: SpeculationSection, choice: Choice) -> int:
    """The most drafts of a row in a step; 0 if nobody drafts."""
    return section.num_speculative_tokens if choice.sources else 0


def device_bounds(section: SpeculationSection, traits: Traits) -> Bounds | None:
    """What a device that drafts itself looks up; ``None`` if this one does not, or not so."""
    if traits.device_type not in _DRAFTING_DEVICES or not traits.generates:
        return None
    if traits.has_states or traits.has_own_inputs:
        return None
    most = section.num_speculative_tokens
    # Not "auto": no GPU has run drafts yet.
    if section.method == "suffix":
        return Bounds(least=3, longest=24, most=most)
    if section.method == "ngram":
        return Bounds(section.prompt_lookup_min, section.prompt_lookup_max, "ngram", most)
    return None


def choose_sources(
    section: SpeculationSection,
    traits: Traits,
    *,
    num_backups: int | None = None,
    brought: Collection[str] = (),
) -> Choice:
    """Who drafts with these settings for such a model.

    Parameters
    ----------
    num_backups
        Slots that keep recurrent states while drafts are verified; ``None``: not known yet.
    brought
        Sources for which the model's checkpoint brings the weights.

    Raises
    ------
    ConfigError
        A method was asked for by name, and this device or model cannot serve it; the bounds of
        n-grams are in the wrong order; or outputs are to be kept in too few bytes.
    """
    least, most = section.prompt_lookup_min, section.prompt_lookup_max
    if least > most:
        raise ConfigError(
            f"speculation.prompt_lookup_min must be at most prompt_lookup_max = {most}, got {least}"
        )
    if section.method == "off":
        return Choice((), "speculation.method = off")
    bounds = device_bounds(section, traits)
    if bounds is not None:
        return Choice((bounds.source,))
    reason = _why_not(section, traits, num_backups)
    if not reason:
        # Those of a method's own name are there, or the start has failed.
        there = {*DRAFTERS, *brought, section.method}
        if not section.shared_history_bytes:
            there.discard("history")
        sources = tuple(source for source in SOURCES[section.method] if source in there)
        if "history" in sources:
            require_size(section.shared_history_bytes)
        return Choice(sources)
    if section.method != "auto":
        raise ConfigError(f"speculation.method = {section.method} cannot be served: {reason}")
    return Choice((), reason)


def _why_not(section: SpeculationSection, traits: Traits, num_backups: int | None) -> str:
    """Why nobody on the host drafts for such a model; empty if somebody may."""
    if not traits.generates:
        return "the model does not generate"
    if traits.device_type != "cpu":
        of_model = ""
        if traits.has_states:
            of_model = "the model has recurrent states; "
        elif traits.has_own_inputs:
            of_model = "the model has step inputs of its own; "
        elif section.method == "auto" and traits.device_type in _DRAFTING_DEVICES:
            return "no GPU has run drafts yet; speculation.method = suffix asks for them"
        return f"{of_model}it needs device.type = cpu, and this is {traits.device_type}"
    if traits.has_states and traits.has_windows:
        return "the model has recurrent states, and windows that forget what these need again"
    if traits.has_states and num_backups == 0:
        if section.method == "auto":
            return (
                "memory has too few slots of recurrent states to spare some for rows with drafts "
                "(cache.memory_bytes)"
            )
        return "memory holds one sequence's recurrent states, and none while drafts are verified"
    return ""


def choice_of(config: Config, model: ServedModel) -> Choice:
    """Who drafts for a model, or for its outline, before its memory is sized.

    Raises
    ------
    ConfigError
        As of `choose_sources`.
    """
    return choose_sources(config.speculation, Traits.of(config, model))


def choose_speculation(
    section: SpeculationSection,
    traits: Traits,
    *,
    num_backups: int | None = None,
    drafter: Drafter | None = None,
) -> Callable[..., Speculation] | Bounds | None:
    """What makes an engine's `Speculation`, or what its device looks up; ``None`` for neither.

    ``drafter`` is the one of the method's sources that has weights. Other arguments and errors are
    those of `choose_sources`.
    """
    choice = choose_sources(
        section,
        traits,
        num_backups=num_backups,
        brought=() if drafter is None else SOURCES[section.method],
    )
    if section.shared_history_bytes and "history" not in choice.sources:
        why = str(choice)
        if traits.device_type in _DRAFTING_DEVICES and choice.sources:
            why = "a GPU looks up in the row's own text alone"
        elif choice.sources:
            why = f"speculation.method = {section.method} reads none"
        size = section.shared_history_bytes
        logger.warning("speculation.shared_history_bytes = %d is without effect: %s", size, why)
    if not choice.sources:
        if section.method != "off":
            logger.info("speculation is off: %s", choice.reason)
        return None
    logger.info("speculation: %s, up to %d tokens", choice, section.num_speculative_tokens)
    bounds = device_bounds(section, traits)
    if bounds is not None:
        return bounds
    drafters: list[Drafter] = []
    for source in choice.sources:
        if source in DRAFTERS:
            drafters.append(DRAFTERS[source](section))
        elif drafter is not None:
            drafters.append(drafter)
    counts = DraftCounts([*choice.sources, FORCED], section.num_speculative_tokens)
    return partial(Speculation, drafters, counts=counts)
