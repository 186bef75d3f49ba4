"""The tensors of GGUF files under the names of `config.json`'s world."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from src.core.errors import ModelLoadError
from src.core.gguf import GGUFTensor, open_gguf
from src.models.checkpoint import StoredTensor
from src.models.gguf.architectures import architecture_of
from src.models.gguf.types import PLAIN_TYPES

_OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Read with the metadata.
_NOT_WEIGHTS: Final = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_IN_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_OF_EXPERT: Final = "{}"
# Far more than any model that is served has. Both are counted before a name is made for an expert:
# one tensor of a small file may claim millions of experts, and thousands may lie on each other.
_MOST_EXPERTS: Final = 1024
_MOST_TENSORS: Final = 262_144  # with one of each expert


def open_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """Every tensor by the name that it has in a directory of safetensors.

    Tensors of blocks are matrices of bytes: [rows, bytes of a row]. Names that are not known stay,
    so that they are refused where names are checked.

    Raises
    ------
    ModelLoadError
        a file is damaged, or its architecture is not served.
    """
    tensors: dict[str, StoredTensor] = {}
    for tensor, name, stored in _named(path):
        if tensor.name in _NOT_WEIGHTS:
            continue
        if name in tensors:
            raise ModelLoadError(f"{path}: {tensor.name} occurs under two names")
        tensors[name] = stored
    return tensors


def block_types(path: Path) -> dict[str, str]:
    """The types of the tensors that have blocks, by the same names.

    Raises
    ------
    ModelLoadError
        See `open_checkpoint`.
    """
    return {
        name: tensor.type.name
        for tensor, name, _ in _named(path)
        if tensor.type.name not in PLAIN_TYPES
    }


def _named(path: Path) -> Iterator[tuple[GGUFTensor, str, StoredTensor]]:
    """Every tensor, or part of one, with its name and place.

    Raises
    ------
    ModelLoadError
        See `open_checkpoint`; before the first one.
    """
    file = open_gguf(path)
    names = architecture_of(file.metadata, str(path))[1].names
    total = 0
    for tensor in file.tensors.values():
        count = _experts_of(tensor, names)
        total += max(count, 1)
        if count > _MOST_EXPERTS or total > _MOST_TENSORS:
            raise ModelLoadError(
                f"{path}: {tensor.name} has {count} experts; at most {_MOST_EXPERTS}, and "
                f"{_MOST_TENSORS} tensors with one of each expert, are read"
            )
    for tensor in file.tensors.values():
        for name, stored in _stored(tensor, names):
            yield tensor, name, stored


def _experts_of(tensor: GGUFTensor, names: Mapping[str, str]) -> int:
    """How many experts a tensor is a stack of; 0: it is none."""
    is_stack = _name(tensor.name, names)[1] and len(tensor.shape) == 3
    return tensor.shape[0] if is_stack else 0


def _name(name: str, names: Mapping[str, str]) -> tuple[str, bool]:
    """The tensor's name, and whether it is of all experts, with ``{}`` for their numbers.

    Whatever the file has for a name, no other name counts as such a pattern.
    """
    stem, _, ending = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{ending}", False
    layer = _IN_LAYER.fullmatch(name)
    if layer is None or layer[2] not in names:
        return name, False
    within = names[layer[2]]
    return f"model.layers.{layer[1]}.{within}.{layer[3]}", _OF_EXPERT in within


def _stored(tensor: GGUFTensor, names: Mapping[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensor under its name; a stack of experts' matrices as one tensor of each."""
    name = _name(tensor.name, names)[0]
    experts = _experts_of(tensor, names)
    dtype = PLAIN_TYPES.get(tensor.type.name, torch.uint8)
    shape = tensor.shape
    if dtype == torch.uint8:
        shape = (*shape[:-1], tensor.size // math.prod(shape[:-1]))
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
    whole = StoredTensor(name, tensor.file, dtype, shape, tensor.offset, tensor.size)
    if not experts:
        yield name, whole
        return
    for expert in range(experts):
        yield name.replace(_OF_EXPERT, str(expert)), whole.part(expert)
