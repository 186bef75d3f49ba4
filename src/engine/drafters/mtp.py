"""Layers that checkpoints bring to predict further tokens (`models.predictor`).

The first of them guesses the next token; it goes on from its own hidden states for those behind.
It embeds tokens as the model does, and the model's head reads what leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from src.core.config import Config
from src.core.errors import ModelLoadError
from src.core.memory_report import WeightPart
from src.engine.drafters.onward import OnwardDrafter, run_largest
from src.engine.drafters.source import DraftMemory, DraftPlace
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.speculation import BatchDrafter
from src.models import Model, ModelConfig, ServedModel, device_of, load_config
from src.models.checkpoint import StoredTensor, tensor_names
from src.models.config import PredictorConfig
from src.models.loading.cache_scales import scale_names
from src.models.loading.dummy import fill_dummy
from src.models.loading.filling import check_tensors, fill
from src.models.loading.loader import open_tensors
from src.models.predictor import predictor_config, write_predictor
from src.text import Tokenizer

# The most guesses of a row that nobody has asked for by a method's name. The layer was made to say
# one token, and each further one costs a pass of it and of the head.
_MOST_BY_DEFAULT: Final = 3


@dataclass(frozen=True)
class PredictingLayer:
    """A loaded layer; see `DraftSource`.

    Attributes
    ----------
    most
        The most guesses of a row; None: as many as are wanted.
    """

    model: Model
    target: Model
    memory: DraftMemory
    most: int | None

    def drafter(self, place: DraftPlace) -> BatchDrafter:
        """See `DraftSource`."""
        return PredictingDrafter(self, place)


class PredictingDrafter(OnwardDrafter):
    """Reads the model's last hidden states as they are."""

    source = "mtp"

    def __init__(self, layer: PredictingLayer, place: DraftPlace) -> None:
        super().__init__(layer.model, layer.target, place, most=layer.most)
        self._target = layer.target

    def logits(self, hidden: Tensor) -> Tensor:
        """See `OnwardDrafter`."""
        return self._target.logits(self._target.functions, hidden)


def brings_predictor(path: Path) -> bool:
    """Whether the checkpoint of a model has such a layer. Reads names of tensors alone.

    Raises
    ------
    ModelLoadError
        The model's configuration cannot be served, or a file is damaged.
    """
    predictor = load_config(path).predictor
    return predictor is not None and f"{predictor.join_name}.weight" in tensor_names(path)


def load_mtp(
    path: Path, config: Config, target: ServedModel, tokenizer: Tokenizer | None, *, outlines: bool
) -> PredictingLayer:
    """See `LoadSource`. The path is the model's own."""
    if not isinstance(target, Model):
        raise ModelLoadError(
            f"{path}: transformers' implementation serves it, which reads no layers that predict "
            "further tokens: the model must be of a native family (docs/models.md)"
        )
    own = target.config.predictor
    if own is None:
        raise ModelLoadError(
            f"{path}: its config.json describes no layer that predicts further tokens "
            f"({target.config.architecture})"
        )
    is_dummy = config.model.load_format == "dummy"
    stored = {} if outlines or is_dummy else _stored(path, target.config, own)
    options = replace(
        target.options,
        device=torch.device("meta") if outlines else target.spec.device,
        served_on=device_of(target),
        formats=target.formats,
        rotates_in_op=False,
        outlines_tables=outlines,
        adapters=None,
        taps=(),
    )

    def check(model: Model) -> None:
        if stored:
            check_tensors(path, stored, model, scale_names(stored))

    model = Model(predictor_config(target.config, own), write_predictor, options, check)
    if stored:
        fill(model, stored, lambda count: None, lambda: None)
    elif is_dummy and not outlines:
        fill_dummy(model, config.model.seed)
    set_cache_dtype(config.cache, model)
    part = WeightPart(
        "MTP layer",
        sum(tensor.numel() for tensor in model.parameters().values()),
        sum(model.weights[name].nbytes for name in model.table)
        + sum(table.nbytes for table in model.buffers().values()),
    )
    most = None if config.speculation.method == "mtp" else _MOST_BY_DEFAULT
    largest = partial(
        run_largest,
        model,
        config,
        lambda hidden: hidden[:, : model.spec.hidden_size],
        partial(target.logits, target.functions),
    )
    memory = DraftMemory(model.kv_cache_spec(), (part,), largest)
    return PredictingLayer(model, target, memory, most)


def _stored(path: Path, config: ModelConfig, own: PredictorConfig) -> dict[str, StoredTensor]:
    """The layer's tensors in the model's checkpoint."""
    further = own.layer_name.rpartition(".")[0] + "."
    tensors = {
        name: each
        for name, each in open_tensors(path, config).items()
        if name.startswith(own.prefix) and not name.startswith(own.unread)
    }
    if not tensors:
        raise ModelLoadError(
            f"{path}: its checkpoint has no layer that predicts further tokens: expected the "
            f"tensor {own.join_name}.weight, got none that begins with {own.prefix}"
        )
    # Of several layers the first is read.
    return {
        name: each
        for name, each in tensors.items()
        if name.startswith(f"{own.layer_name}.") or not name.startswith(further)
    }
