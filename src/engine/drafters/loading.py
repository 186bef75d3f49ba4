"""Loads the drafter that a configuration asks for, if it is one with weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from src.core.config import Config, SpeculationSection
from src.core.errors import ConfigError, ModelLoadError, SlipstreamError
from src.core.memory_report import size
from src.engine.drafters.draft_model import load_draft_model
from src.engine.drafters.eagle3 import load_eagle3, required_taps
from src.engine.drafters.medusa import load_medusa
from src.engine.drafters.mtp import brings_predictor, load_mtp
from src.engine.drafters.source import DraftSource, Source
from src.engine.execution.kv_cache import block_size_of
from src.engine.execution.kv_groups import lay_out
from src.engine.speculation.choice import Traits, choice_of, choose_sources
from src.models import Model, ServedModel, device_of, load_config, resolve_model
from src.models.config_file import read_config_file
from src.models.registry import has_family
from src.text import Tokenizer

logger = logging.getLogger(__name__)

# Of the memory that is free beside the model, a drafter that nobody has asked for gets one part.
_SHARE_OF_FREE: Final = 10

# Source of guesses, which is a method too -> how its drafter is read.
SOURCES: Final[Mapping[str, Source]] = MappingProxyType(
    {
        "draft": Source(load_draft_model, compares_tokens=True),
        "eagle3": Source(load_eagle3, taps=required_taps),
        "medusa": Source(load_medusa),
        "mtp": Source(load_mtp, comes_with=brings_predictor),
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
    source = SOURCES.get(section.method)
    if source is None or source.taps is None or section.model is None:
        return ()
    if not has_family(read_config_file(path)):
        # It is refused when the model is there.
        return ()
    layers = len(load_config(path).layers)
    try:
        return source.taps(resolve_model(section.model, weights=False), layers)
    except ModelLoadError as error:
        raise ConfigError(f"speculation.model: {error}") from error


def require_fields(section: SpeculationSection) -> None:
    """Check that ``speculation.model`` is given where the method has one, and nowhere else.

    Raises
    ------
    ConfigError
        It is missing, or has no meaning.
    """
    method, source = section.method, SOURCES.get(section.method)
    has_path = source is not None and source.comes_with is None
    if section.model is not None and not has_path:
        methods = [name for name, each in SOURCES.items() if each.comes_with is None]
        raise ConfigError(
            f"speculation.model = {section.model!r} is for speculation.method = "
            f"{' or '.join(methods)}, got {method}"
        )
    if section.model is None and has_path:
        raise ConfigError(
            f"speculation.method = {method} needs speculation.model, the directory of its weights"
        )


def tokenizer_for(config: Config, path: Path) -> Tokenizer | None:
    """The tokenizer of the model of a directory, if a drafter's tokens are compared with it.

    ``None`` as well where it cannot be read, which a start refuses for reasons of its own.
    """
    source = SOURCES.get(config.speculation.method)
    if source is None or not source.compares_tokens:
        return None
    try:
        return Tokenizer.from_directory(path, config.chat.template)
    except SlipstreamError as error:
        logger.info("vocabularies are compared by their sizes: %s", error)
        return None


def load_drafts(
    config: Config,
    target: ServedModel,
    tokenizer: Tokenizer | None,
    *,
    outlines: bool = False,
    free: int | None = None,
) -> DraftSource | None:
    """The drafter of ``speculation.method`` that has weights; ``None`` if there is none.

    Parameters
    ----------
    target, tokenizer, outlines
        Those of `LoadSource`.
    free
        Bytes that are free beside the model; ``None``: any number. One that nobody has asked for by
        name gets a tenth of them at most: most of the memory is for keys and values.

    Raises
    ------
    ConfigError
        The method cannot be served, it and ``speculation.model`` do not go together, or the drafter
        does not fit the model; the message says what was expected.
    """
    section = config.speculation
    method, source = section.method, SOURCES.get(section.method)
    require_fields(section)
    if source is None:
        return _brought(config, target, tokenizer, outlines=outlines, free=free)
    # Before its weights are read.
    choice_of(config, target)
    try:
        return _load(source, config, target, tokenizer, outlines=outlines)
    except (ModelLoadError, ValueError) as error:
        field = f"speculation.method = {method}" if section.model is None else "speculation.model"
        raise ConfigError(f"{field}: {error}") from error


def _load(
    source: Source,
    config: Config,
    target: ServedModel,
    tokenizer: Tokenizer | None,
    *,
    outlines: bool,
) -> DraftSource:
    named, revision = config.speculation.model, None
    if source.comes_with is not None:
        named, revision = config.model.path, config.model.revision
    assert named is not None
    path = resolve_model(named, revision, weights=_reads(config, outlines=outlines))
    drafts = source.load(path, config, target, tokenizer, outlines=outlines)
    layers = (*target.kv_cache_spec(), *drafts.memory.layers)
    lay_out(layers, block_size_of(config.cache, device_of(target)))
    logger.info("drafts: %s, %s of weights", named, size(drafts.memory.nbytes))
    return drafts


def _brought(
    config: Config,
    target: ServedModel,
    tokenizer: Tokenizer | None,
    *,
    outlines: bool,
    free: int | None,
) -> DraftSource | None:
    """The drafter that the model's checkpoint brings, if the method asks such a one too.

    Nobody has asked for it by name, so what is wrong with it ends no start.
    """
    traits = Traits.of(config, target)
    choice = choose_sources(config.speculation, traits, brought=tuple(SOURCES))
    # Most models have no such layer, and their path is not asked for again: it may be on a hub.
    if not isinstance(target, Model) or target.config.predictor is None:
        return None
    for name in choice.sources:
        source = SOURCES.get(name)
        if source is None or source.comes_with is None:
            continue
        model = config.model
        try:
            path = resolve_model(
                model.path, model.revision, weights=_reads(config, outlines=outlines)
            )
            if not source.comes_with(path):
                continue
            # Its sizes are known from the configuration, before anything is read.
            outline = source.load(path, config, target, tokenizer, outlines=True)
            if free is not None and _SHARE_OF_FREE * outline.memory.nbytes > free:
                raise ModelLoadError(
                    f"it takes {size(outline.memory.nbytes)}, more than a tenth of the "
                    f"{size(max(0, free))} that are free beside the model"
                )
            return _load(source, config, target, tokenizer, outlines=outlines)
        # Whatever is wrong with it, the model itself can be served: also without memory for it.
        except Exception as error:
            tell_left_out(name, f"{error}" or type(error).__name__)
    return None


def tell_left_out(name: str, reason: str) -> None:
    """Say in the log that a drafter is not used although the checkpoint brings it."""
    logger.warning("the drafter %s that the checkpoint brings is not used: %s", name, reason)


def _reads(config: Config, *, outlines: bool) -> bool:
    """Whether files of weights are needed."""
    return not outlines and config.model.load_format != "dummy"
