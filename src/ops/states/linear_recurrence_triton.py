# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The linear recurrence on CUDA devices: a program per row, head and some columns of its state.

A program keeps its columns in registers while it goes through the row's tokens one after the other.
So a row's results do not depend on the other rows of a step, nor on where it is cut into chunks. It
loads a token's tensors before it computes the token in front of it.

Grids come from sizes alone, so that the launch can be captured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.states.linear_recurrence import NORM_EPS

_COLUMNS = 32  # of a state, in one program
_PADDING = 16  # tokens of padding that are cleared at a time
_EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _normalized(x, ROOT: tl.constexpr):
    """A vector divided by its length, and by the root of what it has."""
    return x * (tl.rsqrt(tl.sum(x * x, 0) + _EPS) * ROOT)


# Alignments that vary from step to step select no other variant.
@triton.jit(do_not_specialize=["decay", "factor", "slots", "query_start_loc", "rows", "tokens"])
def _recurrence_kernel(
    query,  # [tokens, key_heads, KEY_DIM], rows query_stride apart
    key,
    value,  # [tokens, heads, DIM], rows value_stride apart
    decay,  # [tokens, heads] float32
    factor,
    skip,  # [heads] float32, or None
    states,  # [slots, heads, KEY_DIM, DIM] float32, slots states_stride apart
    slots,  # [rows] int64
    query_start_loc,  # [rows + 1] int32
    out,  # [tokens, heads, DIM]
    query_stride,
    key_stride,
    value_stride,
    states_stride,
    rows,
    tokens,
    heads,
    per_key,  # heads of values to one of keys
    DELTA: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROOT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Some columns of one row's state of one head; the last row clears the padding's output."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * P + tl.arange(0, P)
    is_column = p < DIM
    out += head * DIM
    if row == rows:
        behind = tl.load(query_start_loc + rows)
        for first in range(behind, tokens, PADDING):
            unused = first + tl.arange(0, PADDING)
            cleared = out + unused.to(tl.int64)[:, None] * (heads * DIM) + p[None, :]
            zeros = tl.zeros([PADDING, P], dtype=out.dtype.element_ty)
            tl.store(cleared, zeros, mask=(unused < tokens)[:, None] & is_column[None, :])
    else:
        begin = tl.load(query_start_loc + row)
        end = tl.load(query_start_loc + row + 1)
        if begin < end:
            n = tl.arange(0, N)
            is_row = n < KEY_DIM
            state_at = states + tl.load(slots + row) * states_stride
            state_at += (head * KEY_DIM + n[:, None]) * DIM + p[None, :]
            mask = is_row[:, None] & is_column[None, :]
            state = tl.load(state_at, mask=mask, other=0.0)
            queries = query + head // per_key * KEY_DIM + n
            keys = key + head // per_key * KEY_DIM + n
            values = value + head * DIM + p
            decays = decay + head
            factors = factor + head
            added = 0.0
            if skip is not None:
                added = tl.load(skip + head)
            at = begin.to(tl.int64)
            next_q = tl.load(queries + at * query_stride, mask=is_row, other=0.0)
            next_k = tl.load(keys + at * key_stride, mask=is_row, other=0.0)
            next_v = tl.load(values + at * value_stride, mask=is_column, other=0.0)
            next_decay = tl.load(decays + at * heads)
            next_factor = tl.load(factors + at * heads)
            last = end.to(tl.int64) - 1
            for _ in range(begin, end):
                q, k = next_q.to(tl.float32), next_k.to(tl.float32)
                v = next_v.to(tl.float32)
                kept, written = tl.exp(next_decay), next_factor
                to = out + at * (heads * DIM) + p
                # Behind the row's last token that token is loaded again.
                at = tl.minimum(at + 1, last)
                next_q = tl.load(queries + at * query_stride, mask=is_row, other=0.0)
                next_k = tl.load(keys + at * key_stride, mask=is_row, other=0.0)
                next_v = tl.load(values + at * value_stride, mask=is_column, other=0.0)
                next_decay = tl.load(decays + at * heads)
                next_factor = tl.load(factors + at * heads)
                if NORMALIZES:
                    q = _normalized(q, ROOT)
                    k = _normalized(k, 1.0)
                state *= kept
                new = v
                if DELTA:
                    new -= tl.sum(state * k[:, None], 0)
                state += k[:, None] * (written * new)[None, :]
                result = tl.sum(state * q[:, None], 0)
                if skip is not None:
                    result += added * v
                tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
            tl.store(state_at, state, mask=mask)


_launch_recurrence = launcher(_recurrence_kernel)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    factor: Tensor,
    skip: Tensor | None,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    delta: bool,
    normalizes: bool,
) -> None:
    """Launch the kernel; arguments as in `linear_recurrence`."""
    tokens, heads, dim = value.shape
    key_heads, key_dim = query.shape[1:]
    if tokens == 0:
        return
    rows = len(slots)
    _launch_recurrence(
        (rows + 1, heads, ceil_div(dim, _COLUMNS)),
        query, key, value, decay, factor, skip, states, slots, query_start_loc, out,
        query.stride(0), key.stride(0), value.stride(0), states.stride(0), rows, tokens, heads,
        heads // key_heads, DELTA=delta, NORMALIZES=normalizes, **constants(key_dim, dim),
        num_warps=4,
    )  # fmt: skip


def constants(key_dim: int, dim: int) -> dict[str, float]:
    """The kernel's constants for states [key_dim, dim]."""
    return {
        "ROOT": key_dim**-0.5,
        "KEY_DIM": key_dim,
        "DIM": dim,
        "N": next_power_of_2(key_dim),
        "P": _COLUMNS,
        "PADDING": _PADDING,
    }
