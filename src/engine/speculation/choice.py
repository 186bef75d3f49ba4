"""Which drafters serve an engine, and why none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.engine.speculation.drafter import DRAFTERS, Drafter
from src.engine.speculation.verification import Speculation

logger = logging.getLogger(__name__)


def choose_speculation(
    section: SpeculationSection,
    *,
    device_type: str,
    has_states: bool,
    drafter: Drafter | None = None,
) -> Callable[..., Speculation] | None:
    """What makes an engine's `Speculation`; ``None`` if there is none.

    Parameters
    ----------
    has_states
        Whether the model keeps recurrent states.
    drafter
        The one of a method whose drafters have weights.

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
    elif has_states:
        reason = "a rejected draft would stay in the model's recurrent states"
    if reason is None:
        method = "suffix" if section.method == "auto" else section.method
        logger.info("speculation: %s, up to %d tokens", method, section.num_speculative_tokens)
        return partial(Speculation, (drafter or DRAFTERS[method](section),))
    if section.method != "auto":
        raise ConfigError(f"speculation.method = {section.method} cannot be served: {reason}")
    logger.info("speculation is off: %s", reason)
    return None
