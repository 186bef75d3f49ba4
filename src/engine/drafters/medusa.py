"""Medusa: heads that guess further tokens from the model's last hidden state.

T. Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774, section 2.1. Head i guesses the token i + 2 positions behind the one whose hidden
state it reads; the model itself draws the one between. Of each head one token is taken, so the
guesses are a chain and no tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.core.config import Config
from src.core.errors import ModelLoadError
from src.core.memory_report import WeightPart
from src.core.plan import RowStep
from src.engine.drafters.draws import GuessWriter
from src.engine.drafters.source import DraftMemory, DraftPlace
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler
from src.engine.speculation import SURE, BatchDrafter, Guess
from src.models import ServedModel
from src.models.checkpoint import StoredTensor, TensorReader, open_checkpoint, read_header
from src.models.config_file import name_of_config, read_config_file
from src.models.fields import Fields
from src.models.layers.linear import linear
from src.text import Tokenizer

# Where published heads lie; else in the files of a whole checkpoint.
_FILE: Final = "medusa_lm_head.safetensors"
_PREFIXES: Final = ("medusa_heads.", "medusa_head.", "")
_MOST: Final = 64


class _Sizes(NamedTuple):
    heads: int
    layers: int
    hidden: int
    vocab: int


class _Layout(NamedTuple):
    """How a checkpoint names a head's tensors: ``{head}`` and ``{layer}`` are numbers."""

    layer: str
    out: str

    def layer_of(self, head: int, layer: int) -> str:
        return self.layer.format(head=head, layer=layer)

    def out_of(self, head: int, layers: int) -> str:
        return self.out.format(head=head, layer=layers)


# Those of the authors' code, and those that vLLM reads.
_LAYOUTS: Final = (
    _Layout("{head}.{layer}.linear", "{head}.{layer}.weight"),
    _Layout("blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"),
)


class Head(NamedTuple):
    """One head: the weights [H, H] and biases [H] of its layers, and the matrix [V, H]."""

    layers: tuple[tuple[Tensor, Tensor | None], ...]
    out: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [B, V] float32 of the token that this head guesses, from [B, H]."""
        for weight, bias in self.layers:
            hidden = hidden + functional.silu(linear(hidden, weight, bias))
        return linear(hidden, self.out).float()


@dataclass(frozen=True)
class MedusaHeads:
    """Loaded heads; see `DraftSource`."""

    heads: Sequence[Head]
    memory: DraftMemory

    def drafter(self, place: DraftPlace) -> BatchDrafter:
        """See `DraftSource`."""
        return MedusaDrafter(self.heads, place.rows, place.sampler)


class MedusaDrafter(BatchDrafter):
    """Keeps with each row the hidden state that its newest token was sampled from.

    Parameters
    ----------
    heads
        The first one guesses the token behind the newest.
    """

    wants_hidden = "sampled"
    source = "medusa"

    def __init__(self, heads: Sequence[Head], rows: RowState, sampler: Sampler) -> None:
        super().__init__()
        self._heads, self._rows, self._sampler = heads, rows, sampler
        first = heads[0].out
        # [R, H]: row -> what its newest token was sampled from.
        self._hidden_r = first.new_zeros(rows.padding_row, first.shape[1])
        # Row -> its number of tokens then.
        self._known: dict[int, int] = {}

    def vacate(self, row: int) -> None:
        """See `BatchDrafter`."""
        self._known.pop(row, None)

    def keep(self, last: Mapping[int, tuple[int, int]], hidden_s: Tensor) -> None:
        """See `BatchDrafter`."""
        rows = torch.tensor(list(last), dtype=torch.int64, device=hidden_s.device)
        indices = [index for index, _ in last.values()]
        self._hidden_r[rows] = hidden_s[indices].to(self._hidden_r.dtype)
        self._known.update((row, known) for row, (_, known) in last.items())

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """See `BatchDrafter`."""
        known = {step.row: step.start + step.num_tokens for step in rows if step.row in asked}
        # A row has no hidden state behind a step that failed.
        known = {row: count for row, count in known.items() if self._known.get(row) == count}
        with GuessWriter(self._rows, self._sampler, known) as writer:
            going_on = list(known)
            for place, head in enumerate(self._heads):
                going_on = [row for row in going_on if asked[row] > place]
                if not going_on:
                    break
                going_on = writer.draw(going_on, head.logits(self._hidden_r[going_on]))
        self.guesses = {row: Guess(each, SURE, self.source) for row, each in writer.guesses.items()}


def load_medusa(
    path: Path, config: Config, target: ServedModel, tokenizer: Tokenizer | None, *, outlines: bool
) -> MedusaHeads:
    """See `LoadSource`."""
    sizes = _sizes(Fields(read_config_file(path), name_of_config(path), {}), target)
    spec = target.spec
    if outlines:
        stored: Mapping[str, StoredTensor] = {}
        layout = _LAYOUTS[0]
    else:
        stored = _stored(path)
        layout, stored = _named(stored, sizes, path)
    device = torch.device("meta") if outlines else spec.device
    tensors = {
        name: torch.empty(shape, dtype=spec.dtype, device=device)
        for name, shape in _shapes(layout, sizes, stored)
    }
    if not outlines:
        _fill(tensors, stored, path)
    heads = [_head(tensors, layout, number, sizes.layers) for number in range(sizes.heads)]
    part = WeightPart(
        "Medusa heads",
        sum(tensor.numel() for tensor in tensors.values()),
        sum(tensor.nbytes for tensor in tensors.values()),
    )
    return MedusaHeads(heads, DraftMemory(parts=(part,)))


def _sizes(fields: Fields, target: ServedModel) -> _Sizes:
    spec = target.spec
    if fields.raw("medusa_num_heads") is not None:
        names = ("medusa_num_heads", "medusa_num_layers")
    else:
        # As vLLM writes them.
        names = ("num_heads", "num_hidden_layers")
        if fields.raw("num_heads") is None:
            raise fields.error("medusa_num_heads", "the number of Medusa's heads")
    heads, layers = fields.integer(names[0]), fields.count(names[1])
    if fields.raw(names[1]) is None:
        layers = 1
    for name, value in zip(names, (heads, layers), strict=True):
        if value > _MOST:
            raise fields.error(name, f"at most {_MOST}")
    if names[0] == "num_heads":
        for name, expected in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
            if fields.raw(name) not in (None, expected):
                raise fields.error(name, f"{expected}, as the model's")
    return _Sizes(heads, layers, spec.hidden_size, spec.vocab_size)


def _stored(path: Path) -> dict[str, StoredTensor]:
    file = path / _FILE
    return read_header(file) if file.exists() else open_checkpoint(path)


def _named(
    stored: Mapping[str, StoredTensor], sizes: _Sizes, path: Path
) -> tuple[_Layout, dict[str, StoredTensor]]:
    """The layout of a checkpoint, and its tensors by their names without a prefix."""
    for prefix in _PREFIXES:
        for layout in _LAYOUTS:
            if prefix + layout.out_of(0, sizes.layers) in stored:
                named = {
                    name.removeprefix(prefix): tensor
                    for name, tensor in stored.items()
                    if name.startswith(prefix)
                }
                return layout, named
    expected = " or ".join(_PREFIXES[0] + each.out_of(0, sizes.layers) for each in _LAYOUTS)
    raise ModelLoadError(f"{path}: no tensor of the first of {sizes.heads} heads, {expected}")


def _shapes(
    layout: _Layout, sizes: _Sizes, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the heads; biases where there are some."""
    for head in range(sizes.heads):
        for layer in range(sizes.layers):
            name = layout.layer_of(head, layer)
            yield f"{name}.weight", (sizes.hidden, sizes.hidden)
            if f"{name}.bias" in stored or (not stored and layout is _LAYOUTS[0]):
                yield f"{name}.bias", (sizes.hidden,)
        yield layout.out_of(head, sizes.layers), (sizes.vocab, sizes.hidden)


def _fill(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], path: Path) -> None:
    reader = TensorReader(lambda count: None)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name not in stored:
            raise ModelLoadError(f"{path}: the tensor {name} of shape {list(shape)} is missing")
        if stored[name].shape != shape:
            raise ModelLoadError(
                f"{path}: {name}: expected {list(shape)} for this model, got "
                f"{list(stored[name].shape)}"
            )
        if not stored[name].dtype.is_floating_point:
            raise ModelLoadError(f"{path}: {name}: expected numbers, got {stored[name].dtype}")
    for name, tensor in tensors.items():
        reader.read(stored[name], tensor)


def _head(tensors: Mapping[str, Tensor], layout: _Layout, head: int, layers: int) -> Head:
    names = [layout.layer_of(head, layer) for layer in range(layers)]
    own = tuple((tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names)
    return Head(own, tensors[layout.out_of(head, layers)])
