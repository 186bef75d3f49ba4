"""Every family of the registry as a test's parameter, and what makes its windows short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.checkpoints import CLASSES

# What gives a tiny model a window that is shorter than a test's prompts, where its family has one.
_WINDOW = {"sliding_window": 8}
_SWITCHED = {"use_sliding_window": True, **_WINDOW}
_OWN: dict[str, dict[str, Any]] = {
    # So low that scores reach it.
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3": _WINDOW,
    "mistral": _WINDOW,
    "mixtral": _WINDOW,
    "qwen2": {**_SWITCHED, "max_window_layers": 1},
    "qwen3": {**_SWITCHED, "max_window_layers": 1},
    "qwen3_moe": _SWITCHED,
}
SHORT_SIGHTED = {name: _OWN.get(name, {}) for name in CLASSES}
_MARKS = {
    "gemma2": pytest.mark.xfail(
        strict=True, raises=AssertionError, reason="attention has no soft cap yet"
    )
}


def families(*, unmarked: Sequence[str] = tuple(CLASSES), mark: Any = None) -> list[Any]:
    """A parameter for each family; those that are not ``unmarked`` have the mark as well."""
    return [
        pytest.param(
            name,
            marks=[
                *([_MARKS[name]] if name in _MARKS else []),
                *([] if name in unmarked else [mark]),
            ],
        )
        for name in CLASSES
    ]


FAMILIES = families()
