"""Memory of recurrent states: what layers keep of a sequence as a whole.

A *slot* is all that a sequence keeps, in all layers, side by side. Slots ``0 .. num_rows - 1`` are
the running states of the rows; behind them are the snapshot slots of the prefix cache, and then
those that keep states while drafts are verified. So the copy of a sequence's states is one copy of
neighbouring bytes, and each layer sees a strided view.

States have slots of their own and not blocks of the KV pool, because they are of another size: a
block would have to be as large as the states of a sequence, that is thousands of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from src.core.config import MIB
from src.core.errors import ConfigError
from src.core.plan import StepPlan
from src.engine.devices.transfer import upload
from src.models.layer_kv import LayerKVSpec
from src.ops.host_memory import lazy_zeros

logger = logging.getLogger(__name__)

# Tensors of a slot begin at multiples of these bytes.
_ALIGNMENT = 64
# The most snapshots for each row; further ones would hardly ever be found again.
_SNAPSHOTS_PER_ROW = 4
# Of so many snapshots one makes room for a row with drafts that nobody has asked for by name.
_SNAPSHOTS_PER_SPARE = 4


@dataclass(frozen=True)
class StatePlan:
    """Number and size of the slots.

    Attributes
    ----------
    bytes_per_slot
        Bytes that a sequence keeps in all layers.
    num_rows, num_snapshots, num_backups
        Slots of running rows, slots of the prefix cache, and slots of rows that verify drafts: the
        most such rows of a step.
    """

    bytes_per_slot: int
    num_rows: int
    num_snapshots: int
    num_backups: int = 0

    @property
    def num_slots(self) -> int:
        """All of them."""
        return self.num_rows + self.num_snapshots + self.num_backups

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.bytes_per_slot * self.num_slots

    def __str__(self) -> str:
        backups = f" and {self.num_backups} rows with drafts" if self.num_backups else ""
        return (
            f"recurrent states of {self.num_rows} rows and {self.num_snapshots} snapshots"
            f"{backups}, {self.bytes_per_slot / MIB:.2f} MiB each"
        )


def plan_states(
    layers: Sequence[LayerKVSpec],
    budget: int,
    max_num_seqs: int,
    *,
    snapshots: bool,
    backups: int = 0,
    backups_are_spare: bool = False,
) -> StatePlan | None:
    """Divide up to half of ``budget`` bytes into slots; ``None`` if the model has no such states.

    Snapshots get what rows leave, and at least about a quarter. If ``max_num_seqs`` rows do not
    fit, there are fewer. Rows with drafts get up to ``backups`` slots, and at most an eighth, or
    one if there are two.

    Parameters
    ----------
    backups_are_spare
        Whether nobody has asked for rows with drafts by name. Then they get no row's slot, and at
        most a quarter of those of snapshots, which may be none.

    Raises
    ------
    ConfigError
        Not even one row fits.
    """
    size = _slot_bytes(layers)
    if not size:
        return None
    most = budget // 2 // size
    if most < 1:
        raise ConfigError(
            f"cache: half of {budget / MIB:.1f} MiB does not hold the recurrent states of one "
            f"sequence ({size / MIB:.1f} MiB): raise cache.memory_bytes"
        )
    if backups_are_spare:
        rows = min(max_num_seqs, max(1, most * 3 // 4) if snapshots else most)
        kept = min(most - rows, _SNAPSHOTS_PER_ROW * rows) if snapshots else 0
        unused = most - rows - kept
        backups = min(backups, max_num_seqs, most // 8, unused + kept // _SNAPSHOTS_PER_SPARE)
    else:
        backups = min(backups, max_num_seqs, max(most // 8, 1 if most > 1 else 0))
    # Where there are snapshots these make room for rows with drafts, and else rows do.
    rows = min(max_num_seqs, max(1, most * 3 // 4) if snapshots else most - backups)
    most -= backups
    if rows < max_num_seqs:
        logger.warning(
            "at most %d requests run at once instead of scheduler.max_num_seqs = %d, because their "
            "recurrent states do not fit: raise cache.memory_bytes",
            rows,
            max_num_seqs,
        )
    kept = min(most - rows, _SNAPSHOTS_PER_ROW * rows) if snapshots else 0
    return StatePlan(size, rows, kept, backups)


class StateMemory:
    """The slots' memory, and the copies between them that plans ask for.

    Attributes
    ----------
    layers
        Layer -> its tensors by name, [slots, *shape]; a slot's part is contiguous.
    num_backups
        The most rows of a step whose states can be kept (`back_up`).
    """

    def __init__(
        self,
        layers: Sequence[LayerKVSpec],
        plan: StatePlan,
        device: torch.device,
        *,
        poison: bool = False,
    ) -> None:
        shape = (plan.num_slots, plan.bytes_per_slot)
        # [slots, bytes of a slot] uint8
        if device.type == "cpu":
            self._memory = lazy_zeros(shape, torch.uint8)
        else:
            self._memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        if poison:
            # All bits set is NaN in every float type.
            self._memory.fill_(255)
        self._num_rows = plan.num_rows
        self.num_backups = plan.num_backups
        # Row -> the slot that keeps its states of before this step.
        self._backups: dict[int, int] = {}
        self.layers: dict[int, dict[str, Tensor]] = {}
        begin = 0
        for number, layer in enumerate(layers):
            if layer.per != "sequence":
                continue
            tensors = {}
            for tensor in layer.tensors:
                part = self._memory[:, begin : begin + tensor.nbytes].view(tensor.dtype)
                tensors[tensor.name] = part.unflatten(1, tensor.shape)
                begin += _aligned(tensor.nbytes)
            self.layers[number] = tensors

    def begin(self, plan: StepPlan) -> None:
        """Give the rows that the plan installs their first states: zeros, or a snapshot."""
        loaded = {load.row: self._num_rows + load.slot for load in plan.state_loads}
        fresh = [install.row for install in plan.installs if install.row not in loaded]
        self._zero(fresh)
        self._copy(list(loaded.values()), list(loaded))

    def end(self, plan: StepPlan) -> None:
        """Make the snapshots that the plan asks for; its step is computed, or queued."""
        saves = plan.state_saves
        self._copy([save.row for save in saves], [self._num_rows + save.slot for save in saves])

    def back_up(self, rows: Sequence[int]) -> None:
        """Keep the states of these rows as they are, ``num_backups`` at most, for `restore`."""
        assert len(rows) <= self.num_backups, "more rows than slots"
        first = len(self._memory) - self.num_backups
        self._backups = dict(zip(rows, range(first, first + len(rows)), strict=True))
        self._copy(list(self._backups), list(self._backups.values()))

    def restore(self, rows: Sequence[int]) -> None:
        """Give these rows the states again that they had at the last `back_up`, which has them."""
        self._copy([self._backups[row] for row in rows], list(rows))

    def _zero(self, slots: list[int]) -> None:
        if not slots:
            return
        if self._memory.device.type == "cpu":
            for slot in slots:
                self._memory[slot].zero_()
        else:
            self._memory.index_fill_(0, upload(slots, torch.int64, self._memory.device), 0)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        if self._memory.device.type == "cpu":
            # One by one, without a temporary.
            for source, target in zip(sources, targets, strict=True):
                self._memory[target].copy_(self._memory[source])
            return
        both = upload([*sources, *targets], torch.int64, self._memory.device)
        from_n, to_n = both.split(len(sources))
        self._memory.index_copy_(0, to_n, self._memory[from_n])


def _slot_bytes(layers: Sequence[LayerKVSpec]) -> int:
    return sum(
        _aligned(tensor.nbytes)
        for layer in layers
        if layer.per == "sequence"
        for tensor in layer.tensors
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
