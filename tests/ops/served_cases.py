"""Cases of the sizes at which models are really served, for a device alone.

bfloat16, 32 heads of 128 over 8 of keys, blocks of 64, decodes past 1,000 keys. Kernels choose
their way by these: how they find a block of keys, how many programs share a row, how many tiles
are on their way at once. A CPU needs seconds for one of them.
"""

from __future__ import annotations

from typing import Any

import torch

from src.ops import LATENT_ATTENTION, LINEAR, PAGED_ATTENTION, ROTATE_AND_CACHE, Op
from src.ops.attention.cached_rows import CODES
from src.ops.declaration import Case

_DTYPE: Case = {"dtype": torch.bfloat16}
_HEADS: Case = {
    **_DTYPE,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 64,
}
# Name -> (query_len, seq_len) of rows, and what else the case has.
_ATTENTION: dict[str, Case] = {
    "decodes": {"rows": ((1, 1), (1, 64), (1, 65), (1, 513), (1, 1024), (1, 1100))},
    "captured decodes": {
        "rows": ((1, 1100), (1, 70), (0, 0), (0, 0)),
        "padding": 2,
        "longest": 8192,
    },
    "common prefix": {
        "rows": ((1, 1100), (1, 1040), (1, 900), (7, 1000)),
        "prefixes": {1: (0, 16), 2: (0, 12), 3: (0, 8)},
    },
    "prompt": {"rows": ((300, 300),)},
    "later chunk": {"rows": ((200, 1100),)},
    "mixed": {"rows": ((1, 1100), (200, 200), (1, 700), (0, 5), (130, 900)), "padding": 3},
    "mixed, deterministic": {
        "rows": ((1, 1100), (200, 200), (1, 700), (130, 900)),
        "deterministic": True,
    },
    "window": {"rows": ((1, 1100), (200, 900)), "sliding_window": 512},
}
_WITHOUT_KEYS = ("decodes", "mixed")
# DeepSeek V2 Lite and V3: heads of 128 and 64 rotated numbers over latents of 512.
_LATENT: Case = {
    **_DTYPE,
    "nope": 128,
    "rope": 64,
    "rank": 512,
    "value": 128,
    "block_size": 64,
}
_LATENT_ROWS: dict[str, Case] = {
    "decodes": {"rows": ((1, 1), (1, 64), (1, 513), (1, 1100))},
    "mixed": {"rows": ((1, 1100), (200, 200), (2, 70), (130, 900)), "padding": 2},
    "mixed, expanded": {
        "rows": ((1, 1100), (200, 200), (2, 70), (130, 900)),
        "padding": 2,
        "expands": True,
    },
    "deterministic": {"rows": ((1, 1100), (40, 300)), "deterministic": True},
}
# (inputs, outputs) of projections of Llama 3.1 8B: queries, keys and values; down.
_PROJECTIONS = ((4096, 6144), (14_336, 4096))


def _cases() -> dict[str, tuple[Op, dict[str, Any]]]:
    caches: tuple[torch.dtype | None, ...] = (None, *CODES)
    found: dict[str, tuple[Op, Case]] = {}
    for dtype in caches:
        kept = "" if dtype is None else f", {dtype}"
        for name, rows in _ATTENTION.items():
            found[f"attention, {name}{kept}"] = (
                PAGED_ATTENTION,
                {**_HEADS, **rows, "cache_dtype": dtype},
            )
        for name in _WITHOUT_KEYS:
            found[f"attention of cached keys, {name}{kept}"] = (
                PAGED_ATTENTION,
                {**_HEADS, **_ATTENTION[name], "cache_dtype": dtype, "cached": True},
            )
        for tokens in (64, 300):
            found[f"rotation, {tokens}{kept}"] = (
                ROTATE_AND_CACHE,
                {**_HEADS, "tokens": tokens, "padding": 4, "has_norms": False}
                | {"cache_dtype": dtype},
            )
    for heads in (16, 128):
        for name, rows in _LATENT_ROWS.items():
            found[f"latent attention, {heads} heads, {name}"] = (
                LATENT_ATTENTION,
                {**_LATENT, **rows, "heads": heads},
            )
    for inputs, outputs in _PROJECTIONS:
        for weight in ("int8", "int4/64"):
            for tokens in (1, 300):
                found[f"linear, {weight}, {tokens} x {inputs} x {outputs}"] = (
                    LINEAR,
                    {**_DTYPE, "tokens": tokens, "inputs": inputs, "outputs": outputs}
                    | {"weight": weight},
                )
    return found


SERVED = _cases()
