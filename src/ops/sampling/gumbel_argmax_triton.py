# Kernel parameters have no Python types: what they are is decided at compile time.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Gumbel-max sampling for CUDA devices: one read of the logits in chunks, then a merge of these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from src.ops.launching_triton import ceil_div, launcher, next_power_of_2
from src.ops.sampling.gumbel_argmax import GumbelArgmax

GROUPS = 1024
"""Philox counters per program; each gives four tokens."""

GREEDY_BELOW = tl.constexpr(1e-5)
LARGEST = tl.constexpr(3.4e38)
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def _noise(word):
    """Gumbel noise of 32 random bits; see `gumbel_from_words` in philox.py."""
    w = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - w): as a series where 1 - w would lose w's low bits. Small w decides the argmax.
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * 0.2))))
    return -tl.log(tl.where(w < 0.015625, series, -tl.log(1.0 - w)))


@triton.jit
def _keep_better(best, token, logits, word, candidates, vocab_size, temperature):
    logit = tl.load(logits + candidates, mask=candidates < vocab_size, other=float("-inf"))
    score = logit
    if temperature >= GREEDY_BELOW:
        # Keep it finite for tiny temperatures, because +inf marks a failure below.
        score = tl.minimum(logit / temperature + _noise(word), LARGEST)
    # NaN or +inf logits become +inf: they win against all others, and the merge detects them.
    score = tl.where(logit < float("inf"), score, float("inf"))
    better = score > best
    return tl.where(better, score, best), tl.where(better, candidates, token)


# `positions` may be a slice of a step's inputs: its alignment must not select another variant.
@triton.jit(do_not_specialize=["positions"])
def _chunk_kernel(
    logits,  # [rows, vocab_size] float32, rows logits_stride apart
    seeds,  # [rows] int64
    positions,  # [rows] int64
    temperatures,  # [rows] float32
    chunk_scores,  # [rows, chunks] float32
    chunk_tokens,  # [rows, chunks] int64
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Best score of 4 * BLOCK tokens of one row, and the lowest token that has it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + row)
    group = chunk * BLOCK + tl.arange(0, BLOCK)  # v // 4
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox(
        seed.to(tl.uint64, bitcast=True),
        zero + (position & 0xFFFFFFFF).to(tl.uint32),
        zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32),
        group.to(tl.uint32),
        zero,
    )
    logits += row * logits_stride
    first = group * 4
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    token = first
    best, token = _keep_better(best, token, logits, word_0, first, vocab_size, temperature)
    best, token = _keep_better(best, token, logits, word_1, first + 1, vocab_size, temperature)
    best, token = _keep_better(best, token, logits, word_2, first + 2, vocab_size, temperature)
    best, token = _keep_better(best, token, logits, word_3, first + 3, vocab_size, temperature)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(chunk_scores + at, top)
    tl.store(chunk_tokens + at, tl.min(tl.where(best == top, token, 2147483647), 0).to(tl.int64))


_launch_chunk = launcher(_chunk_kernel)


@triton.jit
def _merge_kernel(chunk_scores, chunk_tokens, tokens, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    exists = chunk < chunks
    scores = tl.load(chunk_scores + row * chunks + chunk, mask=exists, other=float("-inf"))
    candidates = tl.load(chunk_tokens + row * chunks + chunk, mask=exists, other=2147483647)
    top = tl.max(scores, 0)
    best = tl.min(tl.where(scores == top, candidates, 2147483647), 0)
    is_sound = (top > float("-inf")) & (top < float("inf"))
    tl.store(tokens + row, tl.where(is_sound, best, NO_TOKEN))


_launch_merge = launcher(_merge_kernel)


@GumbelArgmax.taking_flat
def run(call: GumbelArgmax) -> Tensor:
    """Launch the kernels."""
    logits, seeds = call.logits, call.seeds
    positions, temperatures = call.positions, call.temperatures
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    chunks = ceil_div(vocab_size, 4 * GROUPS)
    scores = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    candidates = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    _launch_chunk(
        (rows, chunks),
        logits, seeds, positions, temperatures, scores, candidates, logits.stride(0), vocab_size,
        BLOCK=GROUPS, num_warps=4,
    )  # fmt: skip
    _launch_merge(
        (rows,),
        scores,
        candidates,
        tokens,
        chunks,
        BLOCK=next_power_of_2(chunks),
        num_warps=1,
    )
    return tokens
