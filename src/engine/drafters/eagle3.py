"""EAGLE-3: a layer on the model's hidden states says the next tokens (`models.eagle`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.core.config import Config
from src.core.errors import ModelLoadError
from src.core.memory_report import WeightPart
from src.engine.drafters.onward import OnwardDrafter, run_largest
from src.engine.drafters.source import DraftMemory, DraftPlace
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.speculation import BatchDrafter
from src.models import Model, ModelConfig, ServedModel
from src.models.checkpoint import StoredTensor, TensorReader, open_checkpoint
from src.models.config_file import name_of_config, read_config_file
from src.models.eagle import EagleForm, write_eagle
from src.models.families.llama import Llama
from src.models.fields import Fields
from src.models.layers.linear import linear
from src.models.loading.filling import check_tensors, fill
from src.models.model import ModelOptions
from src.text import Tokenizer

_D2T, _T2D = "d2t", "t2d"


def taps_of(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers of a model whose inputs a head reads; empty: it reads hidden states alone.

    Where the file names none they are those of the authors' code.

    Raises
    ------
    ModelLoadError
        The model has no such layers.
    """
    section = fields.raw("eagle_config")
    given: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    if given.get("use_aux_hidden_state") is False:
        return ()
    name = "eagle_aux_hidden_state_layer_ids"
    layers = given.get(name) or fields.raw(name)
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]
        if num_layers < 7:
            raise ModelLoadError(
                f"{name} must be given for a model of {num_layers} layers; the usual ones are of "
                "models with 7 or more"
            )
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or not layers or sorted(set(layers)) != layers:
        raise ModelLoadError(f"{name} must be a list of ascending layers, got {layers!r}")
    if layers[0] < 0 or layers[-1] > num_layers:
        raise ModelLoadError(f"{name} must be from 0 to {num_layers}, got {layers!r}")
    return tuple(layers)


def required_taps(path: Path, num_layers: int) -> tuple[int, ...]:
    """The same for the head of a directory. See `Source`."""
    return taps_of(_fields(path), num_layers)


@dataclass(frozen=True)
class EagleHead:
    """A loaded head; see `DraftSource`.

    Attributes
    ----------
    targets
        int64 [tokens of its head], their ids in the model's vocabulary; None: they are the same.
    """

    model: Model
    form: EagleForm
    target: Model
    targets: Tensor | None
    memory: DraftMemory

    def drafter(self, place: DraftPlace) -> BatchDrafter:
        """See `DraftSource`."""
        return EagleDrafter(self, place)

    def features(self, hidden: Tensor) -> Tensor:
        """See `OnwardDrafter`; the tapped layers stand behind the hidden states."""
        fc = self.model.weights.get("fc")
        if fc is None:
            return hidden[:, : self.model.spec.hidden_size]
        assert isinstance(fc, Tensor)
        return linear(hidden[:, -fc.shape[1] :].contiguous(), fc)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `OnwardDrafter`."""
        logits = self.model.logits(self.model.functions, hidden)
        if self.form.head_size is None:
            # These are hidden states, for the model's own head.
            logits = self.target.logits(self.target.functions, logits)
        if self.targets is not None:
            whole = logits.new_full((len(logits), self.target.spec.vocab_size), float("-inf"))
            whole[:, self.targets] = logits
            logits = whole
        return logits


class EagleDrafter(OnwardDrafter):
    """Goes on from features, which a linear layer makes of hidden states of the model."""

    source = "eagle3"

    def __init__(self, head: EagleHead, place: DraftPlace) -> None:
        own = head.model.weights.get("embedding", None)
        super().__init__(head.model, head.target, place, own)
        self._head = head

    def features(self, hidden: Tensor) -> Tensor:
        """See `OnwardDrafter`."""
        return self._head.features(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `OnwardDrafter`."""
        return self._head.logits(hidden)


def load_eagle3(
    path: Path, config: Config, target: ServedModel, tokenizer: Tokenizer | None, *, outlines: bool
) -> EagleHead:
    """See `LoadSource`. The model is loaded with the taps of `required_taps`."""
    if not isinstance(target, Model):
        raise ModelLoadError(
            f"{path}: eagle3 reads hidden states of layers, which transformers' implementation "
            "does not give: the model must be of a native family (docs/models.md)"
        )
    fields = _fields(path)
    described = Llama.describe(fields)
    _require_sizes(fields, described, target)
    stored = {} if outlines else _stored(path)
    described, form = _form(fields, described, target, stored)
    spec = target.spec
    options = ModelOptions(
        dtype=spec.dtype,
        device=torch.device("meta") if outlines else spec.device,
        max_positions=spec.max_positions,
        deterministic=config.model.deterministic,
        rotates_in_op=False,
        outlines_tables=outlines,
    )
    write = partial(write_eagle, form=form)

    def check(model: Model) -> None:
        if not outlines:
            check_tensors(path, stored, model, {_D2T, _T2D, f"{described.embedding_name}.weight"})

    model = Model(described, write, options, check)
    if not outlines:
        fill(model, stored, lambda count: None, lambda: None)
    set_cache_dtype(config.cache, model)
    targets = _targets(path, stored, form, spec.vocab_size)
    part = WeightPart(
        "EAGLE-3 head",
        sum(tensor.numel() for tensor in model.parameters().values()),
        sum(model.weights[name].nbytes for name in model.table)
        + sum(table.nbytes for table in model.buffers().values()),
    )
    head = EagleHead(model, form, target, targets, DraftMemory(model.kv_cache_spec(), (part,)))
    largest = partial(run_largest, model, config, head.features, head.logits)
    return replace(head, memory=head.memory._replace(largest=largest))


def _fields(path: Path) -> Fields:
    raw = read_config_file(path)
    return Fields({**raw, "architectures": ["EAGLE-3"]}, name_of_config(path), {})


def _require_sizes(fields: Fields, described: ModelConfig, target: Model) -> None:
    spec = target.spec
    if len(described.layers) != 1:
        raise fields.error("num_hidden_layers", "1")
    if described.vocab_size != spec.vocab_size:
        raise fields.error("vocab_size", f"{spec.vocab_size}, as the model's")
    name = "target_hidden_size" if fields.raw("target_hidden_size") else "hidden_size"
    if fields.raw(name) != spec.hidden_size:
        raise fields.error(name, f"{spec.hidden_size}, the model's hidden_size")


def _stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors without the prefix that some tools write."""
    return {name.removeprefix("model."): each for name, each in open_checkpoint(path).items()}


def _form(
    fields: Fields, described: ModelConfig, target: Model, stored: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, EagleForm]:
    """What the head consists of, and the names of its tensors."""
    taps = target.options.taps
    head_size = fields.integer("draft_vocab_size", default=described.vocab_size)
    has_head = not stored or "lm_head.weight" in stored
    if not taps and described.hidden_size != target.spec.hidden_size:
        raise fields.error("hidden_size", f"{target.spec.hidden_size}, the model's")
    form = EagleForm(
        fused=len(taps) * target.spec.hidden_size if taps else None,
        head_size=head_size if has_head else None,
        has_embedding="embed_tokens.weight" in stored,
        norm_before_residual=fields.boolean("norm_before_residual"),
    )
    if not form.has_embedding and described.hidden_size != target.spec.hidden_size:
        raise ModelLoadError(
            "embed_tokens.weight is missing, and the model's own has another size: expected "
            f"{described.hidden_size}, got {target.spec.hidden_size}"
        )
    layer = replace(described.layers[0], attention_norm=None)
    is_numbered = any(name.startswith("layers.0.") for name in stored)
    renamed = replace(
        described,
        layers=(layer,),
        layer_name="layers.{}" if is_numbered else "midlayer",
        embedding_name="embed_tokens",
        final_norm_name="norm",
        tie_word_embeddings=False,
    )
    return renamed, form


def _targets(
    path: Path, stored: Mapping[str, StoredTensor], form: EagleForm, vocab_size: int
) -> Tensor | None:
    """The ids of the head's tokens in the model's vocabulary, from their differences."""
    size = form.head_size
    if size is None:
        return None
    if _D2T not in stored:
        if stored and size != vocab_size:
            raise ModelLoadError(
                f"{path}: the tensor {_D2T} is missing: its head knows {size} of {vocab_size} "
                "tokens"
            )
        return None
    found = stored[_D2T]
    if found.shape != (size,) or found.dtype not in (torch.int64, torch.int32):
        raise ModelLoadError(
            f"{path}: {_D2T}: expected integers of shape [{size}], got {found.dtype} of "
            f"{list(found.shape)}"
        )
    differences = torch.empty(size, dtype=found.dtype)
    TensorReader(lambda count: None).read(found, differences)
    targets = torch.arange(size) + differences.to(torch.int64)
    if int(targets.min()) < 0 or int(targets.max()) >= vocab_size:
        raise ModelLoadError(
            f"{path}: {_D2T} names tokens from {int(targets.min())} to {int(targets.max())}: "
            f"expected 0 to {vocab_size - 1}"
        )
    return targets
