"""Drafts in models with recurrent states: what is rejected leaves no trace in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.core.plan import RowStep
from src.core.step_message import DeviceRequest
from src.engine.execution.state_memory import StateMemory, StatePlan, plan_states
from src.engine.speculation import Speculation, Widths
from src.engine.speculation.choice import Traits, choose_speculation
from src.models.layer_kv import KVTensor, LayerKVSpec
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import (
    ASKED,
    PROMPTS,
    answer,
    ask,
    config,
    speculating,
    texts,
)
from tests.engine.speculation.test_verification import FREE, POISON, Counting, plan
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

FAMILIES = ("qwen3next", "granite_moehybrid", "lfm2")
# Each with the part of guesses that are spoiled: long and short runs of accepted drafts.
WAYS: dict[str, tuple[float, dict[str, Any]]] = {
    "depth 1": (0.9, {"scheduler__pipeline_depth": 1, "scheduler__max_num_seqs": 16}),
    "depth 2": (0.9, {"scheduler__max_num_seqs": 16}),
    "chunked": (0.3, {"scheduler__max_num_batched_tokens": 12}),
    "preempted": (0.3, {"cache__num_blocks": 24, "model__max_model_len": 80}),
    "uncached": (0.5, {"cache__enable_prefix_caching": False, "scheduler__max_num_seqs": 3}),
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_draft_changes_a_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=True)
    asked = list(zip(PROMPTS, ASKED.values(), strict=False))
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await ask(engine, asked)
    for way, (spoils, changes) in WAYS.items():
        adversary = Adversary(texts(asked, expected), seed=len(way), spoils=spoils)
        with monkeypatch.context() as patch:
            drafting = changes | speculating(patch, adversary)
            async with AsyncEngine.open(config(checkpoint, **drafting)) as engine:
                # The second time prompts are cached, with states that the first has left.
                for round_ in range(2):
                    results = await ask(engine, asked)
                    for name, got, wanted in zip(ASKED, results, expected, strict=True):
                        assert answer(got) == answer(wanted), (way, name, round_)
                await asyncio.wait_for(engine._loop.wait_idle(), 60)
                assert_idle(engine)
                accepted = sum(record.accepted_tokens for record in engine.timeline)
                drafted = sum(record.drafted_tokens for record in engine.timeline)
                assert 0 < accepted < drafted


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_conversation_goes_on_from_copies_that_are_sound(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are cached too, with states that were copied between drafts."""
    checkpoint = make_checkpoint(tmp_path, "qwen3next", tokenizer=True)
    params = SamplingParams(temperature=0, max_tokens=90, logprobs=1, ignore_eos=True)
    prompts = [prompt * 2 for prompt in PROMPTS[:4]]
    changes = {"scheduler__pipeline_depth": depth, "cache__block_size": 16}
    monkeypatch.setattr("src.engine.scheduling.admission.SNAPSHOT_TOKENS", 16)

    async def talk(engine: AsyncEngine) -> tuple[list[Any], int]:
        said, cached = [], 0
        tokens = [list(prompt) for prompt in prompts]
        for _ in range(2):
            results = await ask(engine, [(each, params) for each in tokens])
            said += [answer(result) for result in results]
            cached = sum(result.usage.cached_tokens for result in results)
            tokens = [
                [*each, *result.token_ids, 7] for each, result in zip(tokens, results, strict=True)
            ]
        return said, cached

    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected, cached_without = await talk(engine)
    prompted = [(prompt, params) for prompt in prompts]
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        known = texts(prompted, await ask(engine, prompted))
    changes |= speculating(monkeypatch, Adversary(known, seed=1))
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        said, cached = await talk(engine)
    assert said == expected
    # Behind the prompts.
    assert min(cached, cached_without) > sum(map(len, prompts)) + 4 * 32


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("method", ["suffix", "ngram", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_real_drafters_take_fewer_steps(method: str, family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=True)
    params = SamplingParams(
        temperature=0, logit_bias={5: 60.0}, max_tokens=60, logprobs=1, ignore_eos=True
    )
    found = []
    for which in ("off", method):
        async with AsyncEngine.open(config(checkpoint, speculation__method=which)) as engine:
            result = await engine.generate([5, 5, 6, 5, 5], params)
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            found.append((answer(result), len(list(engine.timeline))))
    (off, steps), (on, fewer) = found
    assert on == off
    assert fewer < steps


# The pure part: from where a row is computed.


class Kept:
    """States that know which tokens they have."""

    def __init__(self, num_backups: int = 8) -> None:
        self.num_backups = num_backups
        self.kept: list[list[int]] = []
        self.restored: list[list[int]] = []

    def back_up(self, rows: Sequence[int]) -> None:
        assert len(rows) <= self.num_backups
        self.kept.append(list(rows))

    def restore(self, rows: Sequence[int]) -> None:
        self.restored.append(list(rows))


def drafting(rows: int, states: Kept, room: int = 60) -> tuple[Speculation, np.ndarray]:
    """Rows of tokens 10 to 13, and guesses of those that follow."""
    tokens = np.full((rows, room), POISON, np.int32)
    tokens[:, :4] = range(10, 14)
    made = Speculation((Counting(),), tokens, FREE, POISON, Widths(always=True), states=states)
    return made, tokens


def take(made: Speculation, tokens: np.ndarray, step: RowStep, sampled: list[int]) -> RowStep:
    """Run a step of one row, and return what was computed of it."""
    verification = made.begin(plan(step))
    if verification is None:
        return step
    [exact] = verification.plan.rows
    end = exact.start + exact.num_tokens + 1
    # Behind the first wrong one it does not matter what is sampled.
    sampled = [*sampled, *[300] * exact.num_sampled][: exact.num_sampled]
    tokens[exact.row, end - len(sampled) : end] = sampled
    made.settle(verification, sampled)
    return exact


def test_behind_wrong_drafts_a_row_begins_where_its_states_stand() -> None:
    states = Kept()
    made, tokens = drafting(1, states)
    first = take(made, tokens, RowStep(0, 1, 3, 4, True, 3, 0, 50), [14, 15, 99, 17])
    assert first == RowStep(0, 1, 3, 4, True, 3)
    assert (states.kept, states.restored) == ([[0]], [[0]])
    # Two drafts were right, so there are three tokens more, and the states have none of them.
    second = take(made, tokens, RowStep(0, 1, 4, 1, True, 0, 3, 50), [50])
    assert second == RowStep(0, 1, 3, 4, True, again=3)
    assert states.kept[1:] == [[]]
    assert take(made, tokens, RowStep(0, 1, 7, 1, True), [51]) == RowStep(0, 1, 7, 1, True)


def test_a_plan_without_drafts_is_not_exact_while_states_are_behind() -> None:
    made, tokens = drafting(1, Kept())
    take(made, tokens, RowStep(0, 1, 3, 4, True, 3, 0, 50), [99])
    assert take(made, tokens, RowStep(0, 1, 4, 1, True), [50]) == RowStep(0, 1, 3, 2, True, again=1)
    assert made.begin(plan(RowStep(0, 1, 5, 1, True))) is None


def test_all_right_drafts_leave_states_where_they_are() -> None:
    states = Kept()
    made, tokens = drafting(1, states)
    take(made, tokens, RowStep(0, 1, 3, 4, True, 3, 0, 50), [14, 15, 16, 17])
    assert states.restored == []
    assert take(made, tokens, RowStep(0, 1, 7, 1, True), [18]) == RowStep(0, 1, 7, 1, True)


def test_drafts_behind_tokens_that_are_computed_again_may_be_wrong_too() -> None:
    states = Kept()
    made, tokens = drafting(1, states)
    take(made, tokens, RowStep(0, 1, 3, 4, True, 3, 0, 50), [14, 99])
    second = take(made, tokens, RowStep(0, 1, 5, 4, True, 3, 0, 50), [100, 101, 50])
    assert second == RowStep(0, 1, 3, 6, True, 3, again=2)
    # From the same place, since states were kept there last.
    third = take(made, tokens, RowStep(0, 1, 8, 1, True), [60])
    assert third == RowStep(0, 1, 3, 6, True, again=5)


def test_a_row_that_is_far_behind_catches_up_first() -> None:
    made, tokens = drafting(1, Kept())
    start, length = 3, 4
    for _ in range(3):
        # Seven of eight are right each time.
        last = int(tokens[0, length - 1])
        right = [*range(last + 1, last + 8), 500 + last]
        exact = take(made, tokens, RowStep(0, 1, length - 1, 9, True, 8, 0, 50), right)
        assert exact.start == start
        if exact.drafts == 0:
            break
        length += 8
    assert exact.drafts == 0
    assert exact.num_tokens == length - start > 9


def test_another_request_in_the_row_is_behind_nothing() -> None:
    made, tokens = drafting(1, Kept())
    take(made, tokens, RowStep(0, 1, 3, 4, True, 3, 0, 50), [99])
    made.install(0, None)
    assert made.begin(plan(RowStep(0, 2, 0, 3, True))) is None


def test_rows_that_were_preempted_behind_take_no_room_from_others() -> None:
    made, tokens = drafting(9, Kept())
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    # It loses row after row.
    for row in range(8):
        made.install(row, request)
        take(made, tokens, RowStep(row, 1, 3, 9, True, 8, 0, 50), [*range(14, 21), 99])
    made.install(8, request)
    assert take(made, tokens, RowStep(8, 1, 3, 9, True, 8, 0, 50), [99]).drafts == 8


def test_rows_that_ended_behind_take_no_room_from_others() -> None:
    made, tokens = drafting(9, Kept())
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    for row in range(8):
        take(made, tokens, RowStep(row, 1, 3, 9, True, 8, 0, 50), [*range(14, 21), 99])
        made.leave(row, request)
    assert take(made, tokens, RowStep(8, 1, 3, 9, True, 8, 0, 50), [99]).drafts == 8


def test_only_as_many_rows_draft_as_states_can_be_kept_of() -> None:
    states = Kept(num_backups=2)
    made, _ = drafting(4, states)
    steps = [
        RowStep(row, 1, 3, 1 + width, True, width, 0, 50) for row, width in enumerate((2, 4, 1, 3))
    ]
    verification = made.begin(plan(*steps))
    assert verification is not None
    assert [step.drafts for step in verification.plan.rows] == [0, 4, 0, 3]
    assert states.kept == [[1, 3]]


def test_few_tokens_are_computed_again_at_once() -> None:
    states = Kept(num_backups=30)
    made, _ = drafting(30, states)
    steps = [RowStep(row, 1, 3, 9, True, 8, 0, 50) for row in range(30)]
    verification = made.begin(plan(*steps))
    assert verification is not None
    # Of each row its last token and its drafts would be.
    assert sum(1 + step.drafts for step in verification.plan.rows if step.drafts) <= 64
    made.settle(verification, [99] * sum(step.num_sampled for step in verification.plan.rows))
    again = made.begin(plan(*[RowStep(row, 1, 4, 1, True) for row in range(30)]))
    assert again is not None
    assert again.plan.num_tokens - 30 <= 64


# Memory.

LAYER = LayerKVSpec(
    "recurrent states", (KVTensor("states", (4, 4), torch.float32),), per="sequence"
)
SLOT = 64


def test_states_are_kept_and_given_back() -> None:
    memory = StateMemory((LAYER,), StatePlan(SLOT, 3, 1, 2), torch.device("cpu"))
    states = memory.layers[0]["states"]
    assert len(states) == 6
    for row in range(3):
        states[row] = row + 1
    memory.back_up([2, 0])
    states[:4] = 9
    memory.restore([2])
    assert [int(each[0, 0]) for each in states[:4]] == [9, 9, 3, 9]
    memory.restore([0])
    assert [int(each[0, 0]) for each in states[:4]] == [1, 9, 3, 9]


@pytest.mark.parametrize(
    ("slots", "planned"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (16, (8, 6, 2)), (800, (8, 32, 8))]
)
def test_memory_of_kept_states_is_planned(slots: int, planned: tuple[int, int, int]) -> None:
    made = plan_states((LAYER,), 2 * slots * SLOT, 8, snapshots=True, backups=8)
    assert made == StatePlan(SLOT, *planned)
    assert made.total_bytes <= slots * SLOT
    assert ("rows with drafts" in str(made)) == (made.num_backups > 0)


@pytest.mark.parametrize("slots", [4, 12, 16, 24, 100])
def test_rows_with_drafts_take_no_rows_where_there_are_snapshots(slots: int) -> None:
    budget = 2 * slots * SLOT
    without = plan_states((LAYER,), budget, 40, snapshots=True)
    made = plan_states((LAYER,), budget, 40, snapshots=True, backups=8)
    assert made is not None
    assert without is not None
    assert made.num_rows == without.num_rows
    assert made.num_backups > 0
    assert made.num_slots <= slots


@pytest.mark.parametrize(
    ("slots", "rows", "planned"),
    [
        # Rows and snapshots: with few of them nobody drafts, and they are as many as with "off".
        (1, 40, (1, 0, 0)),
        (4, 40, (3, 1, 0)),
        (12, 40, (9, 3, 0)),
        (13, 40, (9, 3, 1)),
        # A quarter of the snapshots.
        (64, 40, (40, 18, 6)),
        # An eighth of all: more are unused, since rows have four snapshots each.
        (7, 1, (1, 4, 0)),
        (8, 1, (1, 4, 1)),
        (800, 40, (40, 160, 8)),
    ],
)
def test_rows_with_drafts_that_nobody_has_asked_for_take_what_can_be_spared(
    slots: int, rows: int, planned: tuple[int, int, int]
) -> None:
    budget = 2 * slots * SLOT
    spare = {"backups": 8, "backups_are_spare": True}
    made = plan_states((LAYER,), budget, rows, snapshots=True, **spare)
    assert made == StatePlan(SLOT, *planned)
    off = plan_states((LAYER,), budget, rows, snapshots=True)
    assert off is not None
    assert made.num_rows == off.num_rows
    assert made.num_snapshots >= off.num_snapshots * 3 / 4
    # Without snapshots they take no row's slot.
    for rows_only in (slots // 2, slots, 2 * slots):
        with_, without = (
            plan_states((LAYER,), budget, max(1, rows_only), snapshots=False, **asked)
            for asked in (spare, {})
        )
        assert with_ is not None
        assert without is not None
        assert with_.num_rows == without.num_rows
        assert with_.num_backups <= slots // 8


def test_a_model_that_cannot_keep_states_is_refused_by_name() -> None:
    section = SpeculationSection(method="suffix")
    traits = Traits("cpu", has_states=True)
    assert choose_speculation(section, traits, num_backups=1) is not None
    with pytest.raises(ConfigError, match=r"speculation\.method = suffix .*one sequence's"):
        choose_speculation(section, traits, num_backups=0)
    with pytest.raises(ConfigError, match=r"speculation\.method = suffix .*windows"):
        choose_speculation(section, traits._replace(has_windows=True), num_backups=1)
    auto = SpeculationSection(method="auto")
    assert choose_speculation(auto, traits, num_backups=0) is None
