"""A replay touches the memory that it was captured on, and its caller allocates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from src.compile.graphs import GraphShape, PaddingLadder
from src.core.plan import RowInstall, RowStep, StepPlan
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs import DecodeGraph, GraphPool, MixedGraph
from src.engine.execution.inputs import build_inputs, decode_rows
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.mixers import attention as attention_mixer
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler, SamplingState
from src.models import load_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_capture import FakeCapture
from tests.support.rotation import mixers_rotate, rotates_in_mixers

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 12, 4


class Engine:
    """The device half of an engine, without threads."""

    def __init__(self, checkpoint: Path, *, rotates_in_op: bool, dtype: str = "float32") -> None:
        with mixers_rotate(rotates_in_op):
            model = load_model(checkpoint, LoadOptions(dtype=dtype, device=CPU))
        self.cache = allocate_kv_cache(
            model.kv_cache_spec(), KVCachePlan(BLOCK_SIZE, BLOCKS, 0), CPU, poison=True
        )
        self.rows = RowState(max_num_seqs=4, max_model_len=32, block_size=BLOCK_SIZE, device=CPU)
        self.sampler = Sampler(SamplingState(4, model.spec.vocab_size, CPU))
        # All rows are greedy: nothing of sampling is of interest here.
        self.sampler.state.tables[0].zero_()
        self.forward = ForwardPass(model, self.cache)
        self.code = Code(model.functions)
        self.backend = FakeCapture()
        self.pool = GraphPool(
            self.backend, PaddingLadder(4, 16), self.forward, self.code, self.rows, self.sampler
        )
        for row, first_block in ((0, 1), (2, 5)):
            tokens = list(range(10 + row, 16 + row))
            self.rows.install(RowInstall(row, 1, row, tokens, 6, [[first_block, first_block + 1]]))

    def plan(self, *steps: tuple[int, int, int, bool]) -> StepPlan:
        return StepPlan(1, [], [], [RowStep(row, 1, *rest) for row, *rest in steps])

    def prefill(self) -> None:
        inputs = build_inputs(self.plan((0, 0, 5, False), (2, 0, 5, False)), self.rows)
        self.forward(inputs, self.code.functions)

    def snapshot(self) -> list[torch.Tensor]:
        return [t.clone() for t in (*self.cache.named().values(), self.rows.tokens)]

    def graph(self, kind: Any, size: int) -> Any:
        return self.pool.capture(GraphShape(kind, size))


@pytest.fixture(params=[False, True], ids=["segments rotate", "an op rotates"])
def engine(
    checkpoint: Path, reference_attention: None, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    with torch.inference_mode():
        yield Engine(checkpoint, rotates_in_op=request.param)


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is made, and what each attention call is handed; the numbers tell which."""
    seen: list[tuple[str, int]] = []
    attention = attention_mixer.paged_attention

    def made(key_cache: torch.Tensor, *_: Any) -> torch.Tensor:
        number = sum(what == "made" for what, _ in seen)
        seen.append(("made", number))
        return torch.empty(0).new_empty(number)

    def attend(*arguments: Any) -> None:
        seen.append(("used", arguments[-3].numel()))
        attention(*arguments)

    monkeypatch.setattr(attention_mixer, "step_schedule", made)
    monkeypatch.setattr(attention_mixer, "paged_attention", attend)
    return seen


def test_a_step_lays_its_keys_out_once(engine: Engine, schedules: list[tuple[str, int]]) -> None:
    layers = len(engine.forward.model.program.mixers)
    assert layers > 1
    engine.prefill()
    assert schedules == [("made", 0)] + [("used", 0)] * layers
    # A graph lays out the keys of every replay: it is captured with the rest.
    schedules.clear()
    engine.graph("decode", 2)
    tried, captured = schedules[: layers + 1], schedules[layers + 1 :]
    assert tried == [("made", 0)] + [("used", 0)] * layers
    assert captured == [("made", 1)] + [("used", 1)] * layers


def test_mixed_graphs_lay_their_keys_out_at_every_replay(
    engine: Engine, schedules: list[tuple[str, int]]
) -> None:
    layers = len(engine.forward.model.program.mixers)
    graph = engine.graph("mixed", 16)
    schedules.clear()
    for _ in range(2):
        graph.run(build_inputs(engine.plan((0, 0, 5, False)), engine.rows, 16))
    first, second = schedules[: layers + 1], schedules[layers + 1 :]
    assert first == [("made", 0)] + [("used", 0)] * layers
    assert second == [("made", 1)] + [("used", 1)] * layers


def differing(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[tuple[int, ...]]:
    """(tensor, first index, second index) of what changed; NaN equals NaN."""
    places = set()
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        changed = ~((one == other) | (one.isnan() & other.isnan()))
        places |= {(number, *where[:2]) for where in changed.nonzero().tolist()}
    return places


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.is_replay = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_replay:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(graph: Any) -> Iterator[_Watch]:
    """Operations of whoever replays, not of what is replayed."""
    watch = _Watch()
    pieces = graph._pieces if isinstance(graph, MixedGraph) else [graph._captured]
    for piece in pieces:
        replay = piece.replay

        def silent(replay: Any = replay) -> None:
            watch.is_replay = True
            replay()
            watch.is_replay = False

        piece.replay = silent
    with watch:
        yield watch


def test_a_decode_step_writes_its_rows_and_nothing_else(engine: Engine) -> None:
    graph = engine.graph("decode", 4)
    engine.prefill()
    before = engine.snapshot()
    plan = engine.plan((0, 5, 1, True), (2, 5, 1, True))
    inputs = build_inputs(plan, engine.rows)
    hidden = engine.forward(inputs, engine.code.functions)
    expected = engine.forward.model.logits(engine.code.functions, hidden)
    eager = engine.snapshot()
    out = graph.run(decode_rows(plan, 4, engine.rows.padding_row))
    assert torch.allclose(out.logits[:2], expected, atol=1e-5)
    assert out.token_ids[:2].tolist() == expected.argmax(1).tolist()
    after = engine.snapshot()
    layers = len(engine.cache.layers)
    # Position 5 is offset 1 of the second block.
    slots = {(i, block, 1) for i in range(2 * layers) for block in (2, 6)}
    assert differing(before, after[:-1] + before[-1:]) == slots
    assert differing(eager[:-1], after[:-1]) <= slots
    tokens = {(2 * layers, row, 6) for row in (0, 2)}
    padding = {(2 * layers, engine.rows.padding_row, 0)}
    assert tokens <= differing(before, after) - slots <= tokens | padding


def test_a_mixed_step_writes_its_rows_and_nothing_else(engine: Engine) -> None:
    graph = engine.graph("mixed", 16)
    engine.prefill()
    before = engine.snapshot()
    plan = engine.plan((0, 5, 1, True), (2, 3, 3, True))
    expected = engine.forward(build_inputs(plan, engine.rows), engine.code.functions)
    hidden = graph.run(build_inputs(plan, engine.rows, 16))
    assert hidden.shape[0] == 16
    assert hidden.isfinite().all()
    assert torch.allclose(hidden[:4], expected, atol=1e-5)
    layers = len(engine.cache.layers)
    slots = {(i, *slot) for i in range(2 * layers) for slot in ((2, 1), (5, 3), (6, 0), (6, 1))}
    assert differing(before, engine.snapshot()) <= slots


def test_padding_alone_writes_nothing(engine: Engine) -> None:
    decode = engine.graph("decode", 2)
    engine.graph("mixed", 16)
    # Captures run on padding, and nothing of it went into the poisoned memory.
    assert all(cache.isnan().all() for cache in engine.cache.named().values())
    engine.prefill()
    before = engine.snapshot()
    decode.run(decode_rows(StepPlan(1, [], [], []), 2, engine.rows.padding_row))
    caches = engine.snapshot()[:-1]
    assert differing(before[:-1], caches) == set()
    assert (engine.rows.tokens[:-1] == before[-1][:-1]).all()
    # Whatever it drew for padding is a token: the next step reads it.
    assert 0 <= int(engine.rows.tokens[-1, 0]) < engine.forward.model.spec.vocab_size


def test_whoever_replays_a_decode_step_only_copies_into_its_buffer(engine: Engine) -> None:
    graph = engine.graph("decode", 2)
    engine.prefill()
    rows = decode_rows(engine.plan((0, 5, 1, True)), 2, engine.rows.padding_row)
    assert isinstance(graph, DecodeGraph)
    with watched(graph) as watch:
        graph.run(rows)
    # The first only makes a tensor of the array, on the memory of the array.
    assert watch.operations == ["aten.lift_fresh.default", "aten.copy_.default"]


def test_whoever_replays_a_mixed_step_copies_and_attends(engine: Engine) -> None:
    graph = engine.graph("mixed", 16)
    engine.prefill()
    inputs = build_inputs(engine.plan((0, 5, 1, True)), engine.rows, 16)
    with watched(graph) as watch:
        graph.run(inputs)
    layers = len(engine.cache.layers)
    called = ["slipstream.paged_attention.default"]
    if rotates_in_mixers(engine.forward.model):
        called.insert(0, "slipstream.rotate_and_cache.default")
    assert watch.operations == ["aten.copy_.default"] * 2 + called * layers


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_op_that_rotates_gives_the_bits_of_segments_that_do(
    architecture: str, dtype: str, tmp_path: Path, reference_attention: None
) -> None:
    checkpoint = make_checkpoint(tmp_path, architecture, head_dim=24)
    results = []
    for rotates_in_op in (False, True):
        engine = Engine(checkpoint, rotates_in_op=rotates_in_op, dtype=dtype)
        plan = engine.plan((0, 5, 1, True), (2, 3, 3, True))
        with torch.inference_mode():
            engine.prefill()
            hidden = engine.forward(build_inputs(plan, engine.rows, 16), engine.code.functions)
        results.append((hidden, engine.snapshot()))
    (hidden, before), (other, after) = results
    assert torch.equal(hidden, other)
    assert differing(before, after) == set()


def test_sizes_share_one_buffer(engine: Engine) -> None:
    graphs = [engine.graph("decode", size) for size in (4, 2, 1)]
    assert len({graph._buffer.data_ptr() for graph in graphs}) == 1
    engine.prefill()
    plan = engine.plan((2, 5, 1, True))
    tokens = set()
    for graph in graphs:
        out = graph.run(decode_rows(plan, graph.num_rows, engine.rows.padding_row))
        tokens.add(int(out.token_ids[0]))
    assert len(tokens) == 1
