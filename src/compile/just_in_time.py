"""Compiles pure functions on tensors at their first call, with one symbolic token dimension.

A dense decoder is cut at its attention calls into functions that take their weights as arguments.
So each function is compiled once for all layers, and no graph surgery is needed to split at the
attention op. The token dimension is one symbol, up to the largest number of tokens of a step: sizes
1 and 2 get no graphs of their own (`backed_size_oblivious`), and code that holds for some sizes
only is an error. (A function must not ask whether there are any tokens: sizes count as positive.)
Torch's *unbacked* dimensions promise the same, but with them Inductor fuses nothing into a
reduction and uses 64-bit indices: each norm became two or three kernels.

After the first call, dynamo is bypassed. It would check every argument's guards in every call, and
would recompile when one fails, in the middle of a request's step.
`torch.compiler.set_stance("fail_on_recompile")` would forbid that, but for the whole process, which
other users may compile in. So later calls run the code object of the first call directly.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.decorators import mark_dynamic
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from src.compile.ahead import CompilationError
from src.compile.job import flatten, is_tensor, repeats, without_data
from src.compile.unfuse_addmm import UnfuseAddmm

_OPTIONS: Mapping[str, Any] = {
    "post_grad_custom_post_pass": UnfuseAddmm(),
    # It would time padded products for the largest number of tokens; then every step would copy
    # a matrix of odd size.
    "shape_padding": False,
}

# One candidate for each kernel: of loops, and of reductions.
_UNTIMED: Mapping[str, Any] = {"triton.autotune_pointwise": False, "deterministic": True}


class CompiledFunction:
    """``function`` compiled by Inductor, with dimension 0 of ``token_arguments`` symbolic.

    The first call compiles, so it must be a warm-up call. From then on the code serves up to
    ``most_tokens`` tokens, and no call compiles anything. It keeps the weights of its calls alive.
    One thread at a time may call it.

    Parameters
    ----------
    times
        Whether the first call may time a kernel's candidates on the device. What else runs there
        would disturb that, and the choice is kept for later starts; otherwise a rule chooses.

    Raises
    ------
    ValueError
        In a call with more than ``most_tokens`` tokens, or whose arguments differ from those of the
        first call in more than the number of tokens and the values of tensors. Arguments that are
        the same tensor must be so in every call, and none of them may count tokens.
    CompilationError
        In the first call, if ``torch.compile`` is disabled, or its code does not hold for every
        number of tokens.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        token_arguments: Sequence[int],
        most_tokens: int,
        *,
        times: bool = True,
    ) -> None:
        self._times = times
        self._function = function
        self._token_arguments = tuple(token_arguments)
        self._most_tokens = most_tokens
        self._code: types.FunctionType | None = None
        self._token_kinds: list[tuple[Any, ...]] = []
        # Positions of the arguments that do not count tokens; set by the first call.
        self._positions: list[int] = []
        self._fixed: Any = None
        # Keyed by the ids of the other arguments; these are kept alive so that ids stay unique.
        self._known: dict[tuple[int, ...], list[Any]] = {}

    @property
    def artifact(self) -> types.CodeType | None:
        """The compiled code; None before the first call."""
        return None if self._code is None else self._code.__code__

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled code; the first call compiles it."""
        given = list(arguments)
        for index in self._token_arguments:
            if not given[index].is_contiguous():
                given[index] = given[index].contiguous()
        if self._code is None:
            return self._compile(given)
        self._check(given)
        return self._code(*given)

    def _compile(self, arguments: list[Any]) -> Any:
        tensors = list(flatten(tuple(arguments), is_tensor))
        tokens = [arguments[index] for index in self._token_arguments]
        if any(sum(each is other for other in tensors) > 1 for each in tokens):
            # The compiled code would treat the two as one tensor in every later call.
            raise ValueError("two arguments are the same tensor")
        own = _own_copy(self._function)
        most = self._most_tokens
        for index in self._token_arguments:
            # Where the compiler chooses by the number of tokens, it assumes the largest: 32-bit
            # indices if they suffice for that, and no row split between programs.
            mark_dynamic(arguments[index], 0, hint_override=most, min=0, max=most)
        inductor = _Inductor(times=self._times)
        compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=inductor)
        try:
            # In torch 2.11 the setting is process-wide, so only one thread compiles at a time.
            with compile_lock, shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                result = compiled(*arguments)
        except ConstraintViolationError as error:
            raise CompilationError(_dependent(arguments, own, str(error))) from error
        graphs = _debug_get_cache_entry_list(own.__code__)
        if len(graphs) != 1:
            # It ran eagerly, because the compiler is disabled in this process.
            raise CompilationError(f"torch.compile made no graph of {own.__name__}")
        if not inductor.holds_for(most):
            raise CompilationError(_dependent(arguments, own, inductor.asked()))
        self._token_kinds = [_kind(arguments[index]) for index in self._token_arguments]
        self._positions = [i for i in range(len(arguments)) if i not in self._token_arguments]
        self._fixed = _description([arguments[position] for position in self._positions])
        self._code = _own_copy(own, graphs[0].code)
        return result

    def _check(self, arguments: list[Any]) -> None:
        counts = {len(arguments[index]) for index in self._token_arguments}
        if len(counts) > 1 or max(counts) > self._most_tokens:
            raise ValueError(f"compiled for {self._most_tokens} tokens, got {sorted(counts)}")
        for index, kind in zip(self._token_arguments, self._token_kinds, strict=True):
            if _kind(arguments[index]) != kind:
                raise ValueError(f"compiled for tokens of {kind}, got {_kind(arguments[index])}")
        others = [arguments[position] for position in self._positions]
        key = tuple(map(id, others))
        if key not in self._known:
            if _description(others) != self._fixed:
                raise ValueError(f"compiled for {self._fixed}, got {_description(others)}")
            self._known[key] = others


class _Inductor:
    """A backend for one compilation that records for which sizes the code is valid."""

    def __init__(self, *, times: bool) -> None:
        self._times = times
        self._shapes: Any = None

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        mode = detect_fake_mode(examples)
        assert mode is not None
        assert mode.shape_env is not None
        self._shapes = mode.shape_env
        options = dict(_OPTIONS)
        if not self._times:
            options |= _UNTIMED
        return compile_fx(graph, examples, config_patches=options)

    def holds_for(self, most_tokens: int) -> bool:
        """Whether the range of every symbol is unchanged; torch reports no new bound below 2."""
        return all(
            span.lower <= 0 and span.upper >= most_tokens
            for span in self._shapes.var_to_range.values()
        )

    def asked(self) -> str:
        """What the compiler asked of the sizes, and where."""
        asked = {f"{guard.expr} {guard.sloc}" for guard in self._shapes.guards}
        return "; ".join(sorted(asked)) or f"sizes are {self._shapes.var_to_range}"


def _dependent(arguments: list[Any], function: types.FunctionType, why: str) -> str:
    """The message: which function it is, by its links if it is a chain, and what was asked."""
    links = getattr(arguments[0], "functions", ())
    name = " ".join([function.__name__, *(link.__name__ for link in links)])
    return f"{name} depends on the number of tokens: {why}"


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What code depends on in a contiguous tensor whose dimension 0 is free."""
    return tensor.dtype, tensor.device, *tensor.shape[1:]


def _description(arguments: list[Any]) -> tuple[Any, ...]:
    """What code depends on in the arguments that do not count tokens."""
    tensors = tuple(flatten(tuple(arguments), is_tensor))
    # Code reads a tensor that comes twice from one of its places.
    return without_data(tuple(arguments)), [each.device for each in tensors], repeats(tensors)


def _own_copy(
    function: Callable[..., Any], code: types.CodeType | None = None
) -> types.FunctionType:
    """The same function with ``code``, or with a copy of its own code.

    Dynamo stores and counts its compilations per code object. With copies, models that come and go
    in one process do not use up each other's recompilation limit.
    """
    code = code or function.__code__.replace()
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
