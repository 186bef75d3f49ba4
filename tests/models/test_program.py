"""Programs: how segments are fused, how long tensors live, and what the interpreter computes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.distributed import Group
from src.engine.execution.compiled_program import compiled_program
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.models.builder import ProgramBuilder
from src.models.config import ModelConfig
from src.models.decoder import write_decoder
from src.models.model import Model, ModelOptions
from src.models.program import (
    HIDDEN,
    INPUT_IDS,
    LOGITS,
    POSITIONS,
    Mixer,
    Program,
    StepInput,
    run_chain,
    run_head,
    run_program,
)
from src.models.registry import family_of, load_config
from tests.support.checkpoints import make_checkpoint
from tests.support.segments import write_late_reader, write_two_streams

CPU = torch.device("cpu")


def builder_of() -> ProgramBuilder:
    return ProgramBuilder(
        dtype=torch.float32,
        device=CPU,
        max_positions=64,
        group=Group(),
        deterministic=False,
        rotates_in_op=False,
    )


class Written:
    """A program of numbers: every tensor is [T, 1]."""

    def __init__(self) -> None:
        self.builder = builder_of()

    def segment(self, function: Any, reads: str, writes: str) -> None:
        tensors = [self.builder.step_tensor(name, 1) for name in writes.split()]
        self.builder.segment(function, None, (), reads.split(), tensors)

    def mixer(self, reads: str, writes: str) -> None:
        tensor = self.builder.step_tensor(writes, 1)
        self.builder.mixer("sum", None, (), reads.split(), tensor)

    def program(self) -> Program:
        self.builder.head(times_two, None, (), (HIDDEN,), [self.builder.step_tensor(LOGITS, 1)])
        return self.builder.program()


def widen(spec: None, weights: tuple[()], x: Tensor) -> Tensor:
    return x.to(torch.float32)[:, None]


def times_two(spec: None, weights: tuple[()], x: Tensor) -> Tensor:
    return 2 * x


def plus(spec: None, weights: tuple[()], *given: Tensor) -> Tensor:
    return torch.stack(given).sum(dim=0)


def split(spec: None, weights: tuple[()], x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x - 1


def add_positions(spec: None, weights: tuple[()], x: Tensor, positions: Tensor) -> Tensor:
    return x + positions.to(torch.float32)[:, None]


def running_sum(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
    """In place of attention: a token has the sum of all up to it, times its mixer's number."""
    return (mixer.layer + 1) * torch.stack(list(given)).sum(dim=0).cumsum(dim=0)


def run(program: Program, mix: Any = running_sum, kept: Tensor | None = None) -> Tensor:
    calls = program.calls
    tensors = {INPUT_IDS: torch.tensor([3, 1, 4, 1, 5]), POSITIONS: torch.arange(5)}
    weights = [call.weights for call in calls]
    return run_program(program, [run_chain] * len(calls), weights, tensors, mix, kept)


def two_streams() -> Program:
    """A stream "aside" lives across both mixers, and positions are read behind the last."""
    written = Written()
    written.segment(widen, INPUT_IDS, "x")
    written.segment(split, "x", "x aside")
    written.mixer("x", "mixed")
    written.segment(plus, "mixed x", "x")
    written.mixer("x", "mixed")
    written.segment(plus, "mixed x aside", "x")
    written.segment(add_positions, f"x {POSITIONS}", HIDDEN)
    return written.program()


def test_segments_between_mixers_are_one_call_each() -> None:
    program = two_streams()
    kinds = [type(step).__name__ for step in program.steps]
    assert kinds == ["Call", "Mixer", "Call", "Mixer", "Call"]
    assert [call.slot for call in program.calls] == [0, 1, 2, 3]
    assert program.calls[-1] is program.head
    assert [mixer.layer for mixer in program.mixers] == [0, 1]
    chains = [call.chain for call in program.calls]
    assert [chain.functions for chain in chains] == [
        (widen, split),
        (plus,),
        (plus, add_positions),
        (times_two,),
    ]
    # From outside what is not written within, in the order in which it is read first.
    assert [chain.reads for chain in chains] == [
        (INPUT_IDS,),
        ("mixed", "x"),
        ("mixed", "x", "aside", POSITIONS),
        (HIDDEN,),
    ]
    # To the outside what somebody reads there.
    assert [chain.writes for chain in chains] == [("x", "aside"), ("x",), (HIDDEN,), (LOGITS,)]
    shapes = [[tensor.shape for tensor in call.inputs] for call in program.calls]
    assert shapes == [[()], [(1,), (1,)], [(1,), (1,), (1,), ()], [(1,)]]


def test_calls_of_the_same_functions_are_alike() -> None:
    one, other = two_streams(), two_streams()
    assert [c.chain for c in one.calls] == [c.chain for c in other.calls]
    assert hash(one.calls[0].chain) == hash(other.calls[0].chain)
    assert len({repr(call.chain) for call in one.calls}) == 4
    assert "tests.models.test_program:widen" in repr(one.calls[0].chain)


def test_tensors_live_until_they_are_read_last() -> None:
    program = two_streams()
    assert program.dead == (
        (INPUT_IDS,),
        (),
        # Read again behind it, but not this value.
        ("mixed", "x"),
        (),
        ("mixed", "x", "aside", POSITIONS),
    )
    assert program.last_mixer == 3
    assert program.kept == ("aside", POSITIONS, "x")


def test_what_nobody_reads_again_is_gone_when_a_mixer_runs() -> None:
    program = two_streams()
    seen: list[Any] = []

    def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
        result = running_sum(mixer, given)
        seen.append(weakref.ref(result))
        if mixer.layer == 1:
            # What the first one left; its own input is read again.
            assert seen[0]() is None
        return result

    run(program, mix)
    assert len(seen) == 2


def test_the_interpreter_computes_what_is_written() -> None:
    program = two_streams()
    ids = torch.tensor([3.0, 1, 4, 1, 5])[:, None]
    x, aside = ids + 1, ids - 1
    x = x + x.cumsum(dim=0)
    x = x + 2 * x.cumsum(dim=0) + aside
    hidden = run(program)
    assert torch.equal(hidden, x + torch.arange(5.0)[:, None])
    functions = [run_chain] * 4
    assert torch.equal(run_head(program, functions, [((),)] * 4, hidden), 2 * hidden)


@pytest.mark.parametrize("kept", [[4], [0, 3], [2, 2, 1], []])
def test_hidden_states_of_some_tokens_are_those_of_all(kept: list[int]) -> None:
    program, chosen = two_streams(), torch.tensor(kept, dtype=torch.int64)
    sizes: list[int] = []

    def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
        sizes.append(len(given[0]))
        mixed = running_sum(mixer, given)
        return mixed[chosen] if mixer.layer == 1 else mixed

    hidden = run(program, mix, chosen)
    assert hidden.shape == (len(kept), 1)
    assert torch.equal(hidden, run(program)[chosen])
    # A mixer meets every token.
    assert sizes == [5, 5]


def test_what_a_mixer_leaves_may_be_read_twice() -> None:
    written = Written()
    written.segment(widen, INPUT_IDS, "x")
    written.mixer("x x", "early")
    written.segment(plus, "early early", "x")
    written.mixer("x", "late")
    written.segment(plus, "early late", HIDDEN)
    program = written.program()
    assert program.kept == ("early",)
    # Its input was read twice, and is dropped once.
    assert program.dead == ((INPUT_IDS,), ("x",), (), ("x",), ("early", "late"))
    early = 2 * torch.tensor([3.0, 1, 4, 1, 5])[:, None].cumsum(dim=0)
    expected = early + 2 * (2 * early).cumsum(dim=0)
    assert torch.equal(run(program), expected)
    chosen = torch.tensor([1, 4])
    kept = run(
        program,
        lambda mixer, given: (
            running_sum(mixer, given)[chosen] if mixer.layer else running_sum(mixer, given)
        ),
        chosen,
    )
    assert torch.equal(kept, expected[chosen])


def test_a_program_without_mixers_is_one_call() -> None:
    written = Written()
    written.segment(widen, INPUT_IDS, "x")
    written.segment(times_two, "x", HIDDEN)
    program = written.program()
    assert (len(program.steps), program.last_mixer, program.mixers) == (1, -1, ())
    assert run(program).flatten().tolist() == [6, 2, 8, 2, 10]


def test_what_nobody_writes_is_refused() -> None:
    written = Written()
    written.segment(plus, "x", HIDDEN)
    with pytest.raises(ValueError, match=r"plus reads \['x'\], which nobody writes"):
        written.program()
    written = Written()
    written.segment(widen, INPUT_IDS, "x")
    written.mixer("x y", "mixed")
    written.segment(plus, "mixed", HIDDEN)
    with pytest.raises(ValueError, match=r"mixer 0 \(sum\) reads \['y'\], which nobody writes"):
        written.program()
    # Behind it alone.
    written = Written()
    written.mixer("x", "mixed")
    written.segment(widen, INPUT_IDS, "x")
    written.segment(plus, "mixed x", HIDDEN)
    with pytest.raises(ValueError, match=r"\['x'\]"):
        written.program()
    written = Written()
    written.segment(widen, INPUT_IDS, "x")
    with pytest.raises(ValueError, match="nobody writes hidden"):
        written.program()


def test_a_program_needs_a_head_and_names_of_its_own() -> None:
    with pytest.raises(ValueError, match="needs a head"):
        builder_of().program()
    builder = builder_of()
    builder.vector("norm", 4, "norm.weight", fill=1.0)
    with pytest.raises(ValueError, match="there is a parameter norm already"):
        builder.vector("norm", 4, "norm.weight", fill=1.0)


@pytest.mark.parametrize("depth", [2, 3])
def test_what_the_kernel_library_does_not_know_it_is_not_given(depth: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=depth)
    config = load_config(path)

    def program_of(write: Any, **options: Any) -> Any:
        given = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, **options)
        model = Model(config, write, given)
        cache = allocate_kv_cache(model.kv_cache_spec(), KVCachePlan(4, 8, 0), CPU)
        functions: Any = [Bindable()] * len(model.program.calls)
        return compiled_program(model, model.variants[0], functions, cache)

    family = family_of(config.architecture)
    known = program_of(family.write)
    assert [mixer.function for mixer in known.mixers] == ["attention"] * depth
    assert known.kept == {2}
    two = program_of(write_two_streams)
    # Positions and both streams.
    assert two.kept == {1, 2, 3}
    # It writes what mixers leave in one place, which is not free yet.
    assert program_of(write_late_reader) is None
    # It gathers nothing that a family declares.
    assert program_of(write_with_input) is None
    # Rotation is not its business.
    assert program_of(family.write, rotates_in_op=True) is None


def write_with_input(builder: ProgramBuilder, config: ModelConfig) -> None:
    write_decoder(builder, config)
    builder.step_input(StepInput(builder.step_tensor("more", 3)))


class Bindable:
    """In place of compiled code."""

    def bind(self, *arguments: Any) -> object:
        return object()
