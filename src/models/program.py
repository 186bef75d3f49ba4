"""A model as a program: a list of segments and mixers over named step tensors.

A *segment* is a pure function of tensors whose rows are the tokens of a step. Each token is
computed independently of the others. A *mixer* combines the tokens of a sequence: attention, latent
attention, state spaces, cross attention. It needs memory that outlives a step, so the
engine computes it. The program only says where it is, which tensors it reads and which it writes.

::

    embed          input_ids                        -> residual
    attention_in   residual, positions              -> query, key, value
    [attention]    query, key, value                -> attended
    attention_out  attended, residual               -> residual
    mlp            residual                         -> residual
    ...
    norm           residual                         -> hidden
    head           hidden                           -> logits

Segments with no mixer between them are fused into one *call*: a `Chain` of functions. Code is
compiled once per chain and shapes of weights, so compile time does not grow with depth.
`run_program` is the reference interpreter: compiled calls, graphs and the CPU's single call must
agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

INPUT_IDS, POSITIONS, HIDDEN, LOGITS = "input_ids", "positions", "hidden", "logits"
ROPE_POSITIONS, EMBEDDINGS, IS_EMBEDDED = "rope_positions", "embeddings", "is_embedded"
"""Step inputs that several families declare: positions with axes, [T, axes] int64; embeddings
[T, H], and whether a token has one, [T] int64."""
ADAPTER_SLOTS = "adapter_slots"
"""The slot of each token's adapter; only programs with adapters have this step tensor."""


class StepTensor(NamedTuple):
    """A named tensor of a step, [T, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step tensor that a family declares, beside those that every step has.

    A request brings its values for the first tokens of its prompt; the program reads it by name.

    Attributes
    ----------
    tensor
        In int64, or in a floating-point type.
    beyond
        What a token has for which the request brings nothing. ``zeros``; or ``onwards``, for
        positions: numbers go on by 1 from the largest that the request brings, and without any from
        0, the same along every axis.
    below
        Of integers: values are from 0 up to this, exclusive. ``None``: any.
    """

    tensor: StepTensor
    beyond: Literal["zeros", "onwards"] = "zeros"
    below: int | None = None

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers."""
        return not self.tensor.dtype.is_floating_point


@dataclass(frozen=True, slots=True)
class Link:
    """One segment's function with its static argument and the names that it reads and writes.

    ``function(spec, weights, *reads)`` returns a tensor, or a tuple if it writes several. The
    function must be defined at a module's top level, and ``repr(spec)`` must be complete, because
    both are part of the key of compiled code in a cache.

    If it ``chooses``, the last of ``reads`` is not the function's: weights that have something for
    each token to choose (`Choosable`) are replaced by what those tokens have chosen.
    """

    function: Callable[..., Any]
    spec: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    chooses: bool = False

    def __repr__(self) -> str:
        name = f"{self.function.__module__}:{self.function.__qualname__}"
        chooses = ", chooses" if self.chooses else ""
        return f"Link({name}, {self.spec!r}, {self.reads}, {self.writes}{chooses})"


class Choosable(Protocol):
    """A weight of which each token chooses a variant."""

    def choose(self, slots: Tensor) -> Any:
        """The weight for tokens that have chosen these slots, int64 [T]."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Functions that run one after the other as one call: the static argument of `run_chain`."""

    links: tuple[Link, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The links' functions, in order."""
        return tuple(link.function for link in self.links)


def run_chain(chain: Chain, weights: tuple[Any, ...], *given: Tensor) -> tuple[Tensor, ...]:
    """Run a call on the tensors of the chain's ``reads``; returns those of its ``writes``.

    ``weights`` has one entry per link: the nested tuple of tensors that its function takes.
    """
    tensors = dict(zip(chain.reads, given, strict=True))
    for link, own in zip(chain.links, weights, strict=True):
        read = [tensors[name] for name in link.reads]
        if link.chooses:
            own = _chosen(own, read.pop())
        result = link.function(link.spec, own, *read)
        if len(link.writes) == 1:
            result = (result,)
        tensors.update(zip(link.writes, result, strict=True))
    return tuple([tensors[name] for name in chain.writes])


def _chosen(weights: Any, slots: Tensor) -> Any:
    """Nested tuples of weights for tokens that have chosen these slots."""
    if hasattr(weights, "choose"):
        return weights.choose(slots)
    if not isinstance(weights, tuple):
        return weights
    items = [_chosen(item, slots) for item in weights]
    return type(weights)(*items) if hasattr(weights, "_fields") else tuple(items)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as a family writes it.

    Attributes
    ----------
    weights
        Nested tuples of parameters' names (or None), which stand for their tensors.
    chooses
        See `Link`.
    """

    function: Callable[..., Any]
    spec: Any
    weights: Any
    reads: tuple[str, ...]
    writes: tuple[StepTensor, ...]
    chooses: bool = False


@dataclass(frozen=True, slots=True)
class Mixer:
    """A step that combines the tokens of a sequence.

    Attributes
    ----------
    kind
        Key of the engine's table of mixers, which computes it.
    layer
        Its index among the mixers, and so the index of its memory.
    spec
        Static arguments, the same in every step.
    weights
        Nested tuples of parameters' names (or None), for kinds that have weights.
    """

    kind: str
    layer: int
    spec: Any
    weights: Any
    reads: tuple[str, ...]
    writes: StepTensor


@dataclass(frozen=True, slots=True)
class Call:
    """Fused segments.

    Attributes
    ----------
    slot
        Its index among the calls, and so the index of its weights and its compiled code.
    weights
        See `Segment`; one entry per link.
    """

    slot: int
    chain: Chain
    weights: tuple[Any, ...]
    inputs: tuple[StepTensor, ...]


# (mixer, tensors of its `reads`) -> the tensor of its `writes`
Mix = Callable[[Mixer, Sequence[Tensor]], Tensor]
# Has the signature of `run_chain`.
Function = Callable[..., tuple[Tensor, ...]]


class Program:
    """The calls and mixers of a model in order, and its head.

    Attributes
    ----------
    own_inputs
        Those of its inputs that its family declared.
    outputs
        Names of step tensors that are wanted beside the hidden states.
    steps
        From `INPUT_IDS`, `POSITIONS` and its own inputs to `HIDDEN`.
    head
        From `HIDDEN` to `LOGITS`.
    dead
        Per step: the names that it reads and that no later step reads.
    finished
        Per step: the outputs that it writes.
    read
        Names that any step reads.
    kept
        Names that are read behind the last mixer, without the one that the mixer writes.
    """

    def __init__(
        self,
        segments: Sequence[Segment | Mixer],
        head: Segment,
        inputs: Sequence[StepTensor],
        own_inputs: Sequence[StepInput] = (),
        outputs: Sequence[str] = (),
    ) -> None:
        self.own_inputs = tuple(own_inputs)
        self.outputs = tuple(outputs)
        self.inputs = (*inputs, *(each.tensor for each in self.own_inputs))
        self.steps: tuple[Call | Mixer, ...] = tuple(_fuse(segments, self.inputs, self.outputs))
        written = {step.name: step for each in segments for step in _writes(each)}
        if HIDDEN not in written:
            raise ValueError(f"nobody writes {HIDDEN}")
        writers = [
            tensor.name for each in segments if isinstance(each, Segment) for tensor in each.writes
        ]
        for name in self.outputs:
            if writers.count(name) != 1:
                raise ValueError(f"expected one segment that writes the output {name}")
        slot = sum(isinstance(step, Call) for step in self.steps)
        self.head = _call(slot, [head], {HIDDEN: written[HIDDEN]}, (LOGITS,))
        self.last_mixer = max(
            (i for i, step in enumerate(self.steps) if isinstance(step, Mixer)), default=-1
        )
        self.finished = tuple(
            tuple(name for name in self.outputs if name in _written(step)) for step in self.steps
        )
        self.read = frozenset(name for step in self.steps for name in _reads(step))
        self.dead = tuple(self._dead(i) for i in range(len(self.steps)))
        behind = self.steps[self.last_mixer + 1 :]
        given = {self.mixers[-1].writes.name} if self.mixers else set()
        self.kept = tuple(sorted(_read_first(behind) - given))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All mixers, by their layer."""
        return tuple(step for step in self.steps if isinstance(step, Mixer))

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls, by their slot; the head is the last."""
        return (*(step for step in self.steps if isinstance(step, Call)), self.head)

    def _dead(self, index: int) -> tuple[str, ...]:
        """Names that step ``index`` reads and that no later step reads."""
        step = self.steps[index]
        live = _read_first(self.steps[index + 1 :]) - _written(step)
        return tuple(dict.fromkeys(name for name in _reads(step) if name not in live))


def run_program(
    program: Program,
    functions: Sequence[Function],
    weights: Sequence[tuple[Any, ...]],
    tensors: Mapping[str, Tensor],
    mix: Mix,
    kept: Tensor | None = None,
    outputs: dict[str, Tensor] | None = None,
) -> Tensor:
    """Run a program; returns hidden states [T, H] or [K, H].

    Parameters
    ----------
    program
        The program to run.
    functions
        Per call, `run_chain` or a compiled replacement.
    weights
        Per call.
    tensors
        `INPUT_IDS` int64 [T], `POSITIONS` int64 [T]: each token's index in its sequence; for a
        program with adapters also `ADAPTER_SLOTS` int64 [T]; and its own inputs.
    mix
        Computes a mixer.
    kept
        int64 [K], indices of the tokens whose hidden states are wanted. ``mix`` must return only
        these for the last mixer. None: all.
    outputs
        Gets the program's outputs [T, ...]; those that are written behind the last mixer have the
        tokens of ``kept`` alone.
    """
    values = dict(tensors)
    for index, step in enumerate(program.steps):
        given = [values[name] for name in _reads(step)]
        # Dropped early, so that the next step can reuse their memory, also during a capture.
        for name in program.dead[index]:
            del values[name]
        if isinstance(step, Call):
            results = functions[step.slot](step.chain, weights[step.slot], *given)
            del given
            values.update(zip(step.chain.writes, results, strict=True))
            del results
            for name in program.finished[index]:
                if outputs is not None:
                    outputs[name] = values[name]
                if name not in program.read:
                    del values[name]
            continue
        values[step.writes.name] = mix(step, given)
        del given
        if index == program.last_mixer and kept is not None:
            if not len(kept):
                return values[step.writes.name][:0].new_empty(0, *program.head.inputs[0].shape)
            for name in program.kept:
                values[name] = values[name][kept]
    return values[HIDDEN]


def run_head(
    program: Program,
    functions: Sequence[Function],
    weights: Sequence[tuple[Any, ...]],
    hidden: Tensor,
) -> Tensor:
    """Vocabulary scores, float32 [S, V], of hidden states [S, H]."""
    slot = program.head.slot
    return functions[slot](program.head.chain, weights[slot], hidden)[0]


def _reads(step: Segment | Mixer | Call) -> tuple[str, ...]:
    return step.chain.reads if isinstance(step, Call) else step.reads


def _writes(step: Segment | Mixer) -> tuple[StepTensor, ...]:
    return step.writes if isinstance(step, Segment) else (step.writes,)


def _written(step: Segment | Mixer | Call) -> set[str]:
    if isinstance(step, Call):
        return set(step.chain.writes)
    return {tensor.name for tensor in _writes(step)}


def _read_first(steps: Sequence[Segment | Mixer | Call]) -> set[str]:
    """Names that ``steps`` read before they write them, and `HIDDEN` unless they write it."""
    live = {HIDDEN}
    for step in reversed(steps):
        live = live - _written(step) | set(_reads(step))
    return live


def _fuse(
    segments: Sequence[Segment | Mixer], inputs: Sequence[StepTensor], outputs: Sequence[str]
) -> list[Call | Mixer]:
    known = {tensor.name: tensor for tensor in inputs}
    steps: list[Call | Mixer] = []
    run: list[Segment] = []
    slot = 0

    def close(index: int) -> None:
        nonlocal slot, run
        if run:
            live = _read_first(segments[index:]) | set(outputs)
            names = dict.fromkeys(t.name for each in run for t in each.writes)
            steps.append(_call(slot, run, known, tuple(name for name in names if name in live)))
            known.update({t.name: t for each in run for t in each.writes})
            slot, run = slot + 1, []

    for index, step in enumerate(segments):
        if isinstance(step, Segment):
            run.append(step)
            continue
        close(index)
        _refuse_unknown(f"mixer {step.layer} ({step.kind})", step.reads, known)
        steps.append(step)
        known[step.writes.name] = step.writes
    close(len(segments))
    return steps


def _refuse_unknown(reader: str, reads: Sequence[str], known: Mapping[str, StepTensor]) -> None:
    if unknown := [name for name in reads if name not in known]:
        raise ValueError(f"{reader} reads {unknown}, which nobody writes")


def _call(
    slot: int, run: Sequence[Segment], known: Mapping[str, StepTensor], writes: tuple[str, ...]
) -> Call:
    reads: dict[str, None] = {}
    written: set[str] = set()
    for each in run:
        reads.update(dict.fromkeys(name for name in each.reads if name not in written))
        written |= {tensor.name for tensor in each.writes}
    _refuse_unknown(run[0].function.__name__, tuple(reads), known)
    links = tuple(
        Link(each.function, each.spec, each.reads, tuple(t.name for t in each.writes), each.chooses)
        for each in run
    )
    return Call(
        slot,
        Chain(links, tuple(reads), writes),
        tuple(each.weights for each in run),
        tuple(known[name] for name in reads),
    )
