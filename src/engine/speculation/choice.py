"""Which drafters serve an engine, and why none does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.engine.speculation.drafter import DRAFTERS, Drafter

logger = logging.getLogger(__name__)


def choose_drafters(
    section: SpeculationSection, *, device_type: str, has_states: bool
) -> Sequence[Drafter]:
    """The drafters of an engine; none if there is no speculation.

    Parameters
    ----------
    has_states
        Whether the model keeps recurrent states.

    Raises
    ------
    ConfigError
        A method was asked for by name, and this device or model cannot serve it.
    """
    if section.method == "off":
        return ()
    reason = None
    if device_type != "cpu":
        reason = f"it needs device.type = cpu, and this is {device_type}"
    elif has_states:
        reason = "a rejected draft would stay in the model's recurrent states"
    if reason is None:
        method = "suffix" if section.method == "auto" else section.method
        logger.info("speculation: %s, up to %d tokens", method, section.num_speculative_tokens)
        return (DRAFTERS[method](section),)
    if section.method != "auto":
        raise ConfigError(f"speculation.method = {section.method} cannot be served: {reason}")
    logger.info("speculation is off: %s", reason)
    return ()
