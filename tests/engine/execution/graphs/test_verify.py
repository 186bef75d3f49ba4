"""Captured steps with drafts: whatever is guessed, the tokens are those of steps without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, PaddingLadder
from src.core.plan import RowInstall, RowStep, StepPlan
from src.engine.execution.drafted_inputs import (
    Propose,
    accept,
    draft,
    has_bounds,
    host_numbers,
    restore_drafts,
    shape_of,
)
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs import GraphPool, VerifyGraph
from src.engine.execution.inputs import build_inputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import Sampler, SamplingState
from src.engine.sampling.state import SEED, TEMPERATURE
from src.models import load_model
from src.models.loading.options import LoadOptions
from tests.support.fake_capture import FakeCapture

CPU = torch.device("cpu")
BLOCK_SIZE, ROOM, ROWS, PROMPT = 4, 40, 4, 6


class Oracle:
    """Knows what rows will say, and is wrong at some positions."""

    def __init__(self, wrong: float, seed: int) -> None:
        # [R + 1, L] int32: (row, position) -> the token that is guessed there
        self.answers = torch.zeros((ROWS + 1, ROOM), dtype=torch.int32)
        random_ = torch.Generator().manual_seed(seed)
        self.is_wrong = torch.rand((ROWS + 1, ROOM), generator=random_) < wrong

    def know(self, tokens: Tensor) -> None:
        self.answers.copy_(torch.where(self.is_wrong, (tokens + 1) % 50, tokens).clamp(min=0))

    def proposing(self, most: int) -> Propose:
        def propose(tokens: Tensor, rows: Tensor, lengths: Tensor, wanted: Tensor) -> Tensor:
            places = torch.arange(most)
            at = (lengths[:, None].long() + places).clamp(max=ROOM - 1)
            drafts = self.answers[rows[:, None], at]
            drafts = drafts.masked_fill(places >= wanted[:, None], -1)
            return torch.cat((wanted[:, None] * 3, wanted[:, None], drafts), 1)

        return propose


class Engine:
    """The device half of an engine, without threads."""

    def __init__(
        self,
        checkpoint: Path,
        proposing: Callable[[int], Propose],
        device: torch.device = CPU,
        backend: CaptureBackend | None = None,
    ) -> None:
        with torch.inference_mode(mode=False):
            model = load_model(checkpoint, LoadOptions(dtype="float32", device=device))
        blocks = ROOM // BLOCK_SIZE
        self.cache = allocate_kv_cache(
            model.kv_cache_spec(), KVCachePlan(BLOCK_SIZE, ROWS * blocks, 0), device, poison=True
        )
        self.rows = RowState(
            max_num_seqs=ROWS, max_model_len=ROOM, block_size=BLOCK_SIZE, device=device
        )
        self.sampler = Sampler(SamplingState(ROWS, model.spec.vocab_size, device))
        floats, ints = self.sampler.state.tables
        floats.zero_()
        # Every second row draws.
        floats[1::2, TEMPERATURE] = 0.8
        ints[:, SEED] = torch.arange(len(ints), device=device)
        self.forward = ForwardPass(model, self.cache)
        self.code = Code(model.functions)
        ladder = PaddingLadder(ROWS, 0, max_drafts=5, max_sampled=ROWS * 6)
        self.pool = GraphPool(
            backend or FakeCapture(),
            ladder,
            self.forward,
            self.code,
            self.rows,
            self.sampler,
            proposing,
        )
        for row in range(ROWS):
            tokens = [10 + row, *range(11, 11 + PROMPT - 1)]
            own = list(range(row * blocks, (row + 1) * blocks))
            self.rows.install(RowInstall(row, 1, row, tokens, PROMPT, [own]))
        self.rows.flush()
        prompts = plan(*(RowStep(row, 1, 0, PROMPT - 1, False) for row in range(ROWS)))
        self.forward(build_inputs(prompts, self.rows), self.code.functions)

    def logits(self, inputs: object, index: Tensor) -> Tensor:
        hidden = self.forward(inputs, self.code.functions)[index]
        return self.forward.model.logits(self.code.functions, hidden)

    def decode(self, until: int) -> None:
        """One token after the other."""
        for at in range(PROMPT - 1, until - 1):
            inputs = build_inputs(
                plan(*(RowStep(r, 1, at, 1, True) for r in range(ROWS))), self.rows
            )
            logits = self.logits(inputs, inputs.sample_index_s)
            where = inputs.sampled_rows_s, inputs.sampled_positions_s
            self.rows.scatter_tokens(*where, self.sampler.draw(logits, *where))


def plan(*steps: RowStep) -> StepPlan:
    return StepPlan(1, [], [], list(steps))


@pytest.fixture
def checkpoint_of(checkpoint: Path, reference_attention: None) -> Iterator[Path]:
    with torch.inference_mode():
        yield checkpoint


@pytest.mark.parametrize("captures", [True, False], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_no_draft_changes_a_token(checkpoint_of: Path, wrong: float, captures: bool) -> None:
    """Steps are launched one behind the other, by bounds; the host sees nothing before the end."""
    oracle = Oracle(wrong, seed=3)
    plainly = Engine(checkpoint_of, oracle.proposing)
    plainly.decode(until=30)
    oracle.know(plainly.rows.tokens)
    engine, chance = Engine(checkpoint_of, oracle.proposing), random.Random(1)
    if captures:
        engine.pool.capture_all()
    # What the host knows: bounds of the rows' lengths. What the device says once it is asked.
    least, most = [PROMPT] * ROWS, [PROMPT] * ROWS
    given: list[list[int]] = [[] for _ in range(ROWS)]
    limits = [30, 29, 27, 30]
    launched: list[tuple[StepPlan, Tensor, Tensor, int]] = []
    most_kept = 0
    for _ in range(40):
        steps = []
        for row in chance.sample(range(ROWS), chance.randint(1, ROWS)):
            if least[row] >= limits[row]:
                continue
            # As the scheduler bounds them.
            drafts = max(0, min(chance.choice((0, 2, 3, 5)), limits[row] - least[row] - 1))
            slack = most[row] - least[row]
            begin = least[row] - 1
            steps.append(RowStep(row, 1, begin, 1 + drafts, True, drafts, slack, limits[row]))
        step_plan = plan(*steps)
        if not has_bounds(step_plan):
            continue
        for step in steps:
            row = step.row
            least[row] = min(least[row] + 1, limits[row])
            most[row] = min(most[row] + 1 + step.drafts, limits[row])
        if captures:
            graph = engine.pool.find(step_plan)
            assert isinstance(graph, VerifyGraph)
            out = graph.run(host_numbers(step_plan, graph.num_rows, ROWS))
            token_ids, kept, drafts_of = out.token_ids, out.kept_b, out.drafts
        else:
            shape = shape_of(step_plan)
            numbers = torch.from_numpy(host_numbers(step_plan, len(steps), ROWS))
            propose = oracle.proposing(shape.width - 1)
            inputs, drafts_of = draft(numbers, shape, engine.rows, propose)
            logits = engine.logits(inputs, inputs.sample_index_s)
            token_ids = engine.sampler.draw(
                logits, drafts_of.sampled_rows_e, drafts_of.sampled_positions_e
            )
            kept = accept(drafts_of, token_ids, engine.rows)
        most_kept = max(most_kept, int(kept.max()))
        launched.append((step_plan, token_ids.clone(), kept.clone(), drafts_of.width))
        if chance.random() < 0.3:
            # Drawn again, as where rows ask for more: the same, so nothing changes.
            before = engine.rows.tokens.clone(), engine.rows.lengths.clone()
            restore_drafts(drafts_of, engine.rows)
            assert torch.equal(accept(drafts_of, token_ids, engine.rows), kept)
            assert torch.equal(engine.rows.tokens, before[0])
            assert torch.equal(engine.rows.lengths, before[1])
        if chance.random() < 0.4:
            _commit(launched, given)
            launched.clear()
            least = [PROMPT + len(each) for each in given]
            most = list(least)
    _commit(launched, given)
    for row in range(ROWS):
        length = PROMPT + len(given[row])
        assert length > 15
        expected = plainly.rows.tokens[row, :length].tolist()
        assert engine.rows.tokens[row, :length].tolist() == expected
        assert given[row] == expected[PROMPT:]
        assert (engine.rows.tokens[row, length:] == POISON).all()
        assert length <= limits[row]
    assert most_kept == 1 if wrong == 1 else most_kept > 2
    if captures:
        assert engine.pool.stats.steps["verify"] > 0
        assert engine.pool.stats.steps["none"] == 0


def _commit(launched: list[tuple[StepPlan, Tensor, Tensor, int]], given: list[list[int]]) -> None:
    for step_plan, token_ids, kept, width in launched:
        for at, step in enumerate(step_plan.rows):
            count = int(kept[at])
            assert count <= 1 + step.drafts
            given[step.row] += token_ids[at * width : at * width + count].tolist()


def test_a_plan_with_a_prompt_and_bounds_has_no_graph(checkpoint_of: Path) -> None:
    engine = Engine(checkpoint_of, Oracle(0, 0).proposing)
    engine.pool.capture_all()
    steps = RowStep(0, 1, 5, 1, True, 0, 2, 20), RowStep(1, 1, 0, 5, False)
    assert engine.pool.find(plan(*steps)) is None
    assert isinstance(engine.pool.find(plan(steps[0])), VerifyGraph)
