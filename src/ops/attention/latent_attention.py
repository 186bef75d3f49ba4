"""Latent attention: the cache holds one small vector per token instead of keys and values of heads.

DeepSeek-V2 (2024), section 2.1, "multi-head latent attention". A token's vector has two parts: a
latent of `rank` numbers, from which one projection makes a key and a value for every head, and a
rotated key of `rope` numbers that all heads share. The cache is paged as in `paged_attention`.

A kernel may compute a row in two ways. *Expanded* makes keys and values of the whole context.
*Absorbed* applies the projection to the queries and to the result instead, so all heads attend over
the vectors themselves. That reads no more than the cache, and suits few queries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from src.ops.attention.latent_expansion import LatentShape, is_expanded, plan_expansion
from src.ops.declaration import Case, Cost, Op
from src.ops.records import Record, number, tensor

_REFERENCE_QUERY_TILE = 256
"""Queries that the reference attends at once; this bounds the size of its score matrix."""


class LatentAttention(Record):
    """Write vectors into the paged cache, then attend causally over the cache into `out`.

    Rows, tokens, positions and padding are those of `paged_attention`. float32, bfloat16 or
    float16, accumulated in float32.

    Attributes
    ----------
    query
        [T, heads, nope + rope]; of each head the rotated part comes last. The row stride is free.
    latent
        [T, rank + rope]: each token's latent, already normalized, then its rotated key. The row
        stride is free. rank + rope is a multiple of 8 up to 576.
    cache
        [num_blocks, block_size, rank + rope], changed in place.
    up
        [heads, nope + value, rank]: the projection of latents to the keys and values of heads.
    block_tables
        [B, max_blocks] int32; entries beyond a row's length are not read.
    query_start_loc
        [B + 1] int32, row -> its first token; the last is the number of tokens.
    seq_lens
        [B] int32, row -> context length including this step's tokens.
    slot_mapping
        [T] int64, token -> block * block_size + offset, or -1 to write nothing.
    out
        [T, heads, value], contiguous, changed in place; padding tokens get 0.
    scale
        Factor of the scores.
    max_query_len
        Upper bound of the rows' query lengths.
    max_seq_len
        Upper bound of `seq_lens`.
    deterministic
        Whether a token's bits must depend only on its query and on what it sees. Then every row is
        absorbed.
    expansion
        The rows that are expanded, on the device of the others; see `Expansion`. `None`: no row.
        For CUDA only; on the CPU the kernel decides.
    expanded_keys
        Number of expanded keys.
    verifies
        See `PagedAttention`. The CPU's kernel absorbs such rows.

    Raises
    ------
    ValueError
        From the compiled kernel, for shapes, dtypes, strides, slots or block numbers outside of
        this contract.
    """

    query: Tensor = tensor("tokens heads nope+rope", rows=True)
    latent: Tensor = tensor("tokens rank+rope", rows=True)
    cache: Tensor = tensor("num_blocks block_size rank+rope", changed=True)
    up: Tensor = tensor("heads nope+value rank")
    block_tables: Tensor = tensor("rows max_blocks", torch.int32, rows=True)
    query_start_loc: Tensor = tensor("rows+1", torch.int32)
    seq_lens: Tensor = tensor("rows", torch.int32)
    slot_mapping: Tensor = tensor("tokens", torch.int64)
    out: Tensor = tensor("tokens heads value", changed=True)
    scale: float = number(on_cpu=False)
    max_query_len: int = number(varies=True, on_cpu=False)
    max_seq_len: int = number(varies=True, on_cpu=False)
    deterministic: bool = number(default=False)
    expansion: Tensor | None = tensor("_", torch.int32, on_cpu=False, default=None)
    expanded_keys: int = number(varies=True, on_cpu=False, default=0)
    verifies: Tensor | None = tensor("rows", torch.int32, default=None)


def reference(call: LatentAttention) -> None:
    """See `LatentAttention`."""
    slot_mapping, cache, out = call.slot_mapping, call.cache, call.out
    block_size = cache.shape[1]
    written = slot_mapping >= 0  # [T] bool, token index -> is not padding
    slots = slot_mapping[written]
    cache[slots // block_size, slots % block_size] = call.latent[written]
    starts = call.query_start_loc.tolist()
    out[starts[-1] :] = 0
    for row, seq_len in enumerate(call.seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        blocks = call.block_tables[row, : -(-seq_len // block_size)].long()
        context = cache[blocks].flatten(0, 1)[:seq_len].float()
        for tile in range(begin, end, _REFERENCE_QUERY_TILE):
            tile_end = min(tile + _REFERENCE_QUERY_TILE, end)
            first_position = seq_len - (end - tile)
            seen = context[: first_position + tile_end - tile]
            given = call.query[tile:tile_end].float()
            attended = _attend(
                given, seen, call.up.float(), out.shape[2], call.scale, first_position
            )
            out[tile:tile_end] = attended.to(out.dtype)


def _attend(
    query: Tensor, seen: Tensor, up: Tensor, value: int, scale: float, first_position: int
) -> Tensor:
    """Consecutive tokens [Q, heads, nope + rope] over vectors [keys, rank + rope]."""
    rank, nope = up.shape[2], up.shape[1] - value
    latents, rotated = seen[:, :rank], seen[:, rank:]
    # [heads, keys, nope], [heads, keys, value]
    keys, values = (latents @ up.transpose(1, 2)).split((nope, value), dim=-1)
    by_head = query.transpose(0, 1)  # [heads, Q, nope + rope]
    scores = by_head[..., :nope] @ keys.transpose(1, 2) + by_head[..., nope:] @ rotated.T
    positions = torch.arange(first_position, len(seen), device=seen.device)
    hidden = torch.arange(len(seen), device=seen.device) > positions[:, None]  # [Q, keys]
    weights = (scores * scale).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    attended: Tensor = weights @ values
    return attended.transpose(0, 1)


def _build(
    device: str,
    *,
    rows: tuple[tuple[int, int], ...] = ((5, 33), (1, 130), (40, 40), (1, 1)),
    heads: int = 4,
    nope: int = 16,
    rope: int = 8,
    rank: int = 32,
    value: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    strided: bool = False,
    deterministic: bool = False,
    expands: bool = False,
    seed: int = 0,
) -> LatentAttention:
    """Random arguments; `rows` are (query_len, seq_len). Memory that must not be read is NaN.

    With `expands` they have a GPU's plan, as the arguments of a model's layers have.
    """
    random = torch.Generator().manual_seed(seed)
    width, count = rank + rope, sum(length for length, _ in rows)
    longest = max((seq_len for _, seq_len in rows), default=1)
    per_row = -(-longest // block_size)
    num_blocks = per_row * max(1, len(rows)) + 1
    order = torch.randperm(num_blocks, generator=random).to(torch.int32)
    tables = order[: per_row * len(rows)].view(len(rows), per_row)
    cache = torch.full((num_blocks, block_size, width), torch.nan)
    slots: list[int] = []
    for table, (query_len, seq_len) in zip(tables.tolist(), rows, strict=True):
        for position in range(seq_len):
            block, offset = table[position // block_size], position % block_size
            if position >= seq_len - query_len:
                slots.append(block * block_size + offset)
            else:
                cache[block, offset] = torch.randn(width, generator=random)
    slots += [-1] * padding
    total = count + padding
    query = torch.randn(total, heads * (nope + rope) + 8, generator=random)
    latent = torch.randn(total, width + 8, generator=random)
    query[count:], latent[count:] = torch.nan, torch.nan
    query, latent = query[:, : heads * (nope + rope)], latent[:, :width]
    if not strided:
        query, latent = query.contiguous(), latent.contiguous()
    up = torch.randn(heads, nope + value, rank, generator=random) * rank**-0.5
    starts = torch.tensor([0, *(length for length, _ in rows)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    moved = [each.to(dtype).to(device) for each in (query, latent, cache, up)]
    if strided:  # `to` with another dtype makes them contiguous.
        moved[:2] = [torch.cat((each, each[:, :8]), dim=1)[:, :-8] for each in moved[:2]]
    moved[0] = moved[0].unflatten(-1, (heads, nope + rope))
    expansion = None
    if expands:
        queries, keys = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        expansion = plan_expansion(queries, keys, LatentShape(nope, rope, rank, value))
    return LatentAttention(
        query=moved[0],
        latent=moved[1],
        cache=moved[2],
        up=moved[3],
        block_tables=tables.to(device),
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        out=torch.full((total, heads, value), torch.nan, dtype=dtype, device=device),
        scale=(nope + rope) ** -0.5,
        max_query_len=max((length for length, _ in rows), default=0),
        max_seq_len=longest,
        deterministic=deterministic,
        expansion=None if expansion is None else torch.from_numpy(expansion.plan).to(device),
        expanded_keys=0 if expansion is None else expansion.keys,
    )


def _cost(call: LatentAttention) -> Cost:
    """Each vector and the projection read once; products of the way that needs fewer of them."""
    query, up, out = call.query, call.up, call.out
    starts, heads, width = call.query_start_loc.cpu().numpy(), up.shape[0], call.cache.shape[2]
    queries = np.diff(starts).astype(np.int64)
    keys = call.seq_lens.cpu().numpy().astype(np.int64)
    shape = LatentShape.of(up, width, out.shape[2])
    keys = np.where(queries > 0, keys, 0)
    pairs = queries * keys - queries * (queries - 1) // 2
    expanded = (not call.deterministic) & is_expanded(queries, keys, shape, 1)
    if call.verifies is not None:
        expanded &= call.verifies.cpu().numpy() == 0
    per_pair = np.where(
        expanded, shape.nope + shape.rope + shape.value, 2 * shape.rank + shape.rope
    )
    projected = np.where(expanded, keys, queries).sum()
    elements = query.numel() + out.numel() + up.numel() + 2 * call.latent.numel()
    return Cost(
        bytes=(elements + int(keys.sum()) * width) * query.element_size(),
        flops=2 * heads * int((pairs * per_pair).sum()) + 2 * int(projected) * up.numel(),
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES: list[Case] = [
    {},
    {"padding": 3, "strided": True},
    {"rows": ((1, 1), (0, 3), (1, 300), (2, 2)), "heads": 3, "rope": 16, "block_size": 8},
    # More heads than an item of attention has rows; a value that is wider than a key.
    {"rows": ((1, 70), (3, 20)), "heads": 70, "value": 40, "rank": 24},
    {"rows": ((1, 700), (1, 690), (60, 90)), "deterministic": True, "padding": 1},
    {"rows": ((90, 200), (1, 65)), "heads": 2, "nope": 24, "rank": 40},
    # Planned for a GPU: rows that are expanded before, between and behind others; only such a row.
    {"rows": ((90, 200), (1, 300), (2, 2), (40, 40), (0, 3)), "expands": True, "padding": 2},
    {"rows": ((200, 330),), "heads": 3, "value": 24, "expands": True, "strided": True},
    # Sizes that are no powers of 2 in every part, in a chunk beside rows that decode.
    {
        "rows": ((1, 33), (1, 45), (36, 56), (10, 10)),
        "nope": 24,
        "rope": 16,
        "rank": 48,
        "value": 24,
        "expands": True,
    },
]
# Whole vectors of bfloat16, with as many heads as lanes of 4, 8 and 16 query rows hold, and more.
_VECTORS: list[Case] = [
    {"rows": ((1, 700), (2, 130), (1, 1)), "heads": 3, "rope": 32, "rank": 64, "nope": 32},
    {"rows": ((1, 515), (1, 40)), "heads": 6, "rope": 32, "rank": 32, "block_size": 8},
    {"rows": ((1, 1100), (3, 259)), "heads": 20, "rope": 32, "rank": 96, "padding": 2},
    {"rows": ((1, 1100), (3, 259)), "heads": 5, "rope": 64, "rank": 96, "deterministic": True},
    {"rows": ((130, 400),), "heads": 4, "rope": 32, "rank": 64, "deterministic": True},
]
_CASES: list[Case] = [
    *({"dtype": torch.bfloat16, **shape} for shape in _VECTORS),
    *({"dtype": dtype, **shape} for dtype in _DTYPES for shape in _SHAPES),
    {"rows": ()},
    {"rows": ((0, 0), (0, 3)), "padding": 2},
    {
        "rows": ((1, 530), (70, 150), (130, 150)),
        "heads": 2,
        "nope": 128,
        "rope": 64,
        "rank": 512,
        "value": 128,
        "dtype": torch.bfloat16,
        "expands": True,
    },
]

LATENT_ATTENTION = Op(
    "latent_attention",
    LatentAttention,
    reference=reference,
    build=_build,
    cases=_CASES,
    cost=_cost,
    lazy={"cuda": "src.ops.attention.latent_attention_triton:run"},
)

latent_attention = LATENT_ATTENTION.function
"""The op as a function of its record's fields: of `LatentAttention`."""
