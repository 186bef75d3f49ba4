"""Device-resident state of the rows: token buffer and block tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from src.core.adapter import NO_SLOT
from src.core.plan import BlockAppend, RowInstall, StepPlan
from src.engine.devices import transfer
from src.engine.devices.transfer import upload
from src.engine.execution.row_inputs import RowInputs
from src.models.program import StepInput

# No token and no block has this number, so using an entry that was never written fails loudly.
POISON = -1


class RowState:
    """Token buffer and block tables of every row, and of one more row for padding.

    A step's inputs are gathered from here and its sampled tokens are scattered back, so the next
    step can be launched before the host has seen a token. Writes of a plan are staged; `flush`
    brings all of them to the device in one upload.

    Parameters
    ----------
    page_blocks
        Per group of layers: block numbers in its tables are multiplied by this
        (`KVGroupSpec.page_blocks`).
    own_inputs
        The model's own step inputs.

    Attributes
    ----------
    padding_row
        Index of the row after the last. Its tokens are valid token ids, and it has no block, so no
        KV is ever written for it.
    max_model_len
        Tokens that a row has room for.
    tokens
        [max_num_seqs + 1, max_model_len] int32: (row, position) -> token id.
    block_tables
        [groups, max_num_seqs + 1, max_blocks] int32: (group of layers, row, position //
        block_size) -> block; negative where there is none, or where a window has passed it.
    own_inputs
        What requests bring of the model's own step inputs.
    adapter_slots
        [max_num_seqs + 1] int32: row -> the slot of its adapter; -1 for none.
    lengths
        [max_num_seqs + 1] int32: row -> its number of tokens, of rows whose last step verified
        drafts or began behind some. Of others the plan says it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        page_blocks: Sequence[int] = (1,),
        own_inputs: Sequence[StepInput] = (),
    ) -> None:
        self.device = device
        self.own_inputs = RowInputs(own_inputs, max_num_seqs)
        self.block_size = block_size
        self.padding_row = max_num_seqs
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        token_shape = (max_num_seqs + 1, max_model_len)
        table_shape = (len(page_blocks), max_num_seqs + 1, max_blocks)
        sizes = (math.prod(token_shape), math.prod(table_shape), max_num_seqs + 1)
        # Everything in one, so that one scatter writes it.
        self._memory = torch.full((sum(sizes),), POISON, dtype=torch.int32, device=device)
        tokens, tables, slots = self._memory.split(sizes)
        self.tokens: Tensor = tokens.view(token_shape)
        self.block_tables: Tensor = tables.view(table_shape)
        self.adapter_slots: Tensor = slots
        self.lengths = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        # Adapters on the host too, which so knows which steps need them.
        self._adapter_slots = [NO_SLOT] * (max_num_seqs + 1)
        self.tokens[self.padding_row].zero_()
        self._page_blocks = tuple(page_blocks)
        self._host = transfer.host_view(self._memory)
        # Used if the host cannot write the memory. Row -> staged writes (flat index, values), and
        # the rows that are reset to POISON before.
        self._staged: dict[int, list[tuple[int, list[int]]]] = {}
        self._replaced: set[int] = set()

    def install(self, install: RowInstall) -> None:
        """Give the row to a request: its known tokens and the blocks it has so far."""
        self._replace(install, install.token_ids)

    def install_harmless(self, install: RowInstall) -> None:
        """Give the row its blocks, and zeros as tokens: the request's own may have failed."""
        self._replace(install, [0] * min(len(install.token_ids), self.max_model_len))

    def _replace(self, install: RowInstall, token_ids: list[int]) -> None:
        row = install.row
        if self._host is not None:
            self._host[self._token_index(row) :][: self.max_model_len] = POISON
            for group in range(len(self._page_blocks)):
                self._host[self._table_index(group, row) :][: self._max_blocks] = POISON
        else:
            self._staged[row] = []
            self._replaced.add(row)
        self._write(row, self._token_index(row), token_ids, self.max_model_len)
        for group, block_ids in enumerate(install.block_ids):
            numbers = self._numbers(group, block_ids)
            self._write(row, self._table_index(group, row), numbers, self._max_blocks)
        self._adapter_slots[row] = install.adapter_slot
        index = self.tokens.numel() + self.block_tables.numel() + row
        self._write(row, index, [install.adapter_slot], 1)

    def uses_adapters(self, plan: StepPlan) -> bool:
        """Whether a row of the plan, which has been applied, has an adapter."""
        return any(self._adapter_slots[step.row] != NO_SLOT for step in plan.rows)

    def append_blocks(self, append: BlockAppend) -> None:
        """Append blocks to one of the row's block tables."""
        numbers = self._numbers(append.group, append.block_ids)
        begin = self._table_index(append.group, append.row) + append.index
        self._write(append.row, begin, numbers, self._max_blocks - append.index)

    def _write(self, row: int, begin: int, values: list[int], room: int) -> None:
        if len(values) > room:
            # The memory behind it belongs to another row.
            raise ValueError(f"row {row} has room for {room} more, got {len(values)}")
        if self._host is not None:
            self._host[begin : begin + len(values)] = values
        elif values:
            self._staged.setdefault(row, []).append((begin, values))

    def flush(self) -> None:
        """Bring all staged writes to the device in one upload."""
        if not self._staged:
            return
        writes = [write for of_row in self._staged.values() for write in of_row]
        rows = sorted(self._replaced)
        self._staged, self._replaced = {}, set()
        indices = [np.arange(begin, begin + len(values)) for begin, values in writes]
        numbers = [np.asarray(values, np.int64) for _, values in writes]
        count = sum(map(len, indices))
        packed = upload(
            np.concatenate((np.asarray(rows, np.int64), *indices, *numbers)),
            torch.int64,
            self.device,
        )
        rows_r, indices_n, values_n = packed.split((len(rows), count, count))
        if rows:
            self.tokens.index_fill_(0, rows_r, POISON)
            self.block_tables.index_fill_(1, rows_r, POISON)
        self._memory[indices_n] = values_n.to(torch.int32)

    @property
    def _max_blocks(self) -> int:
        return self.block_tables.shape[2]

    def _token_index(self, row: int) -> int:
        return row * self.max_model_len

    def _table_index(self, group: int, row: int) -> int:
        rows_before = group * (self.padding_row + 1) + row
        return self.tokens.numel() + rows_before * self._max_blocks

    def _numbers(self, group: int, block_ids: list[int]) -> list[int]:
        """Block ids of the pool as block numbers of a group's layers."""
        factor = self._page_blocks[group]
        return block_ids if factor == 1 else [factor * block for block in block_ids]

    def gather(self, rows_t: Tensor, positions_t: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [T] int64 and slots [groups, T] int64 of (row, position) pairs [T] int64.

        A slot is block * block_size + offset, and negative where the row has no block: nothing is
        written there.
        """
        input_ids_t = self.tokens[rows_t, positions_t].to(torch.int64)
        blocks_t = self.block_tables[:, rows_t, positions_t // self.block_size]
        # The result is int64, while block * block_size in int32 could overflow.
        slots_t = torch.add(positions_t % self.block_size, blocks_t, alpha=self.block_size)
        return input_ids_t, slots_t

    def adapters_of(self, rows_t: Tensor) -> Tensor:
        """The slots of rows' adapters, int64 [T]."""
        return self.adapter_slots[rows_t].to(torch.int64)

    def tables_of(self, rows_b: Tensor, num_blocks: int | None = None) -> tuple[Tensor, ...]:
        """Per group of layers: the first ``num_blocks`` entries of the rows' tables, [B, N]."""
        return self.block_tables[:, rows_b, :num_blocks].unbind()

    def neutralize(self, plan: StepPlan) -> None:
        """After a failed step: give its rows their own blocks, and valid tokens.

        The next step in flight still names these rows. Their results are dropped, but they must not
        fail that step for its other rows, nor write KV into blocks of a row's former owner.
        """
        for install in plan.installs:
            self.install_harmless(install)
        for append in plan.block_appends:
            self.append_blocks(append)
        self.flush()
        for step in plan.rows:
            self.tokens[step.row].clamp_(min=0)

    def scatter_tokens(self, rows_s: Tensor, positions_s: Tensor, token_ids_s: Tensor) -> None:
        """Write sampled tokens back into their rows: [S] int64 each.

        A negative id means that no token could be sampled. Then 0 is written, because the next step
        in flight still names the row, and must not fail for its other rows.
        """
        self.tokens[rows_s, positions_s] = token_ids_s.clamp(min=0).to(torch.int32)
