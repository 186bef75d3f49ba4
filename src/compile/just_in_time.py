"""Compiles pure functions on tensors at their first call, with one symbolic token dimension.

A dense decoder is three distinct functions around its attention calls. Weights are their arguments,
so each is captured once however many layers there are, and the attention op is the split point
without any graph surgery. The token dimension is *unbacked*: torch may assume nothing about it, so
sizes 0, 1 and 2 get no graphs of their own and no later size recompiles.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.decorators import mark_unbacked


class CompiledFunction:
    """``function`` compiled by Inductor, with dimension 0 of ``token_arguments`` symbolic.

    Compilation happens in the first call, which must therefore be a warm-up call. The code serves
    any number of tokens from then on.
    """

    def __init__(self, function: Callable[..., Any], token_arguments: Sequence[int]) -> None:
        own = _own_copy(function)
        self._code = own.__code__
        self._compiled = torch.compile(own, fullgraph=True, dynamic=False)
        self._token_arguments = tuple(token_arguments)
        self._captured = False

    @property
    def num_graphs(self) -> int:
        """Graphs that the compiler made of it; over 1, it was compiled again."""
        return len(_debug_get_cache_entry_list(self._code))

    def __call__(self, *arguments: Any) -> Any:
        if not self._captured:
            for index in self._token_arguments:
                tensor: Tensor = arguments[index]
                mark_unbacked(tensor, 0)
            result = self._compiled(*arguments)
            self._captured = True
            return result
        return self._compiled(*arguments)


def _own_copy(function: Callable[..., Any]) -> types.FunctionType:
    """The same function with a code object of its own.

    Dynamo keeps what it compiled, and counts it, by code object: models that come and go in one
    process must not use up each other's limit.
    """
    code = function.__code__.replace()
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def compile_functions(
    functions: Sequence[Callable[..., Any]], token_arguments: Sequence[Sequence[int]]
) -> list[CompiledFunction]:
    """Wrap each function for compilation at its first call.

    Parameters
    ----------
    functions
        Pure functions on tensors; anything static among their arguments is hashable.
    token_arguments
        Per function, the positions of arguments whose dimension 0 counts tokens.
    """
    return [
        CompiledFunction(function, indices)
        for function, indices in zip(functions, token_arguments, strict=True)
    ]
