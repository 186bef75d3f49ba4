"""Block arithmetic for KV memory, which both halves of the engine need."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks for the KV of ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


def blocks_held(num_tokens: int, block_size: int, window: int | None) -> int:
    """The most blocks that a row needs at a time to compute ``num_tokens`` tokens one by one.

    A query sees ``window`` tokens, itself included; ``None`` is all. The window need not begin at a
    block's start.
    """
    blocks = blocks_for(num_tokens, block_size)
    return blocks if window is None else min(blocks, blocks_for(window - 1, block_size) + 1)
