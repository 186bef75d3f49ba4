"""Reads an adapter's directory as PEFT writes it: a configuration and a safetensors file.

The file's tensors are ``base_model.model.<module>.lora_A.weight`` [r, in] and ``lora_B.weight``
[out, r]. The scale is multiplied into ``lora_B`` here, in float32, and rounded once with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.core.errors import ModelLoadError
from src.models.adapters.peft_config import PeftConfig, check_file, read_peft_config
from src.models.adapters.targets import Target, Targets
from src.models.checkpoint import (
    PICKLE_SUFFIXES,
    StoredTensor,
    TensorReader,
    equal_contents,
    read_header,
)

TENSOR_FILE = "adapter_model.safetensors"
_MOST_ITEM_BYTES = 8  # of float64
# Of a tensor in the header. The header is parsed in one piece, and no other thread runs meanwhile.
_MOST_ENTRY_BYTES = 1024
_MOST_OTHER_BYTES = 64 << 10
_PREFIX = "base_model.model."
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_VALUES_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class Update:
    """The update of one parameter, in the model's dtype; see `ops.lora`.

    Attributes
    ----------
    ranks
        Of each part; 0: it has none. R is the largest.
    down
        [P, R, K]; rows behind a part's rank are zero.
    up
        [R, N], multiplied by the scale.
    """

    ranks: tuple[int, ...]
    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter in host memory.

    Attributes
    ----------
    updates
        By parameter.
    digest
        sha256 of its tensors and scales: adapters of equal digests compute the same.
    rank
        The largest.
    """

    updates: dict[str, Update]
    digest: bytes
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.down.nbytes + each.up.nbytes for each in self.updates.values())


def read_adapter(
    directory: Path,
    targets: Targets,
    *,
    max_rank: int,
    dtype: torch.dtype,
    pinned: bool = False,
    rank: int = 0,
    world_size: int = 1,
    base: Mapping[str, StoredTensor] | None = None,
) -> AdapterWeights:
    """Read an adapter.

    Parameters
    ----------
    directory
        As PEFT's `save_pretrained` leaves it.
    targets
        The modules of the model.
    max_rank
        The largest rank that is read.
    dtype
        Of the result, the model's.
    pinned
        Whether the result lies in memory that a GPU can read.
    rank, world_size
        Which part of sharded projections to keep.
    base
        The model's embedding and head in its checkpoint, by name. PEFT saves them with an adapter
        if the vocabulary was resized. They are passed over if they are the model's.

    Raises
    ------
    ModelLoadError
        It cannot be read, does not fit the model, or asks for what is not supported; the message
        says why.
    """
    config = read_peft_config(directory, max_rank)
    base = base or {}
    stored = _open(directory, targets, max_rank, base)
    _pass_over(stored, base)
    maker = _Maker(targets, dtype, rank, world_size)
    for module, (down, up) in sorted(_by_module(directory, stored).items()):
        target = targets.find(module)
        _check_shapes(config, module, target, down, up, world_size)
        maker.add(module, target, down, up, config.scale_of(module))
    return maker.made(pinned=pinned)


def _open(
    directory: Path, targets: Targets, max_rank: int, base: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    path = directory / TENSOR_FILE
    if not path.exists() and any(
        (directory / f"adapter_model{suffix}").exists() for suffix in PICKLE_SUFFIXES
    ):
        raise ModelLoadError(
            f"{directory} has a pickled adapter, which can run code when it is read and is "
            "refused; convert it to safetensors"
        )
    header = _MOST_OTHER_BYTES + 2 * targets.num_modules * _MOST_ENTRY_BYTES
    values = targets.most_values(max_rank) + sum(map(_most_values, base.values()))
    check_file(path, header + _MOST_ITEM_BYTES * values)
    return read_header(path, header)


def _pass_over(stored: dict[str, StoredTensor], base: Mapping[str, StoredTensor]) -> None:
    """Drop the embedding and the head that were saved with an adapter and are the model's own."""
    for name, own in base.items():
        saved = stored.pop(f"{_PREFIX}{name}", None)
        if saved is None:
            continue
        if _is_packed(own) and saved.shape[:1] == own.shape[:1]:
            raise ModelLoadError(
                f"{saved.file}: {saved.name}: the model's own is quantized, so whether the adapter "
                "changes it cannot be told; save the adapter without it "
                "(save_embedding_layers=False)"
            )
        if saved.shape != own.shape:
            raise ModelLoadError(
                f"{saved.file}: {saved.name} has the shape {list(saved.shape)}, the model's own "
                f"{list(own.shape)}: adapters that change the vocabulary are not supported"
            )
        if not _equal(saved, own):
            raise ModelLoadError(
                f"{saved.file}: {saved.name} is not the model's own: adapters that change the "
                "embedding or the head are not supported"
            )


def _is_packed(own: StoredTensor) -> bool:
    """Whether a matrix of the model is stored as codes, and its shape is that of these."""
    return not own.dtype.is_floating_point or own.dtype.itemsize == 1


def _most_values(own: StoredTensor) -> int:
    """As many values as a matrix of the model has, or more; no code has less than a bit."""
    return 8 * own.size if _is_packed(own) else math.prod(own.shape)


def _equal(saved: StoredTensor, own: StoredTensor) -> bool:
    """Whether two matrices hold the same numbers, whatever types they have."""
    if saved.dtype == own.dtype:
        return equal_contents(saved, own)
    if not (saved.dtype.is_floating_point and own.dtype.is_floating_point) or len(own.shape) != 2:
        return False
    rows, columns = own.shape
    step, reader = max(1, _VALUES_AT_ONCE // columns), TensorReader(lambda _: None)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        pair = [torch.empty((stop - start, columns), dtype=torch.float64) for _ in range(2)]
        for tensor, each in zip(pair, (saved, own), strict=True):
            reader.read(each.rows(start, stop), tensor)
        if not torch.equal(*pair):
            return False
    return True


def _by_module(
    directory: Path, stored: dict[str, StoredTensor]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise ModelLoadError(f"{directory}: {name[:200]!r} is {_strange(name)}")
        if not tensor.dtype.is_floating_point:
            raise ModelLoadError(f"{directory}: {name} has dtype {tensor.dtype}")
        pairs.setdefault(matched[1], {})[matched[2]] = tensor
    if not pairs:
        raise ModelLoadError(f"{directory}: {TENSOR_FILE} has no tensor")
    for module, pair in pairs.items():
        if len(pair) < 2:
            missing = "lora_B" if "A" in pair else "lora_A"
            raise ModelLoadError(f"{directory}: {module} has no {missing}")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}


def _strange(name: str) -> str:
    """What a tensor is that is not read."""
    if "lora_embedding" in name:
        return "of the embedding, whose adapters are not supported"
    if "lora_magnitude_vector" in name:
        return "of DoRA, which is not supported"
    if name.endswith((".lora_A.bias", ".lora_B.bias")):
        return "a bias of an adapter (lora_bias), which is not supported"
    if "lora_" not in name:
        return "no update: whole modules beside the updates (modules_to_save) are not supported"
    return "no tensor of a LoRA adapter"


def _check_shapes(
    config: PeftConfig,
    module: str,
    target: Target,
    down: StoredTensor,
    up: StoredTensor,
    world_size: int,
) -> None:
    rank, placement = int(config.rank_of(module)), target.placement
    sizes = [target.outputs, target.inputs]
    if placement.shard is not None:
        sizes[placement.shard] *= world_size
    for name, stored, expected in (
        ("lora_A", down, (rank, sizes[1])),
        ("lora_B", up, (sizes[0], rank)),
    ):
        if stored.shape != expected:
            raise ModelLoadError(
                f"{stored.file}: {name} of {module} must be {list(expected)}, since the rank is "
                f"{rank} in {config.source}, got {list(stored.shape)}"
            )


class _Maker:
    """Collects the updates of modules, and makes those of parameters from them."""

    def __init__(self, targets: Targets, dtype: torch.dtype, rank: int, world_size: int) -> None:
        self._targets = targets
        self._dtype = dtype
        self._rank, self._world_size = rank, world_size
        self._reader = TensorReader(lambda _: None)
        self._digest = hashlib.sha256(b"slipstream-lora\0")
        # Parameter -> part -> (down [r, K], up [r, rows])
        self._found: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}

    def add(
        self, module: str, target: Target, down: StoredTensor, up: StoredTensor, scale: float
    ) -> None:
        """Read the two tensors of a module."""
        wide_down, wide_up = self._read(down), self._read(up)
        self._digest.update(repr((module, down.shape, up.shape, scale)).encode())
        for tensor in (wide_down, wide_up):
            self._digest.update(tensor.numpy().data)
        placement = target.placement
        if placement.shard == 0:
            wide_up = self._own(wide_up, 0)
        elif placement.shard == 1:
            wide_down = self._own(wide_down, 1)
        if placement.transform is not None:
            # It permutes the weight's rows, and the update's rows with them.
            wide_up = placement.transform(wide_up)
        own = (wide_down.to(self._dtype), (wide_up * scale).to(self._dtype).T)
        for name, part in zip(("lora_A", "lora_B"), own, strict=True):
            if not part.isfinite().all():
                kind = str(self._dtype).removeprefix("torch.")
                raise ModelLoadError(
                    f"{down.file}: {name} of {module} has values that {kind} does not hold, or "
                    "that are not finite"
                )
        self._found.setdefault(target.parameter, {})[target.part] = own

    def made(self, *, pinned: bool) -> AdapterWeights:
        """All of it."""
        updates = {
            name: self._update(self._targets.parts[name], parts, pinned=pinned)
            for name, parts in self._found.items()
        }
        largest = max(max(update.ranks) for update in updates.values())
        return AdapterWeights(updates, self._digest.digest(), largest)

    def _update(
        self,
        targets: tuple[Target, ...],
        parts: dict[int, tuple[Tensor, Tensor]],
        *,
        pinned: bool,
    ) -> Update:
        ranks = tuple(len(parts[i][0]) if i in parts else 0 for i in range(len(targets)))
        room, rows = max(ranks), max(target.end for target in targets)
        make: Callable[..., Any] = torch.zeros
        down = make(len(targets), room, targets[0].inputs, dtype=self._dtype, pin_memory=pinned)
        up = make(room, rows, dtype=self._dtype, pin_memory=pinned)
        for part, (own_down, own_up) in parts.items():
            target = targets[part]
            down[part, : ranks[part]] = own_down
            up[: ranks[part], target.begin : target.end] = own_up
        return Update(ranks, down, up)

    def _read(self, stored: StoredTensor) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=torch.float32)
        self._reader.read(stored, tensor)
        return tensor

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part."""
        size = tensor.shape[dim] // self._world_size
        return tensor.narrow(dim, self._rank * size, size)
