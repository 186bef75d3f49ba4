"""`linear_recurrence`: a recurrent state per sequence and head, updated token by token.

The gated delta rule and the scan of Mamba-2 are both of this form. A head's state is a matrix
S [N, P], and of each token::

    S *= exp(decay)
    d  = factor * (value - S.T @ key)        with `delta`, else  factor * value
    S += outer(key, d)
    out = S.T @ query + skip * value

Columns of S do not depend on each other, and no sum spans tokens. So cutting a row into chunks, or
computing other rows beside it, changes no bit.

Gated delta rule: S. Yang et al., "Gated Delta Networks" (2024). Mamba-2: T. Dao and A. Gu,
"Transformers are SSMs" (2024).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from src.ops.declaration import Case, Cost, Op
from src.ops.records import Record, number, tensor

NORM_EPS: Final = 1e-6
"""Added to the sum of squares of a query or key before the root."""


class LinearRecurrence(Record):
    """Advance the recurrent states of some rows by their tokens, and read them after each token.

    Sums are in float32.

    Attributes
    ----------
    query
        [T, K, N] float32, bfloat16 or float16; heads lie N apart, the last dimension is contiguous.
        Each of the K heads serves H / K heads of values that follow each other.
    key
        [T, K, N], the same.
    value
        [T, H, P], the same.
    decay
        [T, H] float32, contiguous: logarithm of the factor by which states decay, at most 0.
    factor
        [T, H] float32, contiguous: factor of what is written.
    skip
        [H] float32, contiguous: factor of the value that is added to the output, or None.
    states
        [slots, H, N, P] float32, changed; a slot's states are contiguous.
    slots
        [B] int64, contiguous: the slot of each row, each another one. Rows without tokens, as
        captured steps are padded with, may name any, and the same.
    query_start_loc
        [B + 1] int32: first token of each row. Tokens behind the last are padding.
    out
        [T, H, P], written, contiguous, of query's dtype; padding becomes 0.
    delta
        Whether what the state already holds of a key is subtracted from the value.
    normalizes
        Whether queries and keys are divided by their length first, and queries by the root of N.
    """

    query: Tensor = tensor("tokens key_heads key_dim", rows=True)
    key: Tensor = tensor("tokens key_heads key_dim", rows=True)
    value: Tensor = tensor("tokens heads dim", rows=True)
    decay: Tensor = tensor("tokens heads", torch.float32)
    factor: Tensor = tensor("tokens heads", torch.float32)
    skip: Tensor | None = tensor("heads", torch.float32)
    states: Tensor = tensor("num_slots heads key_dim dim", torch.float32, rows=True, changed=True)
    slots: Tensor = tensor("rows", torch.int64)
    query_start_loc: Tensor = tensor("rows+1", torch.int32)
    out: Tensor = tensor("tokens heads dim", changed=True)
    delta: bool = number()
    normalizes: bool = number()


def reference(call: LinearRecurrence) -> None:
    """See `LinearRecurrence`."""
    query, key, value, decay, factor, skip, states, slots, query_start_loc, out, *rule = call
    delta, normalizes = rule
    bounds = query_start_loc.tolist()
    shared = value.shape[1] // query.shape[1]
    out[bounds[-1] :] = 0
    for row, slot in enumerate(slots.tolist()):
        tokens = slice(bounds[row], bounds[row + 1])
        if tokens.start == tokens.stop:
            continue
        q, k = (x[tokens].float() for x in (query, key))
        if normalizes:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
            q = q * q.shape[-1] ** -0.5
        q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
        v = value[tokens].float()
        kept, written = decay[tokens].exp(), factor[tokens]
        state = states[slot]
        for t in range(len(v)):
            state = state * kept[t, :, None, None]
            new = v[t]
            if delta:
                new = new - (state * k[t, :, :, None]).sum(1)
            state = state + k[t, :, :, None] * (written[t, :, None] * new)[:, None]
            result = (state * q[t, :, :, None]).sum(1)
            if skip is not None:
                result = result + skip[:, None] * v[t]
            out[bounds[row] + t] = result.to(out.dtype)
        states[slot] = state


def _build(
    device: str,
    *,
    rows: tuple[int, ...] = (1, 5),
    padding: int = 0,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 16,
    dim: int = 24,
    dtype: torch.dtype = torch.float32,
    delta: bool = True,
    has_skip: bool = False,
    seed: int = 0,
) -> LinearRecurrence:
    """Slices of one fused tensor, slots in random order, NaN wherever nothing may be read."""
    random = torch.Generator().manual_seed(seed)
    tokens, total = sum(rows), sum(rows) + padding
    sizes = (key_heads * key_dim, key_heads * key_dim, heads * dim)
    fused = torch.randn(total, sum(sizes), generator=random)
    decay = -torch.rand(total, heads, generator=random)
    factor = torch.rand(total, heads, generator=random)
    for each in (fused, decay, factor):
        each[tokens:] = torch.nan
    query, key, value = fused.to(device, dtype).split(sizes, dim=-1)
    # States are slices too: of what a sequence keeps in all layers.
    memory = torch.full((len(rows) + 2, heads * key_dim * dim + 8), torch.nan)
    slots = torch.randperm(len(memory), generator=random)[: len(rows)]
    memory[slots] = torch.randn(len(rows), memory.shape[1], generator=random)
    states = memory.to(device)[:, 8:].unflatten(1, (heads, key_dim, dim))
    slots = torch.where(torch.tensor(rows) > 0, slots, len(memory))
    bounds = torch.tensor((0, *rows)).cumsum(0).to(torch.int32)
    return LinearRecurrence(
        query=query.unflatten(1, (key_heads, key_dim)),
        key=key.unflatten(1, (key_heads, key_dim)),
        value=value.unflatten(1, (heads, dim)),
        decay=decay.to(device),
        factor=factor.to(device),
        skip=torch.randn(heads, generator=random).to(device) if has_skip else None,
        states=states,
        slots=slots.to(device),
        query_start_loc=bounds.to(device),
        out=torch.full((total, heads, dim), torch.nan, dtype=dtype, device=device),
        delta=delta,
        normalizes=delta,
    )


def _grid() -> list[Case]:
    """Dtypes, sizes that fill no vector, both rules; rows without tokens, and only padding."""
    cases: list[Case] = [
        {"dtype": dtype, "dim": dim, "delta": delta, "has_skip": not delta, "padding": 1}
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for dim in (8, 64, 72, 128)
        for delta in (True, False)
    ]
    cases += [
        {"rows": (1, 1, 1, 40), "key_heads": key_heads, "heads": 6, "key_dim": key_dim, "dim": 64}
        for key_heads, key_dim in ((1, 128), (6, 33), (3, 64))
    ]
    cases += [{"rows": (0, 3, 0)}, {"rows": (0,), "padding": 2}, {"rows": ()}, {"rows": (3,)}]
    return cases


def _cost(call: LinearRecurrence) -> Cost:
    tokens, states = int(call.query_start_loc[-1]), call.states
    moved = (call.query, call.key, call.value, call.decay, call.factor, call.out)
    bytes_of_token = sum(x[:1].numel() * x.element_size() for x in moved)
    of_state = states[:1].numel()
    products = 4 if call.delta else 3
    return Cost(
        bytes=tokens * bytes_of_token + 2 * len(call.slots) * of_state * states.element_size(),
        flops=2 * products * tokens * of_state,
    )


LINEAR_RECURRENCE = Op(
    "linear_recurrence",
    LinearRecurrence,
    reference=reference,
    build=_build,
    cases=_grid(),
    cost=_cost,
    lazy={"cuda": "src.ops.states.linear_recurrence_triton:run"},
)

linear_recurrence = LINEAR_RECURRENCE.function
"""The op as a function of its record's fields: of `LinearRecurrence`."""
