"""Which drafters serve an engine, and why none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.engine.speculation.drafter import DRAFTERS
from src.engine.speculation.verification import Speculation

logger = logging.getLogger(__name__)

# The most rows of a step with drafts in a model with recurrent states. With more rows a draft costs
# as much as a token, so few have some.
_STATE_BACKUPS: Final = 8


def state_backups(section: SpeculationSection, device_type: str) -> int:
    """How many rows may have drafts in a step of a model with recurrent states."""
    return 0 if section.method == "off" or device_type != "cpu" else _STATE_BACKUPS


def choose_speculation(
    section: SpeculationSection,
    *,
    device_type: str,
    has_states: bool,
    has_windows: bool = False,
    num_backups: int = 0,
) -> Callable[..., Speculation] | None:
    """What makes an engine's `Speculation`; ``None`` if there is none.

    Parameters
    ----------
    has_states, has_windows
        Whether the model keeps recurrent states, and whether some of its layers have windows.
    num_backups
        Slots that keep such states while drafts are verified.

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
        return None
    reason = None
    if device_type != "cpu":
        reason = f"it needs device.type = cpu, and this is {device_type}"
    elif has_states and has_windows:
        reason = "the model has recurrent states, and windows that forget what these need again"
    elif has_states and not num_backups:
        reason = "memory holds one sequence's recurrent states, and none while drafts are verified"
    if reason is None:
        method = "suffix" if section.method == "auto" else section.method
        logger.info("speculation: %s, up to %d tokens", method, section.num_speculative_tokens)
        return partial(Speculation, (DRAFTERS[method](section),))
    if section.method != "auto":
        raise ConfigError(f"speculation.method = {section.method} cannot be served: {reason}")
    logger.info("speculation is off: %s", reason)
    return None
