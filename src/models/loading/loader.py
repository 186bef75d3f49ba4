"""Loads a model directory into a `Model` with filled parameters."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from src.core.config import GIB
from src.core.errors import ModelLoadError
from src.core.gguf import is_gguf
from src.distributed import Group
from src.models.checkpoint import (
    StoredTensor,
    TensorReader,
    equal_contents,
    open_checkpoint,
)
from src.models.config import DTYPE_NAMES, ModelConfig
from src.models.loading.cache_scales import read_scales, scale_names
from src.models.loading.dummy import fill_dummy
from src.models.loading.filling import check_tensors, fill, stored_names
from src.models.loading.options import LoadHooks, LoadOptions, Progress
from src.models.model import Model, ModelOptions
from src.models.registry import family_of, load_config
from src.models.weights.methods import Formats, formats_of

logger = logging.getLogger(__name__)

# Tokens. Every position has a row in a table of RoPE, whether or not memory holds such a context.
_MOST_BY_DEFAULT = 2**20
_DEFAULT, _NO_HOOKS = LoadOptions(), LoadHooks()


def load_model(path: Path, options: LoadOptions = _DEFAULT, hooks: LoadHooks = _NO_HOOKS) -> Model:
    """Build the model of a directory and fill its parameters.

    Parameters
    ----------
    path
        a local directory in Hugging Face layout, or a GGUF file (see `hub.resolve_model`).
    options
        What is chosen of it.
    hooks
        What is called meanwhile.

    Raises
    ------
    ModelLoadError
        The checkpoint cannot be served; the message says why.
    """
    config = load_config(path)
    family = family_of(config.architecture)
    is_dummy = options.load_format == "dummy"
    stored = {} if is_dummy else open_tensors(path, config)
    head, embedding = f"{config.head_name}.weight", f"{config.embedding_name}.weight"
    if config.tie_word_embeddings and _differ(stored.get(head), stored.get(embedding)):
        # Like the reference: a head with values of its own is not tied, whatever the flag says.
        config = replace(config, tie_word_embeddings=False)
    elif config.tie_word_embeddings and embedding not in stored and head in stored:
        # A checkpoint that stores the shared tensor once may have stored it as the head.
        stored[embedding] = stored[head]
    wanted: set[str] = set()

    def check(model: Model) -> None:
        # A configuration may ask for any amount of memory. The checkpoint's tensors bound it.
        wanted.update(name for each in model.table.values() for name in stored_names(model, each))
        passed_over = {head} if config.tie_word_embeddings else set()
        passed_over |= {name for name in stored if _is_unread(name, config)} | scale_names(stored)
        check_tensors(path, stored, model, passed_over | _empty_biases(stored, wanted))

    given = _model_options(config, options, stored)
    model = Model(config, family.write, given, check if not is_dummy else lambda model: None)
    if options.dtype == "auto" and config.dtype == "float16" and given.dtype != torch.float16:
        logger.info(
            "the checkpoint is float16, whose range %s leaves: served in bfloat16; "
            "model.dtype may be float32",
            config.architecture,
        )
    if model.adapters is not None and embedding in stored:
        # A head that shares the embedding's values has no tensor of its own.
        own = {embedding: stored[embedding], head: stored.get(head, stored[embedding])}
        model.adapters.base = own
    hooks.when_allocated(model)
    if is_dummy:
        fill_dummy(model, options.seed, hooks.before_each_matrix)
        return model
    model.kv_scales = read_scales(stored)
    total = sum(stored[name].size for name in wanted & stored.keys())
    with _Reporter(total, hooks.progress) as report:
        fill(model, stored, report, hooks.before_each_matrix)
    _tell_formats(model, config)
    return model


def outline_model(
    path: Path,
    options: LoadOptions = _DEFAULT,
    *,
    group: Group | None = None,
    outlines_tables: bool = False,
) -> Model:
    """The model that `load_model` builds, but on the meta device: shapes without values.

    Reads no file but `config.json`. With a `group` it is the part of one of its ranks; see
    `ModelOptions` for `outlines_tables`.

    Raises
    ------
    ModelLoadError
        The configuration cannot be served.
    """
    config = load_config(path)
    given = replace(
        _model_options(config, options, {}),
        device=torch.device("meta"),
        served_on=options.device or torch.device("cpu"),
        group=group or Group(),
        outlines_tables=outlines_tables,
    )
    return Model(config, family_of(config.architecture).write, given)


def _model_options(
    config: ModelConfig, options: LoadOptions, stored: Mapping[str, StoredTensor]
) -> ModelOptions:
    """What the options come to for this checkpoint."""
    dtype = resolve_dtype(options.dtype, config)
    return ModelOptions(
        dtype=dtype,
        device=options.device or torch.device("cpu"),
        max_positions=resolve_max_positions(options.max_model_len, config),
        deterministic=options.deterministic,
        adapters=options.adapters,
        taps=options.taps,
        formats=_formats(config, stored, options, _rounds_inputs(options.rounds_inputs, dtype)),
    )


def _tell_formats(model: Model, config: ModelConfig) -> None:
    packed = [p.name for p in model.table.values() if any(one.packing for one in p.placements)]
    if not packed and config.formats is None:
        return
    decoded = [each for each in packed if isinstance(model.weights[each], torch.Tensor)]
    logger.info(
        "weights of the checkpoint: %s, %d matrices as they are stored",
        model.methods[packed[0]].name if config.formats is None else config.formats.name,
        len(packed) - len(decoded),
    )
    if decoded:
        logger.warning(
            "%d parameters (%s) are decoded to %s, since nothing multiplies them as they are "
            "stored: %.2f GiB",
            len(decoded),
            ", ".join(decoded[:2]) + (", ..." if len(decoded) > 2 else ""),
            str(model.spec.dtype).removeprefix("torch."),
            sum(model.weights[each].nbytes for each in decoded) / GIB,
        )


def _formats(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    options: LoadOptions,
    rounds_inputs: bool,
) -> Formats:
    """The checkpoint's own formats, or those that ``model.quantization`` asks for."""
    own = config.formats
    if own is None:
        return formats_of(options.quantization, options.group_size, rounds_inputs=rounds_inputs)
    if options.quantization is not None:
        raise ModelLoadError(
            f"model.quantization = {options.quantization!r}: the checkpoint is quantized already "
            f"({own.name}) and is served as it is; leave the setting out"
        )
    own = own.rounding(inputs=rounds_inputs)
    return own.opened({name: each.dtype for name, each in stored.items()}) if stored else own


def _rounds_inputs(wish: bool | None, dtype: torch.dtype) -> bool:
    # A user who chooses float32 wants more precision than 8-bit inputs have.
    return dtype == torch.bfloat16 if wish is None else wish


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The torch dtype of `auto` (the checkpoint's own, if it can be computed in) or of a name.

    Raises
    ------
    ModelLoadError
        The name, or the checkpoint's own dtype, is not supported.
    """
    name = config.dtype or "float32" if dtype == "auto" else dtype
    if dtype == "auto" and name == "float16" and family_of(config.architecture).overflows_float16:
        # Every answer would be NaN. Users who ask for float16 by name get it.
        name = "bfloat16"
    if name not in DTYPE_NAMES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {name!r}")
    resolved: torch.dtype = getattr(torch, name)
    return resolved


def resolve_max_positions(max_model_len: int | None, config: ModelConfig) -> int:
    """The longest sequence, in tokens, that the model has to support.

    Without ``max_model_len`` it is what the position encoding is made for, up to 2**20.

    Raises
    ------
    ModelLoadError
        ``max_model_len`` is more than the position encoding allows.
    """
    if max_model_len is None:
        return min(config.max_positions, _MOST_BY_DEFAULT)
    limit = config.position_limit
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(
            f"max_model_len must be from 1 to {limit} for this model "
            f"(max_position_embeddings={config.max_position_embeddings}, "
            f"rope type {config.rope.rope_type}), got {max_model_len}"
        )
    return max_model_len


def open_tensors(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a model's directory or GGUF file, by the names that the configuration has.

    Raises
    ------
    ModelLoadError
        See `checkpoint.open_checkpoint`.
    """
    if is_gguf(path):
        # Imported here because few checkpoints need it.
        from src.models.gguf.checkpoint import open_checkpoint as open_gguf_checkpoint

        return _named(open_gguf_checkpoint(path), config)
    return _named(open_checkpoint(path), config)


def _named(stored: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors with the names of a whole model, if they have those of one without its head."""
    body, _, embedding = f"{config.embedding_name}.weight".partition(".")
    if f"{body}.{embedding}" in stored or embedding not in stored:
        return stored
    own = f"{config.head_name}."
    return {
        name if name.startswith(own) else f"{body}.{name}": each for name, each in stored.items()
    }


def _is_unread(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of a layer behind the last, or of another part of a larger model.

    See `unread_layers` and `unread` of `ModelConfig`.
    """
    if name.startswith(config.unread):
        return True
    before, behind = config.layer_name.split("{}")
    layer = re.match(rf"{re.escape(before)}(\d{{1,9}}){re.escape(behind)}\.", name)
    last = len(config.layers)
    return layer is not None and last <= int(layer[1]) < last + config.unread_layers


def _empty_biases(stored: Mapping[str, StoredTensor], wanted: set[str]) -> set[str]:
    """Biases of zeros that older GPTQ tools write beside matrices that have none."""
    reader, found = TensorReader(lambda count: None), set[str]()
    for name, bias in stored.items():
        module = name.removesuffix("bias")
        if name in wanted or module == name or f"{module}qweight" not in stored:
            continue
        values = torch.empty(bias.shape, dtype=bias.dtype)
        reader.read(bias, values)
        if not values.any():
            found.add(name)
    return found


def _differ(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    return one is not None and other is not None and not equal_contents(one, other)


class _Reporter:
    """Adds up bytes from several threads, and reports them to the caller or a progress bar."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._done, self._total, self._progress = 0, total, progress
        self._bar = None
        if progress is None and sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="weights", leave=False)

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)
            if self._bar is not None:
                self._bar.update(count)

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
