"""Block arithmetic for KV memory, which both halves of the engine need."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Chunk(msgspec.Struct, frozen=True):
    """A query sees the tokens of its own chunk of ``size``, counted from the sequence's first."""

    size: int


Window: TypeAlias = int | Chunk | None
"""What a query sees up to itself: the last so many tokens, those of its chunk, or all (None)."""


def most_seen(window: int | Chunk) -> int:
    """The most tokens that a query sees, itself included."""
    return window.size if isinstance(window, Chunk) else window


def first_seen(position: int, window: int | Chunk) -> int:
    """The first position that the query at ``position`` sees; later queries see no earlier one."""
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return max(0, position - window + 1)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks for the KV of ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


def blocks_held(num_tokens: int, block_size: int, window: Window) -> int:
    """The most blocks that a row needs at a time to compute ``num_tokens`` tokens one by one.

    A window, or a chunk, need not begin at a block's start.
    """
    blocks = blocks_for(num_tokens, block_size)
    if window is None:
        return blocks
    return min(blocks, blocks_for(most_seen(window) - 1, block_size) + 1)
