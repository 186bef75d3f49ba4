"""Asserts that kernels of drafts do what their references do."""

from collections.abc import Callable
from typing import Any

import torch

from src.ops import Op


def accepted_alike(op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The same tokens, lengths and counts, of arguments of their own."""
    expected, got = (tuple(each.clone() for each in args) for _ in range(2))
    op.reference(*expected)
    kernel(*got)
    for name, ours, theirs in zip(op.record.fields, got, expected, strict=True):
        assert torch.equal(ours, theirs), name
