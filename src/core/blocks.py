"""How many blocks of KV memory hold so many tokens: plain arithmetic that both halves need."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold the KV of ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


def blocks_held(num_tokens: int, block_size: int, window: int | None) -> int:
    """How many of these a row holds at a time at least, when it goes through them one by one.

    A query sees ``window`` tokens, itself included, of which the first need not begin a block;
    ``None`` sees all.
    """
    blocks = blocks_for(num_tokens, block_size)
    return blocks if window is None else min(blocks, blocks_for(window - 1, block_size) + 1)
