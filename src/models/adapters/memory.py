"""The memory of adapters that are in use: slots of one size, allocated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from src.core.config import LoraSection
from src.models.adapters.adapted import DOWN, RANKS, STARTS, UP
from src.models.adapters.reader import AdapterWeights
from src.models.adapters.targets import Targets
from src.models.checkpoint import StoredTensor
from src.models.weights.parameters import Parameter, allocate


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """How many adapters are in use at once, and the largest rank of one."""

    slots: int
    rank: int

    @classmethod
    def of(cls, section: LoraSection) -> AdapterRoom | None:
        """The room that is configured; None: no adapters are served."""
        return cls(section.num_slots, section.max_rank) if section.num_slots else None


class AdapterMemory:
    """Slots for the updates of every parameter that may have one; see `ops.lora`.

    Attributes
    ----------
    targets
        Where adapters go.
    tensors
        By name: a parameter's name and an ending of `adapted`. Their addresses never change.
    base
        The embedding and the head in the model's checkpoint, by name; see `reader.read_adapter`.
    """

    def __init__(
        self,
        room: AdapterRoom,
        table: Mapping[str, Parameter],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.room = room
        self.targets = Targets(table)
        self.base: Mapping[str, StoredTensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, targets in self.targets.parts.items():
            (rows, inputs), parts = table[name].shape, len(targets)
            starts = [*(target.begin for target in targets), rows]
            self.tensors |= {
                name + DOWN: allocate((room.slots, parts * room.rank, inputs), dtype, device),
                name + UP: allocate((room.slots, room.rank, rows), dtype, device),
                name + RANKS: torch.zeros((room.slots, parts), dtype=torch.int32, device=device),
                name + STARTS: torch.tensor(starts, dtype=torch.int32).to(device),
            }
        # The adapter in each slot, by its key; None if there is none.
        self._held: list[int | None] = [None] * room.slots

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def bring(self, slot: int, key: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, unless it is there already. No step may use the slot."""
        if self._held[slot] == key:
            return
        # Not before all of it is there.
        self._held[slot] = None
        for name, targets in self.targets.parts.items():
            update = weights.updates.get(name)
            ranks = [0] * len(targets) if update is None else list(update.ranks)
            if update is not None:
                down, up = self.tensors[name + DOWN][slot], self.tensors[name + UP][slot]
                rank = update.down.shape[1]
                by_part = down.unflatten(0, (len(targets), self.room.rank))
                _send(update.down, by_part[:, :rank])
                _send(update.up, up[:rank])
            _send(torch.tensor(ranks, dtype=torch.int32), self.tensors[name + RANKS][slot])
        self._held[slot] = key


def _send(values: Tensor, place: Tensor) -> None:
    """Copy ``values`` of the host over ``place`` without waiting for steps that are launched.

    CUDA waits for a copy from memory that is not pinned, and for one that changes the dtype.
    """
    if place.device.type != "cpu":
        values = values.to(place.dtype).contiguous().pin_memory()
    place.copy_(values, non_blocking=True)
