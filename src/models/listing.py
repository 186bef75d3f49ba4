"""A model's program as text: what a reader checks a family by.

Each step stands with its function, its static arguments, the step tensors that it reads and writes
with their shapes, and its parameters with their shapes, encodings and names in a checkpoint. Layers
that differ in nothing but their number are printed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from src.models.model import Model
from src.models.program import Call, Mixer, StepTensor
from src.ops.matrix import Matrix, Tiling
from src.ops.projections.projection import Projection

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WIDTH = 118


def program_lines(model: Model) -> list[str]:
    """The lines of a model's program, at most 118 characters each where names allow it.

    Parameters
    ----------
    model
        May be on the meta device, see `outline_model`.
    """
    program = model.program
    lines = [f"{model.config.architecture}, {_dtype(model.spec.dtype)}"]
    lines.append("inputs: " + ", ".join(map(_tensor, program.inputs)))
    blocks: list[list[str]] = []
    for step in program.steps:
        blocks += [_mixer(model, step)] if isinstance(step, Mixer) else _links(model, step)
    lines += _without_repetitions(blocks)
    for block in _links(model, program.head):
        lines += block
    return lines


def _without_repetitions(blocks: Sequence[list[str]]) -> Iterator[str]:
    """The blocks' lines; a run of blocks that comes again is only counted."""
    patterns = [tuple(_NUMBER.sub("*", line) for line in block) for block in blocks]
    at = 0
    while at < len(blocks):
        length, times = _repetition(patterns, at)
        for block in blocks[at : at + length]:
            yield from block
        if times > 1:
            yield f"... and {times - 1} more of the same {length} step{'s' * (length > 1)}"
        at += length * times


def _repetition(patterns: Sequence[tuple[str, ...]], at: int) -> tuple[int, int]:
    """How many patterns from `at` on come again right behind themselves, and how often they come.

    Of several lengths, the one that covers most; (1, 1) if nothing comes again.
    """
    best = (1, 1)
    for length in range(1, (len(patterns) - at) // 2 + 1):
        first, times = patterns[at : at + length], 1
        while patterns[at + times * length : at + (times + 1) * length] == first:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _mixer(model: Model, mixer: Mixer) -> list[str]:
    return [
        f"[{mixer.kind}] {', '.join(mixer.reads)} -> {_tensor(mixer.writes)}",
        *_indented(_described(mixer.spec)),
        *_parameters(model, mixer.weights),
    ]


def _links(model: Model, call: Call) -> list[list[str]]:
    return [
        [
            f"{link.function.__name__}  {', '.join(link.reads)} -> {', '.join(link.writes)}",
            *_indented(_described(link.spec)),
            *_parameters(model, weights),
        ]
        for link, weights in zip(call.chain.links, call.weights, strict=True)
    ]


def _parameters(model: Model, weights: Any) -> list[str]:
    return [f"    {line}" for name in _names(weights) for line in _parameter(model, name)]


def _parameter(model: Model, name: str) -> Iterator[str]:
    owner = model.aliases.get(name, name) if name not in model.table else name
    weight = model.weights[name]
    parameter = model.table.get(owner)
    if parameter is None:
        yield f"{name} {list(getattr(weight, 'shape', ()))}, computed"
        return
    held = _dtype(weight.dtype) if isinstance(weight, Tensor) else _held(weight)
    yield f"{name} {list(parameter.shape)} {held}" + (f", is {owner}" * (owner != name))
    for placement in parameter.placements:
        if placement.tensor != name:
            where = "".join(str(list(_ends(each))) for each in placement.index)
            yield f"    {where}{' ' * bool(where)}{placement.tensor}"


def _held(weight: Projection | Matrix) -> str:
    """The encoding of a matrix, how its inputs are rounded, and the tensors that hold it."""
    matrix = weight.matrix if isinstance(weight, Projection) else weight
    parts = weight.tensors().items()
    tensors = ", ".join(f"{name} {list(each.shape)} {_dtype(each.dtype)}" for name, each in parts)
    tiles = f" in {matrix.tiling.value}" * (matrix.tiling is Tiling.TILES)
    rounding = weight.rounding if isinstance(weight, Projection) else None
    inputs = "" if rounding is None else f", inputs {rounding.number} per {rounding.scaled}"
    return f"{matrix.encoding}{tiles}{inputs} ({tensors})"


def _ends(index: int | slice) -> tuple[Any, ...]:
    return (index.start or 0, index.stop) if isinstance(index, slice) else (index,)


def _names(weights: Any) -> Iterator[str]:
    if isinstance(weights, str):
        yield weights
    elif isinstance(weights, tuple):
        for each in weights:
            yield from _names(each)


def _described(spec: Any) -> str:
    """A spec without the fields that are off."""
    if spec is None:
        return ""
    if isinstance(spec, Tensor):
        return f"tensor {list(spec.shape)}"
    if is_dataclass(spec) and not isinstance(spec, type):
        given = [(each.name, getattr(spec, each.name)) for each in fields(spec)]
    elif isinstance(spec, tuple) and hasattr(spec, "_fields"):
        given = list(zip(spec._fields, spec, strict=True))
    elif isinstance(spec, tuple):
        return "(" + ", ".join(map(_described, spec)) + ")"
    else:
        return _dtype(spec) if isinstance(spec, torch.dtype) else str(spec)
    said = [f"{name}={_described(value)}" for name, value in given if value not in (None, False)]
    return f"{type(spec).__name__}({', '.join(said)})"


def _indented(text: str) -> Iterator[str]:
    """A text cut at commas into lines of a bounded length."""
    line = ""
    for part in re.split(r"(?<=,) ", text) if text else ():
        if line and len(line) + 1 + len(part) > _WIDTH - 4:
            yield f"    {line}"
            line = part
        else:
            line = f"{line} {part}" if line else part
    if line:
        yield f"    {line}"


def _tensor(step: StepTensor) -> str:
    return f"{step.name} [{', '.join(['T', *map(str, step.shape)])}] {_dtype(step.dtype)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
