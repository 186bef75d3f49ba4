"""Stateless sampling: the token is the argmax of the scaled logits plus Gumbel noise.

The Gumbel-max trick samples exactly from softmax(logits / temperature) in one read of the logits,
without a softmax, a sort or a cumulative sum (C. Maddison, D. Tarlow, T. Minka, "A* Sampling",
NIPS 2014, section 2). The noise is a pure function of (seed, position, token), so a seeded request
draws the same tokens alone, in any batch and after preemption.
"""

from __future__ import annotations

import torch
from torch import Tensor

from src.ops.declaration import Cost, Op
from src.ops.records import Record, result, tensor
from src.ops.sampling.philox import gumbel_from_words, random_words

GREEDY_BELOW = 1e-5
"""Temperatures below this take the plain argmax."""

NO_TOKEN = -1
"""The result for a row whose logits allow no choice."""


class GumbelArgmax(Record, result=result("tokens", "rows", like="logits", dtype=torch.int64)):
    """Sample one token per row: `argmax_v(logits[v] / temperature + gumbel(seed, position, v))`.

    The noise comes from Philox4x32-10 with the seed as its 64-bit key, counter (position, v // 4)
    and word v % 4, see `random_words`. All implementations agree on the random bits exactly, and on
    the token except for ties within float rounding.

    Attributes
    ----------
    logits
        [S, V] float32, last dimension contiguous. -inf never wins.
    seeds
        [S] int64, all 64 bits count.
    positions
        [S] int64, position of the sampled token in its sequence.
    temperatures
        [S] float32. Below 1e-5 the row is greedy: the lowest index of its maximum.

    Returns
    -------
    [S] int64 token ids; -1 for a row that has a NaN or +inf, or only -inf. This check needs no
        extra read of the logits.
    """

    logits: Tensor = tensor("rows vocab_size", torch.float32, rows=True)
    seeds: Tensor = tensor("rows", torch.int64)
    positions: Tensor = tensor("rows", torch.int64)
    temperatures: Tensor = tensor("rows", torch.float32)


def reference(call: GumbelArgmax) -> Tensor:
    """See `GumbelArgmax`."""
    logits, seeds = call.logits, call.seeds
    positions, temperatures = call.positions, call.temperatures
    scores = logits.double()  # [S, V] float64
    sampled = temperatures >= GREEDY_BELOW  # [S] bool
    if bool(sampled.any()):
        rows = sampled.nonzero().squeeze(1)
        words = random_words(seeds[rows], positions[rows], logits.shape[1])
        scores[rows] = scores[rows] / temperatures[rows].double()[:, None] + gumbel_from_words(
            words
        )
    return scores.argmax(dim=1).masked_fill_(~sound_rows(logits), NO_TOKEN)


def sound_rows(logits: Tensor) -> Tensor:
    """Whether each row of `logits` [S, V] allows a choice: [S] bool.

    A NaN or +inf says that the model's arithmetic has gone wrong, so a token drawn from such a row
    means nothing. -inf marks masked tokens; it is an error only if the whole row is -inf.
    """
    # `amax` propagates NaN.
    return logits.amax(dim=1).isfinite()


def _build(
    device: str,
    *,
    rows: int,
    vocab_size: int,
    temperature: float | None = None,
    spread: float = 3.0,
    seed: int = 0,
) -> GumbelArgmax:
    """Random logits; `temperature=None` alternates greedy and sampled rows."""
    random = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(rows)[:rows]
    if temperature is not None:
        temperatures = torch.full((rows,), temperature)
    int64 = torch.iinfo(torch.int64)
    return GumbelArgmax(
        logits=(torch.randn(rows, vocab_size, generator=random) * spread).to(device),
        seeds=torch.randint(int64.min, int64.max, (rows,), generator=random).to(device),
        positions=torch.randint(0, 1 << 40, (rows,), generator=random).to(device),
        temperatures=temperatures.to(device),
    )


def _cost(call: GumbelArgmax) -> Cost:
    # One division and one addition per token; Philox is integer work.
    size = call.logits.numel()
    return Cost(bytes=size * 4 + call.logits.shape[0] * 28, flops=2 * size)


GUMBEL_ARGMAX = Op(
    "gumbel_argmax",
    GumbelArgmax,
    reference=reference,
    build=_build,
    cases=[
        {"rows": rows, "vocab_size": vocab_size, "spread": spread, "seed": rows + vocab_size}
        for rows, vocab_size in [(1, 1), (4, 3), (4, 4), (5, 257), (8, 1000), (3, 32000)]
        for spread in (0.1, 3.0, 30.0)
    ],
    cost=_cost,
    lazy={"cuda": "src.ops.sampling.gumbel_argmax_triton:run"},
)

gumbel_argmax = GUMBEL_ARGMAX.function
"""The op as a function of the fields of `GumbelArgmax`."""
