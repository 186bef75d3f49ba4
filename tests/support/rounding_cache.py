"""A cache of transformers that rounds keys and values as `cache.dtype` does."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from src.ops.attention.cached_rows import from_rows, to_rows


class RoundingCache(DynamicCache):
    """Attention sees rounded keys and values only, those of the step itself included."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `transformers.Cache`; heads are [B, heads, T, head_dim]."""
        rounded = (
            from_rows(to_rows(x, self._dtype)).to(x.dtype) for x in (key_states, value_states)
        )
        keys, values = super().update(*rounded, *args, **kwargs)
        return keys, values


@torch.inference_mode()
def rounded_logits(model: Any, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits [T, V] of all tokens."""
    return _step(model, ids, RoundingCache(dtype))


@torch.inference_mode()
def rounded_greedy(model: Any, prompt: list[int], max_tokens: int, dtype: torch.dtype) -> list[int]:
    """The greedy continuation, over the model's end token."""
    cache, tokens = RoundingCache(dtype), list(prompt)
    found: list[int] = []
    for _ in range(max_tokens):
        tokens = [int(_step(model, tokens, cache)[-1].argmax())]
        found += tokens
    return found


def _step(model: Any, ids: list[int], cache: RoundingCache) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[
        0
    ]
    return logits
