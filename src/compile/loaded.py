"""A function that was compiled ahead of time, called like the original function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from src.compile.artifacts import Artifact
from src.compile.job import Job, TensorMeta, flatten, is_meta, is_tensor, resolve, without_data
from src.ops.runtime.compiled import Bound, Caller, CompiledCode


class LoadedFunction:
    """``job``'s function, loaded from ``artifact``; needs no compiler, and never runs one.

    It keeps the weights of its calls alive. One thread at a time may call it.

    Attributes
    ----------
    artifact
        The compiler's output.

    Raises
    ------
    CompiledCodeError
        The artifact cannot be loaded.
    """

    def __init__(self, job: Job, artifact: Artifact, caller: Caller) -> None:
        self.artifact = artifact
        metas = []
        for position, argument in enumerate(job.arguments):
            for meta in flatten(argument, is_meta):
                is_weight = position not in job.token_arguments
                metas.append(None if is_weight else (meta.shape, meta.dtype))
        self._job = job
        self._caller = caller
        self._code = CompiledCode(caller, artifact.shared_object, metas, artifact.has_own_tensors)
        self._result = None if artifact.result is None else resolve(artifact.result)
        self._fixed = [i for i in range(len(job.arguments)) if i not in job.token_arguments]
        # Keyed by the ids of the other arguments; these are kept alive so that ids stay unique.
        self._bound: dict[tuple[int, ...], tuple[Bound, list[Any]]] = {}

    def bind(self, *arguments: Any) -> Bound:
        """Bind the weights among arguments of a call; the token arguments are ignored.

        Raises
        ------
        ValueError
            An argument is none that the code was compiled for: a tensor has another shape, layout
            or dtype, or a constant of the code, such as the encoding of a matrix, another value.
        """
        fixed = [arguments[position] for position in self._fixed]
        key = tuple(map(id, fixed))
        if key not in self._bound:
            inputs: list[Tensor | None] = []
            for position, (argument, meta) in enumerate(
                zip(arguments, self._job.arguments, strict=True)
            ):
                if position in self._job.token_arguments:
                    inputs.append(None)
                    continue
                _require_same(without_data((argument,))[0], meta, f"argument {position}")
                inputs += flatten(argument, is_tensor)
            bound = self._caller.bind(self._code, inputs)
            self._bound[key] = bound, fixed
        return self._bound[key][0]

    def __call__(self, *arguments: Any) -> Any:
        """Call it with arguments like the job's."""
        tokens = [arguments[position] for position in self._job.token_arguments]
        results = self.bind(*arguments)(
            *[tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tokens]
        )
        if self._result is None:
            return results[0]
        return tuple(results) if self._result is tuple else self._result(*results)


def _require_same(given: Any, compiled_for: Any, place: str) -> None:
    """Refuse what differs, by the name of its place; tensors are given as their metadata."""
    # As in the key of a job: equal values of other types are other constants.
    if repr(given) == repr(compiled_for):
        return
    if type(given) is type(compiled_for) and isinstance(given, tuple) and not is_meta(given):
        fields = getattr(given, "_fields", range(len(given)))
        if len(given) == len(compiled_for):
            for field, one, other in zip(fields, given, compiled_for, strict=True):
                _require_same(one, other, f"{place}.{field}")
    raise ValueError(f"{place}: compiled for {_shown(compiled_for)}, got {_shown(given)}")


def _shown(value: Any) -> str:
    if isinstance(value, TensorMeta):
        return f"{value.dtype} {value.shape} with strides {value.stride}"
    return f"{type(value).__name__} {value}"
