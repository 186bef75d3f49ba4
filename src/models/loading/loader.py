"""Loads a model directory into a `Model` with filled parameters."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from src.core.config import GIB
from src.core.errors import ModelLoadError
from src.core.gguf import is_gguf
from src.distributed import Group
from src.models.adapters.memory import AdapterRoom
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
from src.models.model import Model
from src.models.registry import family_of, load_config
from src.models.weights.methods import Formats, formats_of
from src.ops.rounding import Method

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]  # (bytes read, total bytes); any thread, one call at a time

# Tokens. Every position has a row in a table of RoPE, whether or not memory holds such a context.
_MOST_BY_DEFAULT = 2**20


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: torch.device | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    quantization: Method | None = None,
    group_size: int = 32,
    rounds_inputs: bool | None = False,
    deterministic: bool = False,
    adapters: AdapterRoom | None = None,
    before_each_matrix: Callable[[], None] = lambda: None,
    when_allocated: Callable[[Model], None] = lambda model: None,
) -> Model:
    """Build the model of a directory and fill its parameters.

    Args:
        path: a local directory in Hugging Face layout, or a GGUF file (see `hub.resolve_model`).
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: where parameters live; None: the CPU.
        load_format: `dummy` fills parameters from `seed` and reads no file but `config.json`.
        seed: of dummy weights.
        progress: called with the bytes read and the total bytes. None: a progress bar, if standard
            error is a terminal.
        max_model_len: longest sequence in tokens; None: the length that the model is made for.
        quantization: of the projections' weights after reading, see `formats_of`.
        group_size: of `int4`.
        rounds_inputs: whether quantized projections also round their inputs; None: if the model is
            bfloat16.
        deterministic: whether a token's result must be the same bits in every batch.
        adapters: slots for adapters; None: there are none.
        before_each_matrix: called before each matrix is quantized.
        when_allocated: called when all parameters are allocated, before any is filled.

    Raises:
        ModelLoadError: the checkpoint cannot be served; the message says why.
    """
    config = load_config(path)
    device = device or torch.device("cpu")
    family, torch_dtype = family_of(config.architecture), resolve_dtype(dtype, config)
    stored = _named(_open(path), config) if load_format != "dummy" else {}
    head, embedding = f"{config.head_name}.weight", f"{config.embedding_name}.weight"
    if config.tie_word_embeddings and _differ(stored.get(head), stored.get(embedding)):
        # Like the reference: a head with values of its own is not tied, whatever the flag says.
        config = replace(config, tie_word_embeddings=False)
    elif config.tie_word_embeddings and embedding not in stored and head in stored:
        # A checkpoint that stores the shared tensor once may have stored it as the head.
        stored[embedding] = stored[head]
    rounds = _rounds_inputs(rounds_inputs, torch_dtype)
    wanted: set[str] = set()

    def check(model: Model) -> None:
        # A configuration may ask for any amount of memory. The checkpoint's tensors bound it.
        wanted.update(name for each in model.table.values() for name in stored_names(model, each))
        passed_over = {head} if config.tie_word_embeddings else set()
        passed_over |= {name for name in stored if _is_unread(name, config)} | scale_names(stored)
        check_tensors(path, stored, model, passed_over | _empty_biases(stored, wanted))

    model = Model(
        config,
        family.write,
        dtype=torch_dtype,
        device=device,
        max_positions=resolve_max_positions(max_model_len, config),
        deterministic=deterministic,
        adapters=adapters,
        formats=_formats(config, stored, quantization, group_size, rounds),
        before_allocating=check if load_format != "dummy" else lambda model: None,
    )
    if dtype == "auto" and config.dtype == "float16" and torch_dtype != torch.float16:
        logger.info(
            "the checkpoint is float16, whose range %s leaves: served in bfloat16; "
            "model.dtype may be float32",
            config.architecture,
        )
    if model.adapters is not None and embedding in stored:
        # A head that shares the embedding's values has no tensor of its own.
        own = {embedding: stored[embedding], head: stored.get(head, stored[embedding])}
        model.adapters.base = own
    when_allocated(model)
    if load_format == "dummy":
        fill_dummy(model, seed, before_each_matrix)
        return model
    model.kv_scales = read_scales(stored)
    with _Reporter(sum(stored[name].size for name in wanted & stored.keys()), progress) as report:
        fill(model, stored, report, before_each_matrix)
    _tell_formats(model, config)
    return model


def outline_model(
    path: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    quantization: Method | None = None,
    group_size: int = 32,
    rounds_inputs: bool | None = False,
    deterministic: bool = False,
    adapters: AdapterRoom | None = None,
    group: Group | None = None,
    outlines_tables: bool = False,
) -> Model:
    """The model that `load_model` builds, but on the meta device: shapes without values.

    Reads no file but `config.json`. Arguments are those of `load_model` and `Model`. With a `group`
    it is the part of one of its ranks.

    Raises:
        ModelLoadError: the configuration cannot be served.
    """
    config = load_config(path)
    torch_dtype = resolve_dtype(dtype, config)
    rounds = _rounds_inputs(rounds_inputs, torch_dtype)
    return Model(
        config,
        family_of(config.architecture).write,
        dtype=torch_dtype,
        device=torch.device("meta"),
        max_positions=resolve_max_positions(max_model_len, config),
        group=group,
        outlines_tables=outlines_tables,
        deterministic=deterministic,
        adapters=adapters,
        formats=_formats(config, {}, quantization, group_size, rounds),
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
    quantization: Method | None,
    group_size: int,
    rounds_inputs: bool,
) -> Formats:
    """The checkpoint's own formats, or those that ``model.quantization`` asks for."""
    own = config.formats
    if own is None:
        return formats_of(quantization, group_size, rounds_inputs=rounds_inputs)
    if quantization is not None:
        raise ModelLoadError(
            f"model.quantization = {quantization!r}: the checkpoint is quantized already "
            f"({own.name}) and is served as it is; leave the setting out"
        )
    own = own.rounding(inputs=rounds_inputs)
    return own.opened(stored) if stored else own


def _rounds_inputs(wish: bool | None, dtype: torch.dtype) -> bool:
    # A user who chooses float32 wants more precision than 8-bit inputs have.
    return dtype == torch.bfloat16 if wish is None else wish


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The torch dtype of `auto` (the checkpoint's own, if it can be computed in) or of a name.

    Raises:
        ModelLoadError: the name, or the checkpoint's own dtype, is not supported.
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

    Raises:
        ModelLoadError: ``max_model_len`` is more than the position encoding allows.
    """
    if max_model_len is None:
        return min(config.max_positions, _MOST_BY_DEFAULT)
    limit = config.rope.limit(config.max_position_embeddings)
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(
            f"max_model_len must be from 1 to {limit} for this model "
            f"(max_position_embeddings={config.max_position_embeddings}, "
            f"rope type {config.rope.rope_type}), got {max_model_len}"
        )
    return max_model_len


def _open(path: Path) -> dict[str, StoredTensor]:
    if is_gguf(path):
        # Imported here because few checkpoints need it.
        from src.models.gguf.checkpoint import open_checkpoint as open_gguf_checkpoint

        return open_gguf_checkpoint(path)
    return open_checkpoint(path)


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
