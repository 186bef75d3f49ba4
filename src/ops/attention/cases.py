"""Inputs and cost of paged attention, for its tests and its benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from src.ops.attention.cached_rows import CODES, is_coded, to_rows
from src.ops.attention.call import PagedAttention
from src.ops.attention.spec import ALL_AHEAD, AttentionSpec
from src.ops.declaration import Case, Cost

MIXED_ROWS = ((1, 1), (0, 5), (7, 7), (1, 40), (5, 33), (1, 130))
"""(query_len, seq_len): a first token, an idle row, a prefill, decodes, a later prefill chunk."""


def build(
    device: str,
    *,
    rows: Sequence[tuple[int, int]] = MIXED_ROWS,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sliding_window: int = 0,
    chunk: int = 0,
    ahead: int = 0,
    cap: float = 0.0,
    has_sinks: bool = False,
    padding: int = 0,
    longest: int = 0,
    seed: int = 0,
    deterministic: bool = False,
    prefixes: Mapping[int, tuple[int, int]] | None = None,
    cached: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> PagedAttention:
    """A call for rows given as (query_len, seq_len).

    `max_seq_len` is `longest` if that exceeds the rows' own lengths; it is only an upper bound.
    `prefixes` maps row -> (an earlier row, number of its blocks that this row begins with); neither
    row's queries lie in the shared blocks. With `cached`, the step's own keys and values are in the
    cache already, and `key` and `value` are None. A `cap`, `sliding_window`, `chunk` or `ahead` of
    0 means none, a `cache_dtype` of None is `dtype`.

    Blocks are handed out in random order, query/key/value are slices of one fused tensor, and the
    cache holds random history. Everything that must not be read is poisoned. NaN: unused cache
    slots, history that no query sees any more, keys of padding. A huge number: unused block table
    entries. A negative number: block table entries of that history.
    """
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(query_len for query_len, _ in rows)
    prefixes = prefixes or {}
    # About as large as the largest scores, so that they change the result.
    sinks = torch.randn(num_heads, generator=random).mul(2).to(device) if has_sinks else None
    reach = {"window": sliding_window or None, "chunk": chunk or None, "ahead": ahead or None}
    spec = AttentionSpec(head_dim**-0.5, cap or None, sinks=sinks, **reach)
    needed = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(needed) - sum(blocks for _, blocks in prefixes.values()) + 3
    free = torch.randperm(num_blocks, generator=random).tolist()

    block_tables = torch.full((len(rows), max(needed, default=0) + 2), 2**30, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key_cache, value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    slots: list[int] = []
    for row, (query_len, seq_len) in enumerate(rows):
        other, num_shared = prefixes.get(row, (row, 0))
        table = block_tables[other, :num_shared].tolist()
        table += [free.pop() for _ in range(needed[row] - num_shared)]
        block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slot_of = [
            table[position // block_size] * block_size + position % block_size
            for position in range(seq_len)
        ]
        known = seq_len if cached else seq_len - query_len
        history = torch.tensor(slot_of[:known], dtype=torch.int64)
        for cache in (key_cache, value_cache):
            flat = cache.view(-1, num_kv_heads, head_dim)
            flat[history] = torch.randn(len(history), *shape[2:], generator=random)
        slots += slot_of[seq_len - query_len :]
        if not prefixes:
            # Whole blocks that even the row's first query does not see.
            passed = spec.first_visible(seq_len - query_len) // block_size
            block_tables[row, :passed] = -1
            key_cache[table[:passed]] = value_cache[table[:passed]] = torch.nan
    fused = torch.randn(
        num_tokens + padding, num_heads + 2 * num_kv_heads, head_dim, generator=random
    )
    fused[num_tokens:] = torch.nan
    query, key, value = _slices(fused.to(device, dtype), num_heads, num_kv_heads)
    lengths = torch.tensor([0] + [query_len for query_len, _ in rows])
    kept = [_kept_as(cache_dtype or dtype, each).to(device) for each in (key_cache, value_cache)]
    return PagedAttention(
        query=query,
        key=None if cached else key,
        value=None if cached else value,
        key_cache=kept[0],
        value_cache=kept[1],
        block_tables=block_tables.to(device),
        query_start_loc=lengths.cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
        out=torch.full((len(query), num_heads, head_dim), torch.nan, dtype=dtype, device=device),
        spec=spec,
        max_query_len=max((query_len for query_len, _ in rows), default=0),
        max_seq_len=max((longest, *(seq_len for _, seq_len in rows))),
        deterministic=deterministic,
    )


def _slices(fused: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
    """Query, key and value, as they lie in what one projection gives."""
    heads, head_dim = (num_heads, num_kv_heads, num_kv_heads), fused.shape[2]
    by_head = fused.flatten(1).unflatten(1, (-1, head_dim))
    slices: tuple[Tensor, ...] = by_head.split(heads, dim=1)
    return slices


def _kept_as(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    """A cache of this dtype from float32; where there is NaN, so does each bit of a code say."""
    rows = to_rows(numbers, dtype)
    if is_coded(dtype):
        rows.view(torch.uint8)[numbers.isnan().all(-1)] = 255
    return rows


def _grid() -> list[Case]:
    """Parameters that select other code paths: dtype, head size, GQA ratio, window, block size."""
    cases: list[Case] = [
        {"dtype": dtype, "head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_dim in (8, 64, 72, 128, 256)
        for heads, kv_heads in ((2, 2), (6, 2), (8, 1))
    ]
    cases += [
        {"block_size": block_size, "sliding_window": window, "padding": padding}
        for block_size in (1, 5, 16, 64)
        for window in (0, 1, 7, 64)
        for padding in (0, 3)
    ]
    cases += [
        {"rows": ((200, 200),), "num_heads": 9, "num_kv_heads": 3},
        {"rows": ((150, 700), (1, 1500)), "head_dim": 40, "num_heads": 6, "num_kv_heads": 3},
        {"rows": ((64, 1400), (1, 1300)), "sliding_window": 300},
        {"rows": ((130, 600),), "num_heads": 71, "num_kv_heads": 1, "head_dim": 16},
        {"rows": ((0, 3), (0, 0)), "padding": 2},
        # A captured decode step: padding rows and tokens at the end, and the largest bound.
        {"rows": ((1, 1), (1, 600), (0, 0), (0, 0)), "padding": 2, "longest": 4096},
        {"rows": ((1, 700), (0, 0)), "padding": 1, "longest": 4096, "sliding_window": 100},
        {"rows": ((0, 0), (0, 0)), "padding": 2, "longest": 4096},
        # A captured mixed step: padding tokens, no padding rows.
        {"rows": ((5, 33), (1, 130)), "padding": 10, "longest": 4096},
        # The shortest rows that are not decodes, beside a decode.
        {"rows": ((2, 2), (1, 40), (2, 35)), "padding": 1},
        {"rows": ()},
        # Prefixes of prefixes, rows that share with no other row, and a row that is not decoding.
        {
            "rows": ((1, 1100), (1, 40), (1, 900), (1, 1300), (40, 1000), (1, 700), (1, 1025)),
            "prefixes": {2: (0, 32), 3: (2, 48), 4: (0, 48), 5: (1, 2), 6: (0, 64)},
            "padding": 1,
        },
    ]
    # Modifiers of scores, in each dtype: short chunks, a prompt in several steps, decodes with
    # several KV splits, rows after 256 and 2,048 keys, rows with a common prefix.
    modified: list[Case] = [
        {"cap": 2.0},
        {"has_sinks": True},
        {"cap": 30.0, "has_sinks": True, "sliding_window": 70},
        {"chunk": 128},
    ]
    cases += [
        {**modifier, **shape, "dtype": dtype}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for modifier in modified
        for shape in (
            {"rows": ((5, 33), (40, 300), (1, 1), (0, 3), (1, 520)), "padding": 1},
            {"rows": ((1, 2100), (2, 2060)), "head_dim": 256, "num_heads": 8, "num_kv_heads": 1},
            {"rows": ((150, 290), (1, 300)), "head_dim": 256, "num_heads": 6, "num_kv_heads": 2},
            {
                "rows": ((1, 1100), (1, 1040), (7, 900), (1, 300)),
                "prefixes": {1: (0, 64), 3: (0, 16)},
                "head_dim": 72,
                "num_heads": 6,
            },
            {
                "rows": ((1, 1100), (3, 40), (100, 700), (290, 290)),
                "head_dim": 40,
                "deterministic": True,
            },
        )
    ]
    cases += [
        {
            "rows": ((1, 1100), (3, 40), (100, 700), (0, 3), (290, 290)),
            "head_dim": head_dim,
            **reach,
            "dtype": dtype,
            "padding": 1,
            "deterministic": True,
        }
        for head_dim in (40, 64)
        for reach in ({}, {"sliding_window": 300}, {"chunk": 150})
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    cases += _ahead()
    return cases + [{**case, "cache_dtype": kept} for kept in CODES for case in _coded()]


def _ahead() -> list[Case]:
    """Tokens that see later ones: all of them, or those of a window of two sides.

    Whole sequences of a token, of a few, and of more than a tile; the last tokens of others; rows
    that begin and end within a tile of keys.
    """
    whole: Case = {"rows": ((1, 1), (7, 7), (64, 64), (0, 0), (290, 290), (3, 3)), "padding": 2}
    shapes: list[Case] = [
        {"head_dim": 32, **whole},
        {"head_dim": 64, "num_heads": 3, "num_kv_heads": 3, **whole},
        {"head_dim": 72, "num_heads": 6, "block_size": 5, **whole},
        {"rows": ((5, 33), (40, 300), (1, 1), (0, 3), (1, 520)), "padding": 1},
        {"rows": ((150, 290), (2, 2060)), "head_dim": 256, "num_heads": 8, "num_kv_heads": 1},
        {"rows": ((1, 1100), (3, 40), (290, 290)), "head_dim": 40, "deterministic": True},
    ]
    reaches: list[Case] = [
        {"ahead": ALL_AHEAD},
        {"ahead": 1},
        {"ahead": 64, "sliding_window": 65},
        {"ahead": 300, "sliding_window": 7, "cap": 2.0, "has_sinks": True},
    ]
    return [
        {**shape, **reach, "dtype": dtype}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for shape in shapes
        for reach in reaches
    ]


def _coded() -> list[Case]:
    """Cases for caches in 8 bits: every way of reading rows, in each dtype."""
    shapes: list[Case] = [
        {"padding": 1},
        {"head_dim": 72, "block_size": 5, "sliding_window": 7},
        {"head_dim": 256, "num_heads": 8, "num_kv_heads": 1, "rows": ((1, 600), (2, 300))},
        {"head_dim": 128, "num_heads": 6, "rows": ((150, 290), (1, 700), (1, 20)), "cap": 30.0},
        {"has_sinks": True, "chunk": 128, "rows": ((5, 33), (40, 300), (1, 520))},
        {"ahead": 100, "sliding_window": 60, "rows": ((5, 33), (140, 300), (1, 520))},
        {
            "rows": ((1, 1100), (1, 1040), (7, 900), (1, 300)),
            "prefixes": {1: (0, 64), 3: (0, 16)},
            "num_heads": 6,
        },
        {"rows": ((1, 1100), (3, 40), (100, 700)), "head_dim": 40, "deterministic": True},
        {"rows": ((1, 1100), (3, 40), (100, 700)), "num_heads": 8, "deterministic": True},
    ]
    return [
        {**shape, "dtype": dtype}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for shape in shapes
    ]


CASES = _grid()

CACHED_CASES: list[Case] = [
    {"cached": True, "padding": 3},
    {"cached": True, "rows": ((5, 33), (1, 130), (1, 600)), "head_dim": 24, "block_size": 5},
    {"cached": True, "rows": ((90, 130), (1, 700)), "head_dim": 16, "sliding_window": 60},
    {"cached": True, "rows": ((90, 130), (1, 700)), "head_dim": 16, "chunk": 60},
    {"cached": True, "rows": ((90, 130), (1, 700)), "head_dim": 16, "ahead": 30},
    {"cached": True, "rows": ((1, 1), (0, 0)), "head_dim": 16, "padding": 1, "longest": 4096},
    {"cached": True, "rows": ((0, 0), (0, 0)), "head_dim": 16, "padding": 2, "longest": 4096},
]
"""Cases without `key` and `value`, which the compiled CPU kernel does not support."""


def cost(call: PagedAttention) -> Cost:
    """Each visible key and value read once, each (query, key) pair two multiply-adds."""
    query, key_cache, spec = call.query, call.key_cache, call.spec
    num_heads, head_dim = query.shape[1:]
    starts, lengths = call.query_start_loc.tolist(), call.seq_lens.tolist()
    pairs = keys = 0
    read: set[int] = set()
    for row, seq_len in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        first = seq_len - query_len
        pairs += sum(
            spec.visible_end(p, seq_len) - spec.first_visible(p) for p in range(first, seq_len)
        )
        if query_len:
            keys += seq_len - spec.first_visible(first)
            if spec.window is None and spec.chunk is None:
                blocks = call.block_tables[row, : -(-seq_len // key_cache.shape[1])].tolist()
                keys -= key_cache.shape[1] * len(read.intersection(blocks))
                read.update(blocks)
    new = 0 if call.key is None else call.key.shape[0]  # read, and written into the cache
    elements = query.numel() + call.out.numel() + 2 * new * key_cache.shape[2] * head_dim
    cached = 2 * (new + keys) * key_cache[0, 0].numel() * key_cache.element_size()
    return Cost(
        bytes=elements * query.element_size() + cached, flops=4 * pairs * num_heads * head_dim
    )
