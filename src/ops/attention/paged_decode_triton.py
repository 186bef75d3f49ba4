# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Decoding rows on CUDA devices: a persistent grid over a flat list of KV tiles, and a merge.

The list is the schedule's (see `src.ops.attention.decode_schedule`), repeated for every kv head.
Each of P programs takes the same number of tiles, whichever rows they belong to. A *piece* is the
part of a segment that one program reads. Each piece stores its partial result in a place of its
own. The first piece of a segment has places that belong to its rows and heads: one for the shared
segment of a pack, one for a row's own segment. Every further piece of a segment is the first piece
of its program, so it has the place of that program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.attention.attend_triton import LOG2_E, attend, first_visible, softmax_state, with_sink
from src.ops.attention.spec import AttentionSpec
from src.ops.launching_triton import launcher
from src.ops.tuning import DecodeShape, multiprocessors, packed_rows

_MERGED = 16
"""Number of pieces that are merged at once."""


@triton.jit
def _place(before, heads, row, head):
    """Place of a query head's result for the first piece of a segment; `before` counts rows."""
    return (before + row).to(tl.int64) * heads + head


@triton.jit
def _place_behind(rows, heads, program, packed, M: tl.constexpr):
    """Place of a packed row's result for a piece that continues a segment in `program`."""
    return (2 * rows).to(tl.int64) * heads + program * M + packed


@triton.jit
def _segment_of(starts, segments, tile):
    """The segment of a tile: the last one that begins at or before it."""
    low = 0
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


# As for the schedule's kernels: arguments that vary from step to step select no other variant.
@triton.jit(do_not_specialize=["block_tables", "seq_lens", "table_stride", "rows"])
def _decode_kernel(
    query,  # [tokens, heads, head_dim], rows query_stride apart
    key_cache,  # [blocks, block_size, kv_heads, head_dim], or rows of codes
    value_cache,
    block_tables,  # [rows, table_stride] int32
    query_start_loc,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    schedule,  # see decode_schedule
    partial_out,  # [places, D] float32, normalised
    partial_lse,  # [places] float32, log2 of the piece's sum
    out,  # [tokens, heads, head_dim]
    query_stride,
    table_stride,
    token_stride,
    rows,
    kv_heads,
    scale_log2,
    sinks,  # [heads] float32, or None
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    SORT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Process an equal share of all tiles, piece by piece; whole rows are written to `out`."""
    program = tl.program_id(0)
    segments = 2 * rows
    place = schedule + segments + 1
    shared = place + rows
    members_of = shared + rows
    tiles = tl.load(schedule + segments)
    share = (tiles * kv_heads + tl.num_programs(0) - 1) // tl.num_programs(0)
    unit = program * share
    stop = tl.minimum(unit + share, tiles * kv_heads)
    kv_head = unit // tl.maximum(tiles, 1)
    segment = _segment_of(schedule, segments, unit - kv_head * tiles)
    packed = tl.arange(0, M)
    d = tl.arange(0, D)
    while unit < stop:
        at = unit - kv_head * tiles
        first = tl.load(schedule + segment)
        last = tl.load(schedule + segment + 1)
        count = tl.minimum(last - at, stop - unit)
        row = segment // 2
        of_pack = segment % 2 == 0
        slot = packed // GROUP
        # The scalar condition is part of the bound, because the interpreter of newer Tritons
        # rejects a mask that combines a scalar with a tensor.
        fellow = tl.load(
            members_of + row * MEMBERS + slot,
            mask=slot < tl.where(of_pack, MEMBERS, 0),
            other=-1,
        )
        member = tl.where(slot < tl.where(of_pack, 0, 1), row, fellow)
        exists = member >= 0
        token = tl.load(query_start_loc + member, mask=exists, other=0).to(tl.int64)
        head = kv_head * GROUP + packed % GROUP
        stored = exists[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(
            query + (token * query_stride + head * HEAD_DIM)[:, None] + d[None, :],
            mask=stored,
            other=0.0,
        )
        seq_len = tl.load(seq_lens + row)
        where = tl.load(place + row)
        with_pack = tl.load(shared + tl.maximum(where, 0) // MEMBERS)
        with_pack = tl.where(where >= 0, with_pack, 0)
        skipped = tl.where(of_pack, 0, with_pack)
        if WINDOW + CHUNK > 0:
            skipped = first_visible(seq_len - 1, WINDOW, CHUNK) // N
        begin = (skipped + at - first) * N
        end = tl.minimum(begin + count * N, seq_len)
        table = block_tables + row.to(tl.int64) * table_stride
        acc, highest, total = softmax_state(M, D)
        if WINDOW + CHUNK > 0:
            begin = tl.maximum(begin, first_visible(seq_len - 1, WINDOW, CHUNK))
            whole_end = begin
        else:
            whole_end = end // N * N
            acc, highest, total = attend(
                acc, highest, total, q, packed, begin, whole_end, table, key_cache,
                value_cache, kv_head, token_stride, scale_log2, False, False, 0, 0,
                0, CAP, SORT, HEAD_DIM, BLOCK_SIZE, N, D,
            )  # fmt: skip
        acc, highest, total = attend(
            acc, highest, total, q, packed, whole_end, end, table, key_cache, value_cache,
            kv_head, token_stride, scale_log2, True, False, 0, 0, 0, CAP, SORT, HEAD_DIM,
            BLOCK_SIZE, N, D,
        )  # fmt: skip
        acc = acc / total[:, None]
        if (with_pack == 0) & (count == last - first):
            where_out = (token * kv_heads * GROUP + head) * HEAD_DIM
            whole = acc
            if sinks is not None:
                rest = with_sink(total, highest, sinks, head, exists)
                whole = acc * (total / rest)[:, None]
            result = whole.to(out.dtype.element_ty)
            tl.store(out + where_out[:, None] + d[None, :], result, mask=stored)
        else:
            heads = kv_heads * GROUP
            begun = _place(tl.where(of_pack, 0, rows), heads, member, head)
            behind = _place_behind(rows, heads, program, packed, M)
            piece = tl.where(at == first, begun, behind)
            tl.store(partial_lse + piece, highest + tl.log2(total), mask=exists)
            tl.store(partial_out + piece[:, None] * D + d[None, :], acc, mask=exists[:, None])
        unit += count
        if at + count == last:
            if at + count == tiles:
                kv_head += 1
            # Not just the next segment: it, and many after it, may be empty, as for prompts.
            segment = _segment_of(schedule, segments, unit - kv_head * tiles)


_launch_decode = launcher(_decode_kernel)


@triton.jit
def _take_pieces(
    acc,
    highest,
    total,
    partial_out,
    partial_lse,
    first,  # tiles of the flat list, [first, last)
    last,
    share,
    begun,  # place of the first piece, and place of a continuing piece in program 0
    behind,
    M: tl.constexpr,
    D: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Merge one segment's pieces into a row's softmax state, in order."""
    d = tl.arange(0, D)
    end = tl.where(last > first, (last - 1) // share + 1, 0)
    begin = first // share
    for start in range(begin, end, PIECES):
        program = start + tl.arange(0, PIECES)
        exists = program < end
        piece = tl.where(program == begin, begun, behind + program * M)
        lse = tl.load(partial_lse + piece, mask=exists, other=float("-inf"))
        now = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - now)
        rescale = tl.exp2(highest - now)
        parts = tl.load(
            partial_out + piece[:, None] * D + d[None, :], mask=exists[:, None], other=0.0
        )
        acc = acc * rescale + tl.sum(weights[:, None] * parts, 0)
        total = total * rescale + tl.sum(weights, 0)
        highest = now
    return acc, highest, total


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    partial_out,
    partial_lse,
    query_start_loc,
    schedule,
    out,
    rows,
    heads,
    programs,
    sinks,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute one query head of a row: first its pack's shared segment, then its own."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + row).to(tl.int64)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    segments = 2 * rows
    kv_head = head // GROUP
    tiles = tl.load(schedule + segments)
    share = (tiles * (heads // GROUP) + programs - 1) // programs
    base = kv_head * tiles
    where = tl.load(schedule + segments + 1 + row)
    leader = tl.maximum(where, 0) // MEMBERS
    with_pack = tl.where(where >= 0, tl.load(schedule + segments + 1 + rows + leader), 0)
    first = base + tl.load(schedule + 2 * row + 1)
    last = base + tl.load(schedule + 2 * row + 2)
    if (with_pack == 0) & (first // share == (last - 1) // share):
        return
    acc = tl.zeros([D], dtype=tl.float32)
    highest = float("-inf")
    total = 0.0
    if with_pack > 0:
        pack_first = base + tl.load(schedule + 2 * leader)
        packed = where % MEMBERS * GROUP + head % GROUP
        acc, highest, total = _take_pieces(
            acc, highest, total, partial_out, partial_lse, pack_first, pack_first + with_pack,
            share, _place(0, heads, row, head),
            _place_behind(rows, heads, 0, packed, M), M, D, PIECES,
        )  # fmt: skip
    acc, highest, total = _take_pieces(
        acc, highest, total, partial_out, partial_lse, first, last, share,
        _place(rows, heads, row, head),
        _place_behind(rows, heads, 0, head % GROUP, M), M, D, PIECES,
    )  # fmt: skip
    if sinks is not None:
        total = with_sink(total, highest, sinks, head, head < heads)
    d = tl.arange(0, D)
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (token * heads + head) * HEAD_DIM + d, result, mask=d < HEAD_DIM)


_launch_merge = launcher(_merge_kernel)


def run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    schedule: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    padded: int,
    sort: int,
    shape: DecodeShape,
) -> None:
    """Attend for the rows with one query token; arguments as in `paged_attention`.

    Parameters
    ----------
    schedule
        The schedule of these rows with this window or chunk, in tiles of `shape.tile`.
    spec
        Scale and modifiers of the scores.
    padded
        head_dim rounded up to a power of two.
    sort
        CODES of the caches, which are as `codes.as_stored` gives them.
    shape
        Size of the programs.
    """
    heads, head_dim = query.shape[1:]
    rows, (_, block_size, kv_heads, row) = block_tables.shape[0], key_cache.shape
    group = heads // kv_heads
    packed = packed_rows(group)
    programs = multiprocessors(query.device) * shape.programs
    places = 2 * rows * heads + programs * packed
    # One allocation for both: the results of all places, then their sums.
    partial = query.new_empty(places * (padded + 1), dtype=torch.float32)
    partial_lse = partial[places * padded :]
    shared = {
        "GROUP": group,
        "MEMBERS": packed // group,
        "HEAD_DIM": head_dim,
        "M": packed,
        "D": padded,
    }
    _launch_decode(
        (programs,),
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, schedule,
        partial, partial_lse, out, query.stride(0), block_tables.stride(0),
        kv_heads * row, rows, kv_heads, spec.scale * LOG2_E, spec.sinks, **shared,
        BLOCK_SIZE=block_size, WINDOW=spec.window or 0, CHUNK=spec.chunk or 0,
        CAP=(spec.cap or 0.0) * LOG2_E, SORT=sort, N=shape.tile, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    _launch_merge(
        (rows, heads),
        partial, partial_lse, query_start_loc, schedule, out, rows, heads, programs,
        spec.sinks, **shared, PIECES=_MERGED, num_warps=1,
    )  # fmt: skip
