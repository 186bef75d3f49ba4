# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Common parts of the attention kernels: online softmax over keys in a paged cache.

Flash attention (T. Dao, 2023, "FlashAttention-2").
"""

from __future__ import annotations

import triton
import triton.language as tl

from src.ops.attention.cached_rows_triton import load_factors, numbers_of

LOG2_E = 1.4426950408889634


@triton.jit
def softmax_state(M: tl.constexpr, D: tl.constexpr):
    """The softmax state of no keys: accumulator [M, D], maximum in base 2 [M] and sum [M]."""
    acc = tl.zeros([M, D], dtype=tl.float32)
    highest = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    return acc, highest, total


@triton.jit
def soft_cap(scores, cap: tl.constexpr):
    """`cap * tanh(scores / cap)`."""
    x = scores * (1.0 / cap)
    magnitude = tl.abs(x)
    t = tl.exp2(magnitude * -2.8853900817779268)  # exp(-2 magnitude)
    far = (1.0 - t) / (1.0 + t)
    # Near 0 the quotient loses digits, so use Cephes' polynomial (S. Moshier) there.
    s = x * x
    p = ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s
    p = ((p + 1.33314422036e-1) * s - 3.33332819422e-1) * s * x + x
    return cap * tl.where(magnitude < 0.625, p, tl.where(x < 0, -far, far))


@triton.jit
def with_sink(total, highest, sinks, head, exists):
    """Sums of softmax states [M], with the logits of their query heads' sinks added."""
    sink = tl.load(sinks + head, mask=exists, other=float("-inf")) * 1.4426950408889634
    # A row without any key stays empty.
    return tl.where(total > 0.0, total + tl.exp2(sink - highest), total)


@triton.jit
def first_visible(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that queries at these positions see; with neither window nor chunks, 0."""
    first = positions * 0
    if WINDOW > 0:
        first = tl.maximum(positions - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(positions // CHUNK * CHUNK, first)
    return first


@triton.jit
def attend(
    acc,
    highest,
    total,
    q,  # [M, D]
    positions,  # [M] position of each packed query row; unused unless CAUSAL
    begin,
    end,
    table,
    key_cache,
    value_cache,
    kv_head,
    token_stride,
    scale_log2,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAP: tl.constexpr,
    SORT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Add keys [begin, end) to the softmax state.

    Scores are in base 2. So is CAP, the soft cap times log2(e); 0 for none. Without BOUNDED, begin
    and end must be multiples of N. Without CAUSAL, every row sees all of the keys. SORT is the
    CODES of the caches, see `codes`; their factors multiply scores and weights.
    """
    d = tl.arange(0, D)
    ROW: tl.constexpr = HEAD_DIM + (4 if SORT > 0 else 0)
    for start in range(begin // N * N, end, N):
        keys = start + tl.arange(0, N)
        in_range = (keys >= begin) & (keys < end)
        if BLOCK_SIZE % N == 0:
            # The tile lies in one block: look up one block number; its rows are consecutive.
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            first = block * BLOCK_SIZE + start % BLOCK_SIZE
            rows = (first + tl.arange(0, N)) * token_stride + kv_head * ROW
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
            rows = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * token_stride + kv_head * ROW
        if SORT > 0:
            rows = tl.multiple_of(rows, 4)
        if BOUNDED:
            stored = in_range[None, :] & (d < HEAD_DIM)[:, None]
            k = tl.load(key_cache + rows[None, :] + d[:, None], mask=stored, other=0.0)
        elif HEAD_DIM == D:
            k = tl.load(key_cache + rows[None, :] + d[:, None])
        else:
            stored = (d < HEAD_DIM)[:, None]
            k = tl.load(key_cache + rows[None, :] + d[:, None], mask=stored, other=0.0)
        if SORT > 0:
            factors = load_factors(key_cache, rows, in_range, SORT, HEAD_DIM)
            k = numbers_of(k, q, SORT)
            scores = tl.dot(q, k, input_precision="tf32x3") * (factors * scale_log2)[None, :]
        else:
            scores = tl.dot(q, k, input_precision="tf32x3") * scale_log2  # [M, N]
        if CAP > 0:
            scores = soft_cap(scores, CAP)
        if CAUSAL:
            visible = in_range[None, :] & (keys[None, :] <= positions[:, None] + AHEAD)
            if WINDOW + CHUNK > 0:
                from_key = first_visible(positions, WINDOW, CHUNK)
                visible = visible & (keys[None, :] >= from_key[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        elif BOUNDED:
            scores = tl.where(in_range[None, :], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # Avoid -inf - -inf, which is NaN, in a row that has seen no key yet.
        base = tl.where(now == float("-inf"), 0.0, now) if CAUSAL else now
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        if BOUNDED:
            stored = in_range[:, None] & (d < HEAD_DIM)[None, :]
            v = tl.load(value_cache + rows[:, None] + d[None, :], mask=stored, other=0.0)
        elif HEAD_DIM == D:
            v = tl.load(value_cache + rows[:, None] + d[None, :])
        else:
            stored = (d < HEAD_DIM)[None, :]
            v = tl.load(value_cache + rows[:, None] + d[None, :], mask=stored, other=0.0)
        acc = acc * rescale[:, None]
        if SORT > 0:
            v = numbers_of(v, q, SORT)
            scaled = weights * load_factors(value_cache, rows, in_range, SORT, HEAD_DIM)[None, :]
            acc += tl.dot(scaled.to(v.dtype), v, input_precision="tf32x3")
        else:
            acc += tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        total = total * rescale + tl.sum(weights, 1)
        highest = now
    return acc, highest, total
