"""Every family of the registry as a test parameter, with the settings for short windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.checkpoints import CLASSES

# Gives a tiny model a window shorter than the tests' prompts, if its family has windows.
_WINDOW = {"sliding_window": 8}
_SWITCHED = {"use_sliding_window": True, **_WINDOW}
_OWN: dict[str, dict[str, Any]] = {
    # Low enough that scores reach the cap.
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3": _WINDOW,
    "cohere2": _WINDOW,
    "exaone4": _WINDOW,
    "olmo3": _WINDOW,
    "smollm3": _SWITCHED,
    "qwen2_moe": _SWITCHED,
    "cohere": {"use_qk_norm": True},
    "glm4_moe": {"use_qk_norm": True},
    "llama4": {"attention_chunk_size": 8, "floor_scale": 4},
    # Low enough that gates and ups reach it.
    "gpt_oss": {**_WINDOW, "swiglu_limit": 0.5},
    "mistral": _WINDOW,
    "mixtral": _WINDOW,
    # Also with a part of each head that is not rotated.
    "phi3": {
        "sliding_window": 20,
        "rope": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen2": {**_SWITCHED, "max_window_layers": 1},
    "qwen3": {**_SWITCHED, "max_window_layers": 1},
    "qwen3_moe": _SWITCHED,
}
# Families whose layers have a form of their own; the others are made of the same parts.
QUICK = (
    *(
        "cohere2",
        "gemma2",
        "gemma3",
        "glm4_moe",
        "gpt_oss",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
    ),
    *("lfm2", "qwen2", "qwen3", "qwen3_moe"),
)
SHORT_SIGHTED = {name: _OWN.get(name, {}) for name in CLASSES}


def families(*, unmarked: Sequence[str], mark: Any) -> list[Any]:
    """A parameter for each family; those not in ``unmarked`` get the mark."""
    return [
        pytest.param(name, marks=() if name in unmarked else mark, id=name)
        for name in SHORT_SIGHTED
    ]
