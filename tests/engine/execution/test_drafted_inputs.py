"""Steps with drafts whose lengths only the device knows, against those that the host makes."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from src.core.plan import RowInstall, RowStep, StepPlan
from src.engine.execution.drafted_inputs import (
    Drafts,
    StepShape,
    accept,
    draft,
    host_numbers,
    restore_drafts,
    sampled_batch,
    shape_of,
)
from src.engine.execution.inputs import StepInputs, build_inputs
from src.engine.execution.row_state import POISON, RowState
from src.engine.speculation import Speculation, Verification, Widths
from src.engine.speculation.lookup import Lookup
from src.ops import look_up
from tests.engine.speculation.test_verification import FREE

CPU = torch.device("cpu")
BLOCK, ROOM, ROWS = 4, 64, 9
LEAST, LONGEST = 2, 24


class Rows(NamedTuple):
    """The state of some rows, a plan for them, and their true lengths."""

    state: RowState
    plan: StepPlan
    lengths: dict[int, int]


def rows_of(seed: int) -> Rows:
    """Rows that decode at a place that only the device knows, beside exact rows and prompts."""
    chance = random.Random(seed)
    state = RowState(max_num_seqs=ROWS, max_model_len=ROOM, block_size=BLOCK, device=CPU)
    steps: list[RowStep] = []
    lengths: dict[int, int] = {}
    blocks = iter(range(1000))
    for row in chance.sample(range(ROWS), chance.randint(1, ROWS)):
        part = [chance.randrange(5) for _ in range(chance.randint(1, 7))]
        known = chance.randint(2, 40)
        text = (part * known)[:known]
        kind = chance.choice(("verifies", "verifies", "behind", "exact", "prompt", "chunk"))
        slack = before = drafts = 0
        limit = 0
        if kind in ("verifies", "behind"):
            before = chance.randint(0, min(known - 2, 5))
            slack = before + chance.randint(0, 3)
            drafts = chance.randint(1, 5) if kind == "verifies" else 0
            slack = slack or (kind == "behind")
            limit = known + chance.choice((0, 1, 2, 3, 20))
        count = chance.randint(1, known) if kind in ("prompt", "chunk") else 1
        begin = known - count - before
        samples = kind != "chunk"
        step = RowStep(row, 1, begin, count + drafts, samples, drafts, slack, limit)
        most = -(-(begin + slack + count + drafts + 1) // BLOCK)
        state.install(RowInstall(row, 1, row, text, known, [[next(blocks) for _ in range(most)]]))
        steps.append(step)
        lengths[row] = known
        # What other rows have left is of no meaning.
        state.lengths[row] = known if slack else 10**6
    state.flush()
    return Rows(state, StepPlan(1, [], [], steps), lengths)


def copy_of(state: RowState) -> RowState:
    """The same rows, in memory of their own."""
    other = RowState(max_num_seqs=ROWS, max_model_len=ROOM, block_size=BLOCK, device=CPU)
    other.tokens.copy_(state.tokens)
    other.block_tables.copy_(state.block_tables)
    other.lengths.copy_(state.lengths)
    return other


def on_host(rows: Rows) -> tuple[RowState, Speculation, Verification | None]:
    """What the host does with the plan, which knows the lengths."""
    state = copy_of(rows.state)
    drafter = Lookup(least=LEAST, longest=LONGEST)
    made = Speculation((drafter,), state.tokens.numpy(), FREE, POISON, Widths(always=True))
    made._lengths = dict(rows.lengths)
    return state, made, made.begin(rows.plan)


def on_device(state: RowState, plan: StepPlan, shape: StepShape) -> tuple[StepInputs, Drafts]:
    numbers = torch.from_numpy(host_numbers(plan, shape.num_rows, state.padding_row))
    most = shape.width - 1
    propose = partial(_look_up, most=most)
    return draft(numbers, shape, state, propose)


def _look_up(tokens: Tensor, rows: Tensor, lengths: Tensor, wanted: Tensor, most: int) -> Tensor:
    # A kernel takes what lies side by side.
    assert all(each.is_contiguous() for each in (tokens, rows, lengths, wanted))
    return look_up(tokens, rows, lengths, wanted, LEAST, LONGEST, most)


def padded(plan: StepPlan, padding: int) -> StepShape:
    """The shape of a captured step: more rows, more tokens, and the bounds of any row."""
    shape = shape_of(plan)
    return StepShape(
        num_rows=shape.num_rows + padding,
        width=shape.width + padding,
        num_tokens=shape.num_tokens + 3 * padding,
        max_query_len=shape.max_query_len + padding,
        max_seq_len=ROOM if padding else shape.max_seq_len,
    )


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("seed", range(60))
def test_the_device_makes_the_step_that_the_host_makes(seed: int, padding: int) -> None:
    rows = rows_of(seed)
    expected_state, speculation, verification = on_host(rows)
    plan = rows.plan if verification is None else verification.plan
    index = list(range(len(rows.plan.rows))) if verification is None else verification.index
    inputs, step = on_device(rows.state, rows.plan, padded(rows.plan, padding))
    state = rows.state
    assert torch.equal(state.tokens, expected_state.tokens)
    lens = inputs.query_start_loc.diff().tolist()
    assert [lens[at] > 0 for at in range(len(index))] == [each >= 0 for each in index]
    assert lens[len(index) :] == [0] * padding
    assert inputs.max_query_len >= max(lens)
    total = sum(lens)
    # Padding is written nowhere, and lies in the padding row.
    assert (inputs.slot_mappings_t[0][total:] == POISON).all()
    assert (inputs.input_ids_t[total:] == 0).all()
    if not plan.rows:
        assert total == 0
        return
    expected = build_inputs(plan, expected_state)
    assert torch.equal(inputs.input_ids_t[:total], expected.input_ids_t)
    assert torch.equal(inputs.positions_t[:total], expected.positions_t)
    assert torch.equal(inputs.slot_mappings_t[0][:total], expected.slot_mappings_t[0])
    computing = [at for at, each in enumerate(index) if each >= 0]
    assert [lens[at] for at in computing] == expected.query_start_loc.diff().tolist()
    assert inputs.seq_lens_b[computing].tolist() == expected.seq_lens_b.tolist()
    assert inputs.max_seq_len >= int(inputs.seq_lens_b.max())
    # The entries that are read are those that the host samples, in its order.
    width = step.width
    entries = [
        at * width + place for at in computing for place in range(plan.rows[index[at]].num_sampled)
    ]
    assert inputs.sample_index_s[entries].tolist() == expected.sample_index_s.tolist()
    assert step.sampled_positions_e[entries].tolist() == expected.samplers.positions
    assert step.sampled_rows_e[entries].tolist() == list(expected.samplers.rows)
    assert (inputs.sample_index_s < len(inputs.input_ids_t)).all()
    # The host has bounds for those positions.
    known_to_host = sampled_batch(rows.plan, width, step.sampled_positions_e)
    assert len(known_to_host.rows) == len(rows.plan.rows) * width
    for at in entries:
        assert known_to_host.rows[at] == step.sampled_rows_e[at]
        assert known_to_host.positions[at] >= step.sampled_positions_e[at]

    # What is accepted is what the host accepts, of whatever was sampled.
    random_ = torch.Generator().manual_seed(seed)
    sampled = torch.randint(-1, 5, (len(expected.samplers.rows),), generator=random_)
    right = torch.rand(sampled.shape, generator=random_) < 0.8
    # Most drafts are right.
    wanted = expected_state.tokens[expected.sampled_rows_s, expected.sampled_positions_s]
    sampled = torch.where(right & (wanted >= 0), wanted.long(), sampled)
    token_ids_e = torch.full((step.sampled_rows_e.numel(),), 3)
    token_ids_e[entries] = sampled
    expected_state.scatter_tokens(expected.sampled_rows_s, expected.sampled_positions_s, sampled)
    made = verification or Verification(plan, [None] * len(plan.rows), index)
    speculation.settle(made, sampled.tolist())
    drafted = state.tokens.clone()
    others = token_ids_e.roll(1)
    for given in (others, token_ids_e):
        # Drawn once more: the drafts are there again, and nothing is left of the first time.
        restore_drafts(step, state)
        if given is token_ids_e:
            assert _equal_below(state.tokens, drafted, step)
        kept = accept(step, given, state).tolist()
    of_host = [0 if each < 0 else made.kept[each] for each in index]
    assert kept == of_host + [0] * padding
    assert torch.equal(state.tokens[: state.padding_row], expected_state.tokens[:-1])
    assert (state.tokens[state.padding_row] == 0).all()
    for row, length in speculation._lengths.items():
        if any(each.row == row and each.samples for each in plan.rows):
            assert state.lengths[row] == length


def _equal_below(tokens: Tensor, expected: Tensor, step: Drafts) -> bool:
    """Whether rows have the same tokens up to the end of their drafts."""
    ends = (step.known_b + step.counts_b.clamp(min=0)).tolist()
    return all(
        torch.equal(tokens[row, :end], expected[row, :end])
        for row, end in zip(step.rows_b.tolist(), ends, strict=True)
    )


def test_a_length_of_an_owner_before_is_not_believed() -> None:
    """After a failed step the length of a row may be any; its blocks are those of the plan."""
    rows = rows_of(3)
    plan = StepPlan(1, [], [], [RowStep(0, 1, 4, 3, True, 2, 3, 60)])
    for length, known in ((0, 5), (6, 6), (10**6, 8)):
        rows.state.lengths[0] = length
        _, step = on_device(rows.state, plan, shape_of(plan))
        assert step.known_b.tolist() == [known]


def test_the_numbers_of_a_plan_say_which_rows_have_bounds() -> None:
    plan = StepPlan(1, [], [], [RowStep(2, 1, 4, 3, True, 2, 1, 9), RowStep(1, 1, 0, 5, False)])
    numbers = host_numbers(plan, 3, ROWS)
    largest = np.iinfo(np.int32).max
    assert numbers.T.tolist() == [
        [2, 4, 1, 2, 1, 9, 1],
        [1, 0, 5, 0, 0, largest, 0],
        [ROWS, 0, 0, 0, 0, 0, 0],
    ]
