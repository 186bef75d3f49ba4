"""Steps with drafts on the CUDA that computes nothing: they are captured, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.compile.graphs.cuda import CudaCapture
from src.core.plan import RowStep
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.execution.drafted_inputs import Propose
from src.engine.execution.drafted_steps import DraftedSteps
from src.engine.execution.graphs import VerifyGraph
from src.ops import look_up
from tests.engine.execution.graphs.test_verify import PROMPT, ROWS, Engine, plan
from tests.support.checkpoints import make_checkpoint

CUDA = torch.device("cuda", 0)


def proposing(most: int) -> Propose:
    return partial(_look_up, most=most)


def _look_up(tokens: Tensor, rows: Tensor, lengths: Tensor, wanted: Tensor, most: int) -> Tensor:
    return look_up(tokens, rows, lengths, wanted, 3, 24, most)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("null") / "model")


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(CUDA)):
        made = Engine(checkpoint, proposing, CUDA, CudaCapture(CUDA, asserts=True))
        for row in range(ROWS):
            penalized = SamplingParams(temperature=0.8, presence_penalty=0.5, top_k=5, logprobs=1)
            params = penalized if row == 1 else SamplingParams(temperature=0.0)
            request = DeviceRequest(key=row, prompt_len=PROMPT, params=params, seed=row)
            made.sampler.state.install(row, request, PROMPT)
        yield made


def test_steps_with_drafts_are_captured_and_wait_for_nothing(engine: Engine) -> None:
    engine.pool.capture_all()
    assert engine.pool.stats.captured["verify"] == len(
        [shape for shape in engine.pool.ladder.shapes if shape.kind == "verify"]
    )
    steps = DraftedSteps(engine.forward, engine.rows, engine.sampler, proposing)

    def launch() -> None:
        for rows in ((0,), (0, 2, 3), (1, 2)):
            bounded = [RowStep(row, 1, PROMPT - 1, 4, True, 3, 2, 30) for row in rows]
            step_plan = plan(*bounded)
            graph = engine.pool.find(step_plan)
            assert isinstance(graph, VerifyGraph)
            for each in (graph, None):
                out = steps.compute(step_plan, engine.code, each)
                assert out.verdicts.numbers.device == CUDA
        # A prompt beside rows whose lengths are not known.
        mixed = plan(RowStep(0, 1, PROMPT - 1, 1, True, 0, 3, 30), RowStep(3, 1, 0, 5, False))
        assert engine.pool.find(mixed) is None
        steps.compute(mixed, engine.code)

    launch()  # kernels are compiled by their first calls
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.rows.lengths[0].item()
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
