"""What a mask of transformers lets a token see, found by asking its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from src.core.errors import ModelLoadError
from src.ops.attention.spec import ALL_AHEAD

_FAR = 1 << 20


class Reach(NamedTuple):
    """What a token sees besides itself: all before it, or less, and perhaps later ones.

    Attributes
    ----------
    window
        The last so many tokens, itself included.
    chunk
        The tokens of its own chunk, which are so many, counted from the sequence's first.
    ahead
        The next so many tokens; None: none.
    """

    window: int | None = None
    chunk: int | None = None
    ahead: int | None = None


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
        It is none of these: causal attention, that of all tokens, that within a window of one side
        or two, or within chunks.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)

    def visible(query: int, key: int) -> bool:
        return bool(sees(zero, zero, zero + query, zero + key))

    try:
        if not visible(5, 5) or not visible(0, 0):
            raise ModelLoadError("a mask hides tokens from themselves")
        if visible(5, 6) != visible(0, 1):
            raise ModelLoadError("a mask hides later tokens by a rule of its own")
        looks_ahead = visible(5, 6)
        if local_size is None:
            if not (visible(_FAR, 0) and visible(5, 0) and visible(_FAR, _FAR // 2)):
                raise ModelLoadError("a mask hides earlier tokens by a rule of its own")
            if not looks_ahead:
                return Reach()
            if visible(0, _FAR) and visible(5, 7) and visible(_FAR // 2, _FAR):
                return Reach(ahead=ALL_AHEAD)
            raise ModelLoadError("a mask hides later tokens by a rule of its own")
        last = local_size + 3
        end = 2 * last if looks_ahead else last + 1
        seen = _all_visible(sees, zero, last, end)
        if seen is None:
            seen = [key for key in range(end) if visible(last, key)]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"a mask is made by a rule of its own ({error})") from error
    if looks_ahead:
        is_whole = bool(seen) and seen == list(range(seen[0], seen[-1] + 1))
        if is_whole and seen[0] > 0 and seen[-1] < end - 1:
            return Reach(window=last - seen[0] + 1, ahead=seen[-1] - last)
    elif seen == list(range(4, last + 1)):
        return Reach(window=local_size)
    elif seen == list(range(local_size, last + 1)):
        return Reach(chunk=local_size)
    raise ModelLoadError("a mask is neither a window nor chunks")


def _all_visible(
    sees: Callable[..., Any], zero: torch.Tensor, last: int, end: int
) -> list[int] | None:
    """The keys before ``end`` that the token ``last`` sees.

    None if the function takes one pair at a time.
    """
    keys = torch.arange(end, device=zero.device).view(1, 1, 1, -1)
    try:
        visible = torch.as_tensor(sees(zero, zero, zero + last, keys), dtype=torch.bool)
        flags = torch.broadcast_to(visible, keys.shape).flatten()
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    found: list[int] = flags.nonzero().flatten().tolist()
    return found
