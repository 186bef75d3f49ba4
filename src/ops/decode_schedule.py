"""Which keys the programs of a persistent decode kernel read, laid out on the device each step.

A decoding row has one query token, whose attention only reads: keys and values are cut into
*tiles*, and every program of a grid of fixed size takes the same number of them, wherever rows
begin and end (J. Hong et al., "Lean Attention", 2024; "stream-K" of M. Osama et al., PPoPP 2023,
for matrix products). So any mix of lengths keeps every multiprocessor busy, and one captured graph
replays it.

Rows whose block tables begin with the same blocks form a *pack*: what they share is read once for
all of them, as further rows of the same small matrix product, and every row's own tiles are merged
with it by their log-sum-exps (J. Juravsky et al., "Hydragen", 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from src.ops.attention_cases import build as build_attention
from src.ops.attention_spec import AttentionSpec
from src.ops.declaration import Cost, Op
from src.ops.triton.tuning import capability_of, decode_shape, packed_rows

LEAST_SHARED = 4
"""Tiles that a pack shares at least: merging its rows costs what reading part of a tile does."""


def key_column(tile: int, block_size: int) -> int:
    """The block table column that rows of a pack have in common: the last of `LEAST_SHARED` tiles.

    Blocks hold one sequence's tokens, so rows with the same block there share those before it too.
    """
    return -(-LEAST_SHARED * tile // block_size) - 1


def reference(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sliding_window: int,
    tile: int,
    members: int,
) -> Tensor:
    """See [`decode_schedule`][src.ops.decode_schedule.decode_schedule]."""
    rows = len(seq_lens)
    lengths = seq_lens.tolist()
    decodes = [n == 1 for n in query_start_loc.diff().tolist()]
    packs = [] if sliding_window else _packs(block_tables, lengths, decodes, block_size, tile)
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
        in_window = max(0, lengths[row] - sliding_window) // tile if sliding_window else 0
        total = -(-lengths[row] // tile) if decodes[row] else 0
        starts.append(starts[-1] + shared[row])
        starts.append(starts[-1] + max(0, total - max(of_pack, in_window)))
    flat = [*starts, *place, *shared, *(member for pack in table for member in pack)]
    return torch.tensor(flat, dtype=torch.int32, device=seq_lens.device)


def _packs(
    block_tables: Tensor,
    lengths: Sequence[int],
    decodes: Sequence[bool],
    block_size: int,
    tile: int,
) -> list[list[int]]:
    """Rows by the block that they have in the key column."""
    column = key_column(tile, block_size)
    by_block: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        if decodes[row] and length >= (column + 1) * block_size:
            by_block[int(block_tables[row, column])].append(row)
    return list(by_block.values())


def _common_blocks(
    block_tables: Tensor, pack: Sequence[int], lengths: Sequence[int], block_size: int
) -> int:
    """Full blocks that every row of a pack begins with."""
    common = min(lengths[row] for row in pack) // block_size
    differs = (block_tables[pack, :common] != block_tables[pack[0], :common]).any(0).nonzero()
    return int(differs[0]) if len(differs) else common


def _fake(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sliding_window: int,
    tile: int,
    members: int,
) -> Tensor:
    return seq_lens.new_empty((schedule_size(block_tables.shape[0], members),))


def schedule_size(rows: int, members: int) -> int:
    """Integers of a schedule."""
    return 1 + (4 + members) * rows


def _build(device: str, *, tile: int, members: int, **case: Any) -> tuple[Any, ...]:
    """Block tables of paged attention's cases."""
    arguments = build_attention(device, **case)
    tables, starts, lengths = arguments[5:8]
    window = AttentionSpec.of(*arguments[10:12]).window or 0
    return (tables, starts, lengths, arguments[3].shape[1], window, tile, members)


def _cost(block_tables: Tensor, *_: Any) -> Cost:
    # What is compared of the tables depends on them; at least the key column is read.
    return Cost(bytes=block_tables.shape[0] * 4 * 12, flops=0)


PREFIXES = {
    "rows": ((1, 1100), (1, 40), (1, 900), (1, 1300), (40, 1000), (1, 700), (1, 1025), (1, 1200)),
    "prefixes": {2: (0, 32), 3: (2, 48), 4: (0, 48), 5: (1, 2), 6: (0, 64), 7: (3, 40)},
    "head_dim": 8,
}
"""Prefixes of prefixes, rows that share with nobody, and one that is not a decoding row."""

_CASES: list[dict[str, Any]] = [
    {"tile": tile, "members": members, **PREFIXES, "sliding_window": window}
    for tile in (16, 64)
    for members in (1, 2, 4, 16)
    for window in (0, 100)
] + [
    {"tile": 64, "members": 4, "rows": (), "head_dim": 8},
    {"tile": 64, "members": 4, "rows": ((0, 0), (0, 3)), "padding": 2, "head_dim": 8},
    {"tile": 32, "members": 3, "rows": ((1, 1), (7, 7), (1, 600), (0, 0)), "head_dim": 8},
    # Blocks larger than a tile, and as many rows in one pack as there are.
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
    "(Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, int block_size, "
    "int sliding_window, int tile, int members) -> Tensor",
    reference=reference,
    fake=_fake,
    build=_build,
    cases=_CASES,
    cost=_cost,
    lazy={"cuda": "src.ops.triton.decode_schedule:run"},
)


def decode_schedule(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sliding_window: int,
    tile: int,
    members: int,
) -> Tensor:
    """Lay out the tiles of B rows, of which those with one query token are scheduled.

    Every row has two *segments* of tiles: number 2 b is what the pack shares whose first row is b,
    number 2 b + 1 is row b's own, behind what its pack shares and from its window on. Rows with the
    same block in the key column are packed in their order, `members` at a time.

    Parameters
        block_tables: [B, max_blocks] int32.
        query_start_loc: [B + 1] int32.
        seq_lens: [B] int32.
        block_size: Tokens of a block.
        sliding_window: Keys that a token sees, itself included; 0 for all. With a window nothing
            is shared.
        tile: Keys of a tile, from the first key on.
        members: Rows of a pack at most.

    Returns
        int32 [1 + (4 + members) B], one behind the other:

        - starts [2 B + 1]: tiles before each segment, and of all of them,
        - place [B]: `members` * (first row of its pack) + (which row of the pack it is), or -1,
        - shared [B]: tiles that the pack shares whose first row it is, else 0,
        - rows [B, members]: the pack whose first row it is; -1 for none.
    """
    result: Tensor = DECODE_SCHEDULE.overload(
        block_tables, query_start_loc, seq_lens, block_size, sliding_window, tile, members
    )
    return result


def step_schedule(
    key_cache: Tensor,
    num_heads: int,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sliding_window: int,
) -> Tensor | None:
    """What all layers with this window hand to `paged_attention` in one step; `None` on the CPU.

    Parameters
        key_cache: Of any of these layers, [num_blocks, block_size, num_kv_heads, head_dim].
        num_heads: Query heads.
        block_tables, query_start_loc, seq_lens, sliding_window: As of `paged_attention`.
    """
    if key_cache.device.type != "cuda":
        return None
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    group = num_heads // kv_heads
    capability = capability_of(key_cache.device)
    tile = decode_shape(capability, head_dim, key_cache.element_size()).tile
    return decode_schedule(
        block_tables, query_start_loc, seq_lens, block_size, sliding_window, tile,
        packed_rows(group) // group,
    )  # fmt: skip
