"""The builder by which a family writes its program: parameters, segments and mixers in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from src.distributed import Group
from src.models.adapters.adapted import adapted_segments
from src.models.layers.rope import RopeConfig, rope_table
from src.models.program import (
    ADAPTER_SLOTS,
    INPUT_IDS,
    POSITIONS,
    Mixer,
    Program,
    Segment,
    StepInput,
    StepTensor,
)
from src.models.weights.parameters import Kind, Parameter, Placement

# Name of a parameter or a table (a string): the placeholder for its tensor in a segment's weights.
Name: TypeAlias = Any


@dataclass(kw_only=True)
class ProgramBuilder:
    """Collects a model's program, its parameters, and the tables that are computed for it.

    Attributes
    ----------
    max_positions
        Rows of RoPE tables: the longest possible sequence, in tokens.
    rotates_in_op
        Whether the device has a kernel by which mixers rotate queries and keys.
    taps
        Layers whose input is wanted beside the hidden states, in order; the number of layers stands
        for what leaves the last one.
    """

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    group: Group
    deterministic: bool
    rotates_in_op: bool
    taps: tuple[int, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    # Name of a table -> the function that computes it.
    buffers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    # Parameter -> the parameter whose values it shares.
    aliases: dict[str, str] = field(default_factory=dict)
    _segments: list[Segment | Mixer] = field(default_factory=list)
    _head: Segment | None = None
    _inputs: list[StepInput] = field(default_factory=list)
    _outputs: list[str] = field(default_factory=list)
    _num_mixers: int = 0

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        kind: Kind,
        placements: Sequence[Placement],
        *,
        fill: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Name:
        """Declare a parameter, by default in the model's dtype; returns its name."""
        if name in self.parameters:
            raise ValueError(f"there is a parameter {name} already")
        self.parameters[name] = Parameter(
            name, tuple(shape), kind, tuple(placements), fill, dtype or self.dtype
        )
        return name

    def vector(
        self, name: str, size: int, tensor: str, *, fill: float, shard: int | None = None
    ) -> Name:
        """Declare a norm or a bias [size] that one tensor of the checkpoint fills."""
        return self.parameter(name, (size,), "vector", (Placement(tensor, shard=shard),), fill=fill)

    def alias(self, name: str, of: str) -> Name:
        """Declare that ``name`` (a tied head) shares the values of ``of``; returns ``name``."""
        self.aliases[name] = of
        return name

    def rope_table(self, rope: RopeConfig, rotary_dim: int, trained_positions: int) -> Name:
        """Name of the cosine and sine table of a RoPE variant; layers share equal tables."""
        make = _Table(rope, rotary_dim, trained_positions, self.max_positions)
        for name, known in self.buffers.items():
            if known == make:
                return name
        name = f"rope.{len(self.buffers)}"
        self.buffers[name] = make
        return name

    def segment(
        self,
        function: Callable[..., Any],
        spec: Any,
        weights: Any,
        reads: Sequence[str],
        writes: Sequence[StepTensor],
    ) -> None:
        """Add a segment; see `program.Segment`."""
        self._segments.append(Segment(function, spec, weights, tuple(reads), tuple(writes)))

    def mixer(
        self, kind: str, spec: Any, weights: Any, reads: Sequence[str], writes: StepTensor
    ) -> None:
        """Add a mixer; see `program.Mixer`."""
        self._segments.append(Mixer(kind, self._num_mixers, spec, weights, tuple(reads), writes))
        self._num_mixers += 1

    def head(
        self,
        function: Callable[..., Any],
        spec: Any,
        weights: Any,
        reads: Sequence[str],
        writes: Sequence[StepTensor],
    ) -> None:
        """Set the head, the segment that turns hidden states into logits."""
        self._head = Segment(function, spec, weights, tuple(reads), tuple(writes))

    def step_tensor(self, name: str, *shape: int) -> StepTensor:
        """A step tensor in the model's dtype."""
        return StepTensor(name, shape, self.dtype)

    def step_input(self, given: StepInput) -> StepTensor:
        """Declare a step tensor that requests bring values of; see `program.StepInput`.

        Layers that declare the same one share it.
        """
        if given not in self._inputs:
            self._inputs.append(given)
        return given.tensor

    def output(self, name: str) -> None:
        """Declare that a step tensor is wanted beside the hidden states; one segment writes it."""
        self._outputs.append(name)

    def program(self, adapted: Collection[str] = ()) -> Program:
        """The finished program.

        Parameters
        ----------
        adapted
            Names of parameters with adapters beside them; such a program has one more input,
            `ADAPTER_SLOTS`.

        Raises
        ------
        ValueError
            a segment reads a step tensor that no earlier one writes, or hidden states or a head are
            missing.
        """
        if self._head is None:
            raise ValueError("a program needs a head")
        names = [INPUT_IDS, POSITIONS, *([ADAPTER_SLOTS] if adapted else [])]
        inputs = [StepTensor(name, (), torch.int64) for name in names]
        segments = adapted_segments(self._segments, adapted)
        return Program(segments, self._head, inputs, self._inputs, self._outputs)


@dataclass(frozen=True)
class _Table:
    """Computes one RoPE table."""

    rope: RopeConfig
    rotary_dim: int
    trained_positions: int
    max_positions: int

    def __call__(self) -> Tensor:
        return rope_table(self.rope, self.rotary_dim, self.trained_positions, self.max_positions)
