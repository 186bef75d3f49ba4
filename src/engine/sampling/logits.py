"""Changes of logits before truncation and sampling, all in place.

Tokens have flat indices, ``entry * V + token``, in the contiguous logits [S, V] of a batch. So one
indexing operation serves all rows that ask for a change, and no other row is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# The logit of a banned token. It is always below tokens that are not banned, but above tokens
# outside of allowed_token_ids (-inf), so that these are never chosen.
BANNED = -1e30

# Penalized logits are clamped to this size, so that they stay above banned tokens, and above the
# -inf of tokens that may never be chosen. It is the largest float32 below 1e30, and no temperature
# makes it infinite.
_LARGEST = 9.9999994e29

# Penalties use temporaries of at most this many elements at a time.
_MAX_PENALTY_ELEMENTS = 1 << 26


def keep_only(logits: Tensor, entries: Tensor, targets: Tensor) -> None:
    """Set ``entries`` [n] int64 of the batch to -inf, except the flat ``targets`` [m] int64."""
    flat = logits.view(-1)
    kept = flat[targets]
    # Not ``logits[entries] = -inf``: on CUDA that copies the number from the host, and waits.
    logits.index_fill_(0, entries, -torch.inf)
    flat[targets] = kept


def ban(logits: Tensor, targets: Tensor) -> None:
    """Ban the flat ``targets`` [m] int64, which may repeat."""
    flat = logits.view(-1)
    flat[targets] = flat[targets].clamp(max=BANNED)


def add_bias(logits: Tensor, targets: Tensor, values: Tensor) -> None:
    """Add ``values`` [m] float32 to the flat ``targets`` [m] int64, which must be distinct."""
    flat = logits.view(-1)
    flat[targets] = flat[targets] + values


class BadWords(NamedTuple):
    """Bad words of two tokens or more, w of them, of one request.

    Attributes
    ----------
    prefixes
        [w, P] int32: the tokens before the last, right-aligned, -1 on the left.
    last
        [w] int64.
    """

    prefixes: Tensor
    last: Tensor


@dataclass(frozen=True)
class BadSequences:
    """Bad words of two tokens or more: W sequences of n rows.

    Attributes
    ----------
    prefixes
        [W, P] int32: the tokens before the last, right-aligned, -1 on the left.
    is_padding
        [W, P] bool: where ``prefixes`` is -1.
    targets
        [W] int64: the last token, as a flat index.
    owners
        [W] int64: index of the sequence's row among the n.
    rows, entries, prompt_lens
        [n] int64: the row, its entry in the batch, the length of its prompt.
    """

    prefixes: Tensor
    is_padding: Tensor
    targets: Tensor
    owners: Tensor
    rows: Tensor
    entries: Tensor
    prompt_lens: Tensor


# Not a token id, and not the padding of prefixes.
_OUTSIDE = -2


def ban_completions(logits: Tensor, bad: BadSequences, positions: Tensor, tokens: Tensor) -> None:
    """Ban the last token of every bad sequence whose other tokens are the end of the output.

    Parameters
    ----------
    positions
        [S] int64: position of the token to be sampled.
    tokens
        [max_num_rows, max_model_len] int32: (row, position) -> token id.
    """
    length = bad.prefixes.shape[1]
    offsets = torch.arange(-length, 0, device=logits.device)  # [P]
    columns = positions[bad.entries][:, None] + offsets  # [n, P]
    # Computed once per row, because there may be a hundred times as many words.
    tails = tokens[bad.rows[:, None], columns.clamp(min=0)]
    tails = tails.masked_fill_(columns < bad.prompt_lens[:, None], _OUTSIDE)
    equal = tails[bad.owners] == bad.prefixes
    complete = equal.logical_or_(bad.is_padding).all(1)  # [W]
    ceilings = torch.where(complete, BANNED, torch.inf)  # [W] float32
    # A minimum, since several sequences may share their last token.
    logits.view(-1).scatter_reduce_(0, bad.targets, ceilings, "amin")


@dataclass(frozen=True)
class Penalties:
    """Rows with a penalty, n of them.

    Attributes
    ----------
    entries, rows, prompt_lens
        [n] int64: entry in the batch, row, prompt length.
    presence, frequency, repetition
        [n, 1] float32.
    counts_output
        Whether any row has a presence or frequency penalty.
    """

    entries: Tensor
    rows: Tensor
    prompt_lens: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    counts_output: bool


def penalize(
    logits: Tensor, penalties: Penalties, positions: Tensor, tokens: Tensor, max_position: int
) -> None:
    """Apply repetition, frequency and presence penalties.

    Nothing is kept between steps: the tokens are counted in the row's token buffer. So a reused
    row, a resumed request or a step launched ahead never sees stale counts.

    Repetition (N. Keskar et al., "CTRL", 2019, section 4.1, in its sign-aware form) concerns tokens
    in prompt or output, presence and frequency those in the output.

    Parameters
    ----------
    positions
        [S] int64: position of the token to be sampled.
    tokens
        [max_num_rows, max_model_len] int32: (row, position) -> token id, valid below ``positions``.
    max_position
        The largest position of these rows, at least 1.
    """
    elements = max_position + (logits.shape[1] if penalties.counts_output else 0)
    step = max(1, _MAX_PENALTY_ELEMENTS // elements)
    for start in range(0, len(penalties.entries), step):
        _penalize(
            logits, penalties, slice(start, start + step), positions, tokens[:, :max_position]
        )


def _penalize(
    logits: Tensor, penalties: Penalties, part: slice, positions: Tensor, tokens: Tensor
) -> None:
    entries = penalties.entries[part]
    index = torch.arange(tokens.shape[1], device=logits.device)  # [L]
    known = index < positions[entries][:, None]  # [n, L]
    ids = tokens.index_select(0, penalties.rows[part]).long()
    # Places beyond the row's tokens repeat its first one. A token's new logit depends on the token
    # alone, so repeated writes agree.
    ids = torch.where(known, ids, ids[:, :1])  # [n, L] int64
    targets = entries[:, None] * logits.shape[1] + ids
    flat = logits.view(-1)
    before = flat[targets]  # [n, L]
    repetition = penalties.repetition[part]
    values = torch.where(before > 0, before / repetition, before * repetition)
    values.clamp_(-_LARGEST, _LARGEST)
    if penalties.counts_output:
        is_output = known & (index >= penalties.prompt_lens[part][:, None])
        counts = torch.zeros(len(ids), logits.shape[1], device=logits.device)  # [n, V] float32
        counts.scatter_add_(1, ids, is_output.float())
        count = counts.gather(1, ids)  # [n, L]
        values -= penalties.frequency[part] * count
        values -= penalties.presence[part] * (count > 0)
    # Banned tokens keep their logit, because a small penalty would raise it.
    flat[targets] = torch.where(before > BANNED, values, before)
