"""Translates a model's program for the kernel library's interpreter, where that supports it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from src.compile import LoadedFunction
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers import MIXERS
from src.models import Call, Model
from src.models.model import Variant
from src.models.program import HIDDEN, Program
from src.ops.runtime.compiled import Bound
from src.ops.runtime.step import StepInstruction, StepMixer, StepProgram, takes_program


def compiled_program(
    model: Model, variant: Variant, functions: Sequence[LoadedFunction], cache: KVCache
) -> StepProgram | None:
    """A variant with compiled functions; ``None`` if the interpreter does not support it.

    All mixers write into one buffer, so each output has to be read before the next mixer.
    """
    program, bound = variant.program, variant.bound
    if not _is_known(program):
        return None
    mixers = [
        MIXERS[mixer.kind].lower(mixer, weights, cache)
        for mixer, weights in zip(model.mixers, model.mixer_weights, strict=True)
    ]
    if None in mixers:
        return None
    numbers = {tensor.name: number for number, tensor in enumerate(program.inputs)}
    instructions: list[StepInstruction] = []
    for index, step in enumerate(program.steps):
        computes: Bound | StepMixer | None
        if isinstance(step, Call):
            reads, writes = step.chain.reads, step.chain.writes
            computes = functions[step.slot].bind(
                step.chain, bound[step.slot], *(None for _ in reads)
            )
        else:
            reads, writes = step.reads, (step.writes.name,)
            computes = mixers[step.layer]
        assert computes is not None
        for name in writes:
            numbers.setdefault(name, len(numbers))
        instructions.append(
            StepInstruction(
                computes,
                [numbers[name] for name in reads],
                [numbers[name] for name in writes],
                frozenset(numbers[name] for name in program.dead[index]),
            )
        )
    head = program.head
    return StepProgram(
        instructions,
        numbers[HIDDEN],
        frozenset(numbers[name] for name in program.kept),
        functions[head.slot].bind(head.chain, bound[head.slot], None),
        model.spec.dtype,
        program.mixers[0].spec.deterministic,
        range(len(program.inputs) - len(program.own_inputs), len(program.inputs)),
    )


def _is_known(program: Program) -> bool:
    # The interpreter takes one integer for each token as an input of the model's own.
    if any(each.tensor.shape or each.tensor.dtype != torch.int64 for each in program.own_inputs):
        return False
    names = {tensor.name for tensor in program.inputs}
    most_reads = most_writes = 0
    left: str | None = None
    for index, step in enumerate(program.steps):
        if isinstance(step, Call):
            reads, writes = step.chain.reads, step.chain.writes
        else:
            if left is not None:
                return False
            reads, writes = step.reads, (step.writes.name,)
            left = step.writes.name
        names.update(writes)
        most_reads, most_writes = max(most_reads, len(reads)), max(most_writes, len(writes))
        if left in program.dead[index]:
            left = None
    return bool(program.mixers) and takes_program(len(names), most_reads, most_writes)
