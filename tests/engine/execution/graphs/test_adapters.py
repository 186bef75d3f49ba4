"""Captured steps with adapters give what uncaptured ones give, and are apart from those without."""

from __future__ import annotations

from pathlib import Path

import torch

from src.compile.graphs import GraphShape, PaddingLadder
from src.core.plan import RowInstall, RowStep, StepPlan
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs import DecodeGraph, GraphPool, MixedGraph
from src.engine.execution.inputs import build_inputs, decode_rows
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler, SamplingState
from src.models import load_model
from src.models.adapters.memory import AdapterRoom
from src.models.adapters.reader import read_adapter
from src.models.loading.options import LoadOptions
from tests.support.adapters import make_adapter
from tests.support.fake_capture import FakeCapture

CPU = torch.device("cpu")


@torch.inference_mode()
def test_graphs_with_adapters_and_without(
    checkpoint: Path, reference: torch.nn.Module, reference_attention: None, tmp_path: Path
) -> None:
    model = load_model(checkpoint, LoadOptions(device=CPU, adapters=AdapterRoom(2, 4)))
    assert model.adapters is not None
    path = make_adapter(tmp_path / "it", reference)
    weights = read_adapter(path, model.adapters.targets, max_rank=4, dtype=torch.float32)
    model.adapters.bring(1, 1, weights)
    cache = allocate_kv_cache(model.kv_cache_spec(), KVCachePlan(4, 12, 0), CPU, poison=True)
    rows = RowState(max_num_seqs=4, max_model_len=32, block_size=4, device=CPU)
    sampler = Sampler(SamplingState(4, model.spec.vocab_size, CPU))
    sampler.state.tables[0].zero_()
    forward, code = ForwardPass(model, cache), Code.eager(model)
    ladder = PaddingLadder(4, 16, adapts=True)
    pool = GraphPool(FakeCapture(), ladder, forward, code, rows, sampler)
    pool.capture_all()
    assert len(pool.ladder.shapes) == 2 * len(PaddingLadder(4, 16).shapes)
    # The same tokens in both rows, of which one has the adapter.
    for row, slot, block in ((0, -1, 1), (2, 1, 5)):
        blocks = [[block, block + 1]]
        rows.install(RowInstall(row, 1, row, list(range(10, 17)), 7, blocks, int(slot > 0), slot))

    def plan(start: int, count: int, *which: int, samples: bool = True) -> StepPlan:
        return StepPlan(1, [], [], [RowStep(row, 1, start, count, samples) for row in which])

    def eager(step: StepPlan) -> torch.Tensor:
        inputs = build_inputs(step, rows)
        assert (inputs.adapter_slots_t is not None) == rows.uses_adapters(step)
        return forward(inputs, code.serving(adapts=rows.uses_adapters(step)).functions)

    for which in ((0,), (0, 2), (2,)):
        prompt = plan(0, 5, *which, samples=False)
        expected = eager(prompt)
        graph = pool.find(prompt)
        assert isinstance(graph, MixedGraph)
        got = graph.run(build_inputs(prompt, rows, graph.num_tokens))
        torch.testing.assert_close(got[: len(expected)], expected)
        token = plan(5, 1, *which)
        expected, graph = eager(token), pool.find(token)
        assert isinstance(graph, DecodeGraph)
        out = graph.run(decode_rows(token, graph.num_rows, rows.padding_row))
        torch.testing.assert_close(out.hidden[: len(which)], expected)
        if len(which) == 2:
            assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    assert pool.find(plan(5, 1, 0)) is not pool.find(plan(5, 1, 2))
    assert GraphShape("decode", 1, True) in pool.ladder.shapes


def test_a_ladder_without_adapters_has_none() -> None:
    assert not any(shape.adapts for shape in PaddingLadder(4, 16).shapes)
    with_them = PaddingLadder(4, 16, adapts=True)
    assert with_them.candidates(3, decodes=True, adapts=True) == [
        GraphShape("decode", 4, True),
        GraphShape("mixed", 16, True),
    ]
