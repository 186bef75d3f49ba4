"""What a mask of transformers lets a token see, found by asking its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from src.core.errors import ModelLoadError

_FAR = 1 << 20


class Reach(NamedTuple):
    """What a token sees besides itself: all before it, or less.

    Attributes
    ----------
    window
        The last so many tokens, itself included.
    chunk
        The tokens of its own chunk, which are so many, counted from the sequence's first.
    """

    window: int | None = None
    chunk: int | None = None


def reach_of(sees: Callable[..., Any], local_size: int | None, device: torch.device) -> Reach:
    """What lies within reach by a mask function ``sees(batch, head, query, key)``.

    Parameters
    ----------
    sees
        Takes indices as tensors.
    local_size
        Of windows and chunks, as transformers tells it; None for neither.
    device
        Of the indices.

    Raises
    ------
    ModelLoadError
        It is neither causal attention, nor that within a window or chunks.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)

    def visible(query: int, key: int) -> bool:
        return bool(sees(zero, zero, zero + query, zero + key))

    try:
        if visible(5, 6) or visible(0, 1):
            raise ModelLoadError("its tokens attend to later ones: it is no decoder")
        if not visible(5, 5) or not visible(0, 0):
            raise ModelLoadError("a mask hides tokens from themselves")
        if local_size is None:
            if visible(_FAR, 0) and visible(5, 0) and visible(_FAR, _FAR // 2):
                return Reach()
            raise ModelLoadError("a mask hides earlier tokens by a rule of its own")
        last = local_size + 3
        seen = _all_visible(sees, zero, last)
        if seen is None:
            seen = [key for key in range(last + 1) if visible(last, key)]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"a mask is made by a rule of its own ({error})") from error
    if seen == list(range(4, last + 1)):
        return Reach(window=local_size)
    if seen == list(range(local_size, last + 1)):
        return Reach(chunk=local_size)
    raise ModelLoadError("a mask is neither a window nor chunks")


def _all_visible(sees: Callable[..., Any], zero: torch.Tensor, last: int) -> list[int] | None:
    """The keys that the token ``last`` sees; None if the function takes one pair at a time."""
    keys = torch.arange(last + 1, device=zero.device).view(1, 1, 1, -1)
    try:
        visible = torch.as_tensor(sees(zero, zero, zero + last, keys), dtype=torch.bool)
        flags = torch.broadcast_to(visible, keys.shape).flatten()
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    found: list[int] = flags.nonzero().flatten().tolist()
    return found
