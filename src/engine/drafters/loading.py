"""Loads the drafter that a configuration asks for, if it is one with weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from src.core.config import Config
from src.core.errors import ConfigError, ModelLoadError
from src.core.memory_report import size
from src.engine.drafters.draft_model import load_draft_model
from src.engine.drafters.eagle3 import load_eagle3, required_taps
from src.engine.drafters.medusa import load_medusa
from src.engine.drafters.source import DraftSource, LoadSource
from src.engine.execution.kv_cache import block_size_of
from src.engine.execution.kv_groups import lay_out
from src.models import ServedModel, load_config, resolve_model
from src.models.config_file import read_config_file
from src.models.registry import has_family
from src.text import Tokenizer

logger = logging.getLogger(__name__)

# Method -> what reads its drafter.
SOURCES: Final[Mapping[str, LoadSource]] = MappingProxyType(
    {
        "draft": load_draft_model,
        "eagle3": load_eagle3,
        "medusa": load_medusa,
    }
)


def taps_for(config: Config, path: Path) -> tuple[int, ...]:
    """The layers of the model of a directory whose inputs its drafter reads.

    Raises
    ------
    ConfigError
        The drafter cannot be read, or the model has no such layers.
    ModelLoadError
        The model's configuration cannot be served.
    """
    section = config.speculation
    if section.method != "eagle3" or section.model is None:
        return ()
    if not has_family(read_config_file(path)):
        # It is refused when the model is there.
        return ()
    layers = len(load_config(path).layers)
    try:
        return required_taps(resolve_model(section.model, weights=False), layers)
    except ModelLoadError as error:
        raise ConfigError(f"speculation.model: {error}") from error


def load_drafts(
    config: Config, target: ServedModel, tokenizer: Tokenizer | None, *, outlines: bool = False
) -> DraftSource | None:
    """The drafter of ``speculation.method``; ``None`` if the method has no weights.

    Arguments are those of `LoadSource`.

    Raises
    ------
    ConfigError
        The method and ``speculation.model`` do not go together, or the drafter does not fit the
        model; the message says what was expected.
    """
    section = config.speculation
    if section.method not in SOURCES:
        if section.model is not None:
            raise ConfigError(
                f"speculation.model = {section.model!r} is for speculation.method = "
                f"{' or '.join(SOURCES)}, got {section.method}"
            )
        return None
    if section.model is None:
        raise ConfigError(
            f"speculation.method = {section.method} needs speculation.model, the directory of its "
            "weights"
        )
    if any(layer.lasts == "step" for layer in target.kv_cache_spec()):
        raise ConfigError(
            f"speculation.method = {section.method} is for models that generate, and "
            f"{config.model.path} is an encoder"
        )
    try:
        path = resolve_model(section.model, weights=config.model.load_format != "dummy")
        load = SOURCES[section.method]
        source = load(path, config, target, tokenizer, outlines=outlines)
        layers = (*target.kv_cache_spec(), *source.memory.layers)
        lay_out(layers, block_size_of(config.cache, target.spec.device))
    except (ModelLoadError, ValueError) as error:
        raise ConfigError(f"speculation.model: {error}") from error
    logger.info("drafts: %s, %s of weights", section.model, size(source.memory.nbytes))
    return source
