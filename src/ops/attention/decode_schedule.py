"""The work schedule of a persistent decode kernel, computed on the device in each step.

A decoding row has one query token, so its attention is bound by reading keys and values. These are
cut into *tiles*. A grid of fixed size runs, and every program takes the same number of tiles, no
matter where rows begin and end (J. Hong et al., "Lean Attention", 2024; "stream-K" of M. Osama et
al., PPoPP 2023, for matrix products). So every multiprocessor is busy for any mix of lengths, and
one captured graph serves them all.

Rows whose block tables begin with the same blocks form a *pack*. The shared prefix is read once for
the whole pack: its rows are stacked in one small matrix product. The result is merged with that of
each row's own tiles by log-sum-exp (J. Juravsky et al., "Hydragen", 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from src.ops.attention.cached_rows import row_size
from src.ops.attention.cases import build as build_attention
from src.ops.attention.spec import AttentionSpec
from src.ops.declaration import Cost, Op
from src.ops.records import Record, number, result, tensor
from src.ops.tuning import capability_of, computed_size, decode_shape, packed_rows

LEAST_SHARED = 4
"""Minimal number of tiles that a pack shares: a merge costs as much as reading part of a tile."""


def key_column(tile: int, block_size: int) -> int:
    """The block table column that rows of a pack have in common: where tile `LEAST_SHARED` ends.

    A block belongs to one prefix: rows with the same block in this column share all blocks before.
    """
    return -(-LEAST_SHARED * tile // block_size) - 1


class DecodeSchedule(Record, result=result("schedule", "_", like="seq_lens")):
    """Lay out the tiles of B rows; only rows with one query token are scheduled.

    Every row b has two *segments* of tiles. Segment 2 b holds the tiles that a pack shares, if b is
    the pack's first row. Segment 2 b + 1 holds row b's own tiles: those behind the shared ones, and
    inside the window or the chunk. Rows with the same block in the key column are packed in row
    order, `members` at a time.

    Attributes
    ----------
    block_tables
        [B, max_blocks] int32.
    query_start_loc
        [B + 1] int32.
    seq_lens
        [B] int32.
    block_size
        Tokens per block.
    sliding_window
        Number of keys that a token sees, itself included; 0 for all. With a window or chunks,
        nothing is shared.
    chunk
        Size of the chunks within which tokens see keys; 0 for no chunks.
    tile
        Keys per tile; tiles are counted from the first key on.
    members
        Maximal number of rows in a pack.

    Returns
    -------
    int32 [1 + (4 + members) B], a concatenation of:

    - starts [2 B + 1]: number of tiles before each segment; the last entry is the total,
    - place [B]: `members` * (first row of its pack) + (index in the pack), or -1,
    - shared [B]: number of shared tiles if this is the first row of a pack, else 0,
    - rows [B, members]: the rows of the pack if this is its first row; -1 for none.
    """

    block_tables: Tensor = tensor("rows max_blocks", torch.int32, rows=True)
    query_start_loc: Tensor = tensor("rows+1", torch.int32)
    seq_lens: Tensor = tensor("rows", torch.int32)
    block_size: int = number()
    sliding_window: int = number()
    chunk: int = number()
    tile: int = number()
    members: int = number()


def reference(call: DecodeSchedule) -> Tensor:
    """See `DecodeSchedule`."""
    block_tables, query_start_loc, seq_lens, *numbers = call
    block_size, sliding_window, chunk, tile, members = numbers
    rows = len(seq_lens)
    lengths = seq_lens.tolist()
    decodes = [n == 1 for n in query_start_loc.diff().tolist()]
    spec = AttentionSpec(1.0, window=sliding_window or None, chunk=chunk or None)
    shares = not spec.features
    packs = _packs(block_tables, lengths, decodes, block_size, tile) if shares else []
    place, shared = [-1] * rows, [0] * rows
    table = [[-1] * members for _ in range(rows)]
    for rows_of_key in packs:
        for first in range(0, len(rows_of_key), members):
            pack = rows_of_key[first : first + members]
            for slot, row in enumerate(pack):
                place[row] = pack[0] * members + slot
                table[pack[0]][slot] = row
            tiles = _common_blocks(block_tables, pack, lengths, block_size) * block_size // tile
            shared[pack[0]] = tiles if len(pack) > 1 and tiles >= LEAST_SHARED else 0
    starts = [0]
    for row in range(rows):
        of_pack = shared[place[row] // members] if place[row] >= 0 else 0
        passed = spec.first_visible(lengths[row] - 1) // tile
        total = -(-lengths[row] // tile) if decodes[row] else 0
        starts.append(starts[-1] + shared[row])
        starts.append(starts[-1] + max(0, total - max(of_pack, passed)))
    flat = [*starts, *place, *shared, *(member for pack in table for member in pack)]
    return torch.tensor(flat, dtype=torch.int32, device=seq_lens.device)


def _packs(
    block_tables: Tensor,
    lengths: Sequence[int],
    decodes: Sequence[bool],
    block_size: int,
    tile: int,
) -> list[list[int]]:
    """Group decoding rows by their block in the key column."""
    column = key_column(tile, block_size)
    by_block: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        if decodes[row] and length >= (column + 1) * block_size:
            by_block[int(block_tables[row, column])].append(row)
    return list(by_block.values())


def _common_blocks(
    block_tables: Tensor, pack: Sequence[int], lengths: Sequence[int], block_size: int
) -> int:
    """Number of full blocks at the beginning that all rows of a pack share."""
    common = min(lengths[row] for row in pack) // block_size
    differs = (block_tables[pack, :common] != block_tables[pack[0], :common]).any(0).nonzero()
    return int(differs[0]) if len(differs) else common


def _fake(call: DecodeSchedule) -> Tensor:
    return call.seq_lens.new_empty((schedule_size(call.block_tables.shape[0], call.members),))


def schedule_size(rows: int, members: int) -> int:
    """Number of integers in a schedule."""
    return 1 + (4 + members) * rows


def _build(device: str, *, tile: int, members: int, **case: Any) -> DecodeSchedule:
    """Block tables of the cases of paged attention."""
    call = build_attention(device, **case)
    return DecodeSchedule(
        block_tables=call.block_tables,
        query_start_loc=call.query_start_loc,
        seq_lens=call.seq_lens,
        block_size=call.key_cache.shape[1],
        sliding_window=call.spec.window or 0,
        chunk=call.spec.chunk or 0,
        tile=tile,
        members=members,
    )


def _cost(call: DecodeSchedule) -> Cost:
    # How much of the tables is compared depends on their contents; count the key column only.
    return Cost(bytes=call.block_tables.shape[0] * 4 * 12, flops=0)


PREFIXES = {
    "rows": ((1, 1100), (1, 40), (1, 900), (1, 1300), (40, 1000), (1, 700), (1, 1025), (1, 1200)),
    "prefixes": {2: (0, 32), 3: (2, 48), 4: (0, 48), 5: (1, 2), 6: (0, 64), 7: (3, 40)},
    "head_dim": 8,
}
"""Prefixes of prefixes, rows that share with no other row, and a row that is not decoding."""

_CASES: list[dict[str, Any]] = [
    {"tile": tile, "members": members, **PREFIXES, **reach}
    for tile in (16, 64)
    for members in (1, 2, 4, 16)
    for reach in ({}, {"sliding_window": 100}, {"chunk": 150})
] + [
    {"tile": 64, "members": 4, "rows": (), "head_dim": 8},
    {"tile": 64, "members": 4, "rows": ((0, 0), (0, 3)), "padding": 2, "head_dim": 8},
    {"tile": 32, "members": 3, "rows": ((1, 1), (7, 7), (1, 600), (0, 0)), "head_dim": 8},
    # Blocks larger than a tile, and a pack that contains all rows.
    {
        "tile": 16,
        "members": 8,
        "block_size": 64,
        "rows": [(1, 300 + row) for row in range(19)],
        "prefixes": {row: (0, 4 if row % 3 else 2) for row in range(1, 19)},
        "head_dim": 8,
    },
]

DECODE_SCHEDULE = Op(
    "decode_schedule",
    DecodeSchedule,
    reference=reference,
    fake=_fake,
    build=_build,
    cases=_CASES,
    cost=_cost,
    lazy={"cuda": "src.ops.attention.decode_schedule_triton:run"},
)


decode_schedule = DECODE_SCHEDULE.function
"""The op as a function of the fields of `DecodeSchedule`.
"""


def step_schedule(
    key_cache: Tensor,
    num_heads: int,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    spec: AttentionSpec,
) -> Tensor | None:
    """The schedule of a step for layers that see as far as this; None on the CPU.

    Parameters
    ----------
    key_cache
        That of any of these layers, as in `paged_attention`.
    num_heads
        Number of query heads.
    block_tables, query_start_loc, seq_lens, spec
        As in `paged_attention`.
    """
    if key_cache.device.type != "cuda":
        return None
    block_size, kv_heads, row = key_cache.shape[1:]
    group, head_dim = num_heads // kv_heads, row - row_size(0, key_cache.dtype)
    capability = capability_of(key_cache.device)
    tile = decode_shape(capability, head_dim, computed_size(key_cache)).tile
    return decode_schedule(
        block_tables, query_start_loc, seq_lens, block_size, spec.window or 0, spec.chunk or 0,
        tile, packed_rows(group) // group,
    )  # fmt: skip
