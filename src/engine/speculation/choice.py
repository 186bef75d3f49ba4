"""Which drafters serve an engine, and why none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.engine.speculation.drafter import DRAFTERS, SOURCES, Drafter
from src.engine.speculation.history import TOKEN_BYTES, size_of
from src.engine.speculation.on_device import Bounds
from src.engine.speculation.verification import Speculation

logger = logging.getLogger(__name__)

# Devices that draft themselves: see docs/speculation-cuda.md.
_DRAFTING_DEVICES: frozenset[str] = frozenset({"cuda"})
# The most rows of a step with drafts in a model with recurrent states. With more rows a draft costs
# as much as a token, so few have some.
_STATE_BACKUPS: Final = 8


def state_backups(section: SpeculationSection, device_type: str) -> int:
    """How many rows may have drafts in a step of a model with recurrent states."""
    return 0 if section.method == "off" or device_type != "cpu" else _STATE_BACKUPS


def history_bytes(section: SpeculationSection, device_type: str) -> int:
    """Bytes that are kept of outputs, which drafts are taken from."""
    keeps = section.shared_history_bytes > 0 and "history" in SOURCES.get(section.method, ())
    if not keeps or device_type != "cpu":
        return 0
    return size_of(section.shared_history_bytes) * TOKEN_BYTES


def device_bounds(
    section: SpeculationSection,
    device_type: str,
    *,
    has_states: bool = False,
    has_own_inputs: bool = False,
) -> Bounds | None:
    """What a device that drafts itself looks up; ``None`` if this one does not, or not so.

    Other arguments are those of `choose_sources`.
    """
    if device_type not in _DRAFTING_DEVICES or has_states or has_own_inputs:
        return None
    most = section.num_speculative_tokens
    if section.method in ("suffix", "auto"):
        return Bounds(least=3, longest=24, most=most)
    if section.method == "ngram":
        return Bounds(section.prompt_lookup_min, section.prompt_lookup_max, "ngram", most)
    return None


class Choice(NamedTuple):
    """Who drafts, in the order in which they are asked; nobody, and the reason."""

    sources: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        return ", ".join(self.sources) if self.sources else f"nothing drafts: {self.reason}"


def choose_sources(
    section: SpeculationSection,
    *,
    device_type: str,
    has_states: bool = False,
    has_windows: bool = False,
    has_own_inputs: bool = False,
    num_backups: int | None = None,
    brought: Collection[str] = (),
) -> Choice:
    """Who drafts with these settings on such a device.

    Parameters
    ----------
    has_states, has_windows
        Whether the model keeps recurrent states, and whether some of its layers have windows.
    has_own_inputs
        Whether it has step inputs of its own.
    num_backups
        Slots that keep such states while drafts are verified; ``None``: not known yet.
    brought
        Sources for which the model's checkpoint brings the weights.

    Raises
    ------
    ConfigError
        A method was asked for by name, and this device or model cannot serve it; or the bounds of
        n-grams are in the wrong order.
    """
    least, most = section.prompt_lookup_min, section.prompt_lookup_max
    if least > most:
        raise ConfigError(
            f"speculation.prompt_lookup_min must be at most prompt_lookup_max = {most}, got {least}"
        )
    if section.method == "off":
        return Choice((), "speculation.method = off")
    reason = ""
    bounds = device_bounds(
        section, device_type, has_states=has_states, has_own_inputs=has_own_inputs
    )
    if bounds is not None:
        return Choice((bounds.source,))
    if device_type != "cpu":
        reason = f"it needs device.type = cpu, and this is {device_type}"
        if has_states:
            reason = f"the model has recurrent states; {reason}"
        elif has_own_inputs:
            reason = f"the model has step inputs of its own; {reason}"
    elif has_states and has_windows:
        reason = "the model has recurrent states, and windows that forget what these need again"
    elif has_states and num_backups == 0:
        reason = "memory holds one sequence's recurrent states, and none while drafts are verified"
    if not reason:
        # Those of a method's own name are there, or the start has failed.
        there = {*DRAFTERS, *brought, section.method}
        if not section.shared_history_bytes:
            there.discard("history")
        return Choice(tuple(source for source in SOURCES[section.method] if source in there))
    if section.method != "auto":
        raise ConfigError(f"speculation.method = {section.method} cannot be served: {reason}")
    return Choice((), reason)


def choose_speculation(
    section: SpeculationSection,
    *,
    device_type: str,
    has_states: bool,
    has_windows: bool = False,
    has_own_inputs: bool = False,
    num_backups: int | None = None,
    drafter: Drafter | None = None,
) -> Callable[..., Speculation] | Bounds | None:
    """What makes an engine's `Speculation`, or what its device looks up; ``None`` for neither.

    ``drafter`` is the one of the method's sources that has weights. Other arguments and errors are
    those of `choose_sources`.
    """
    choice = choose_sources(
        section,
        device_type=device_type,
        has_states=has_states,
        has_windows=has_windows,
        has_own_inputs=has_own_inputs,
        num_backups=num_backups,
        brought=() if drafter is None else SOURCES[section.method],
    )
    if not choice.sources:
        if section.method != "off":
            logger.info("speculation is off: %s", choice.reason)
        return None
    logger.info("speculation: %s, up to %d tokens", choice, section.num_speculative_tokens)
    bounds = device_bounds(
        section, device_type, has_states=has_states, has_own_inputs=has_own_inputs
    )
    if bounds is not None:
        return bounds
    drafters: list[Drafter] = []
    for source in choice.sources:
        if source in DRAFTERS:
            drafters.append(DRAFTERS[source](section))
        elif drafter is not None:
            drafters.append(drafter)
    return partial(Speculation, drafters)
