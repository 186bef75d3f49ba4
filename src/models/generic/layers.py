"""Compiles the decoder layers of a model of transformers, once for all layers of a class.

Attention is the engine's, so it is left out: a layer becomes the code before it and the code behind
it. All is compiled at once, and nothing later: a request never waits for a compiler.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from src.models.generic.passes import leave_out_attention

logger = logging.getLogger(__name__)

# Numbers of tokens of the passes that compile. The second differs from the first, so that its code
# holds for every number but 1, for which torch has code of its own.
_TOKENS = (11, 13, 1)
_MOST_VARIANTS = 64


def compile_layers(
    module: nn.Module,
    attentions: Sequence[nn.Module],
    run_pass: Callable[[int], Tensor],
    tolerance: float,
    backend: str | Callable[..., Any] = "inductor",
) -> tuple[str, ...]:
    """Replace the layers' ``forward`` by compiled code.

    If the compiler fails, or its code computes something else, the layers stay as they are and the
    log says so.

    Parameters
    ----------
    module
        A model of transformers.
    attentions
        The modules that call attention. A layer is a member of a list that has one of them in it.
    run_pass
        Runs a pass over so many tokens, and returns its hidden states.
    tolerance
        By how much of their norm hidden states may differ.
    backend
        Of torch.compile.

    Returns
    -------
    tuple[str, ...]
        Names of the classes that are compiled.
    """
    wanted = [run_pass(count) for count in _TOKENS]
    layers = list(_layers(module, set(attentions)))
    try:
        with _compiling(layers, backend):
            found = [run_pass(count) for count in _TOKENS]
    except Exception as error:
        # Whatever a compiler may raise.
        logger.warning("layers go on uncompiled: %s: %s", type(error).__name__, error)
        _put_back(layers)
        return ()
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    if not max(errors) <= tolerance:
        logger.warning("layers go on uncompiled: compiled, they compute something else")
        _put_back(layers)
        return ()
    return tuple(dict.fromkeys(type(layer).__name__ for layer in layers))


@contextmanager
def _compiling(layers: Sequence[nn.Module], backend: str | Callable[..., Any]) -> Iterator[None]:
    """Within it, calls of the layers compile; behind it they use what was compiled."""
    from torch._dynamo.decorators import run

    leave_out_attention()
    # Layers of every class share wrappers of transformers, which torch counts as one function.
    limit = torch._dynamo.config.patch(recompile_limit=_MOST_VARIANTS)
    classes: dict[Any, None] = dict.fromkeys(map(type, layers))
    compiled = {
        kind: torch.compile(
            _own_copy(kind.forward),
            dynamic=True,
            backend=backend,
            options={"guard_filter_fn": _kept_guards},
        )
        for kind in classes
    }
    for layer in layers:
        layer.forward = functools.partial(compiled[type(layer)], layer)
    with limit:
        yield
    settled = {kind: run(code) for kind, code in compiled.items()}
    for layer in layers:
        layer.forward = functools.partial(settled[type(layer)], layer)


def _kept_guards(guards: Sequence[Any]) -> list[bool]:
    """All but the one of the process's state, which holds the number of threads of the compiler.

    Steps run on a thread with another number, and `run` would answer by uncompiled layers without a
    word. The rest of that state is the same wherever layers are called: the engine's.
    """
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def _put_back(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _layers(module: nn.Module, attentions: set[nn.Module]) -> Iterator[nn.Module]:
    """The outermost members of lists that call attention."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (one for one in child if not attentions.isdisjoint(one.modules()))
        else:
            yield from _layers(child, attentions)


def _own_copy(function: Callable[..., Any]) -> types.FunctionType:
    """A function with a code object of its own, by which torch counts what it compiles."""
    assert isinstance(function, types.FunctionType)
    copied = types.FunctionType(
        *(function.__code__.replace(), function.__globals__, function.__name__),
        *(function.__defaults__, function.__closure__),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
