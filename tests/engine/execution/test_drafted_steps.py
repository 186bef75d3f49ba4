"""Steps with drafts give rows whatever they ask for, as steps of one token do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.outputs import TokenLogprobs
from src.core.plan import RowResult, RowStep
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.execution import drafted_steps
from src.engine.execution.drafted_inputs import Propose, has_bounds
from src.engine.execution.drafted_steps import (
    DraftedSteps,
    Verdicts,
    read_rows,
    spread_masks,
)
from src.engine.execution.inputs import build_inputs
from src.engine.grammar.masks import RowMasks
from src.engine.sampling import SampleOutput
from src.ops import accept_drafts
from tests.engine.execution.graphs.test_verify import PROMPT, ROWS, Engine, Oracle, plan

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_k": 8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "frequency_penalty": 1.0, "logit_bias": {3: 2.0}, "logprobs": 0},
    {"temperature": 0.7, "min_p": 0.05},
]
BAD_WORDS = [(), ((7,), (3, 4)), (), ((1, 2), (9, 9))]


def install(engine: Engine, wishes: list[dict[str, Any]]) -> None:
    for row, wish in enumerate(wishes):
        request = DeviceRequest(
            key=row,
            prompt_len=PROMPT,
            params=SamplingParams(**wish),
            seed=row,
            bad_words_token_ids=BAD_WORDS[row],
        )
        engine.sampler.state.install(row, request, PROMPT)
    engine.sampler.state.flush()


def plainly(engine: Engine, until: int) -> list[list[TokenLogprobs | None]]:
    """One token after the other; the log-probabilities of each row."""
    found: list[list[TokenLogprobs | None]] = [[] for _ in range(ROWS)]
    for at in range(PROMPT - 1, until - 1):
        inputs = build_inputs(plan(*(RowStep(r, 1, at, 1, True) for r in range(ROWS))), engine.rows)
        logits = engine.logits(inputs, inputs.sample_index_s)
        samples = engine.sampler.sample(logits, inputs.samplers, engine.rows.tokens)
        where = inputs.sampled_rows_s, inputs.sampled_positions_s
        engine.rows.scatter_tokens(*where, samples.token_ids)
        for row, entry in enumerate(samples.logprob_lists()):
            found[row].append(entry)
    return found


@pytest.fixture
def checkpoint_of(checkpoint: Path, reference_attention: None) -> Iterator[Path]:
    with torch.inference_mode():
        yield checkpoint


@pytest.mark.parametrize("captures", [True, False], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("wrong", [0.0, 0.4])
@pytest.mark.parametrize("wishes", [WISHES, [{"temperature": 0.0}, *WISHES[1:]], [{}] * ROWS])
def test_rows_get_what_they_ask_for(
    checkpoint_of: Path, wishes: list[dict[str, Any]], wrong: float, captures: bool
) -> None:
    oracle = Oracle(wrong, seed=5)
    alone = Engine(checkpoint_of, oracle.proposing)
    install(alone, wishes)
    logprobs = plainly(alone, until=30)
    oracle.know(alone.rows.tokens)
    engine = Engine(checkpoint_of, oracle.proposing)
    install(engine, wishes)
    if captures:
        engine.pool.capture_all()
    steps = DraftedSteps(engine.forward, engine.rows, engine.sampler, oracle.proposing)
    given: list[list[int]] = [[] for _ in range(ROWS)]
    scored: list[list[TokenLogprobs]] = [[] for _ in range(ROWS)]
    chance, accepted, drafted = random.Random(2), 0, 0
    unread: list[list[RowResult]] = []
    for _ in range(12):
        # Launched in pairs, of which the second begins where the first one ends.
        rows = chance.sample(range(ROWS), chance.randint(1, ROWS))
        slack = dict.fromkeys(rows, 0)
        unread.clear()
        for number in range(2):
            made = []
            for row in rows:
                least = PROMPT + len(given[row]) + number
                if least >= 28:
                    continue
                drafts = chance.randint(1, min(5, 30 - least - 1))
                made.append(RowStep(row, 1, least - 1, 1 + drafts, True, drafts, slack[row], 30))
                slack[row] = drafts
            step_plan = plan(*made)
            if not made or not has_bounds(step_plan):
                continue
            graph = engine.pool.find(step_plan) if captures else None
            out = steps.compute(step_plan, engine.code, graph)
            verdicts = Verdicts(out.verdicts.numbers.clone(), out.verdicts.width)
            results, unsound = read_rows(step_plan, _kept(out.samples), verdicts, "suffix")
            assert not unsound
            unread.append(results)
        for results in unread:
            for result in results:
                given[result.row] += result.token_ids
                scored[result.row] += result.logprobs or []
                accepted += result.accepted
                drafted += result.drafted
                assert result.source == ("suffix" if result.drafted else "")
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == (wrong == 0)
    for row, wish in enumerate(wishes):
        count = len(given[row])
        assert count > 5
        assert given[row] == alone.rows.tokens[row, PROMPT:][:count].tolist()
        if "logprobs" not in wish:
            assert scored[row] == []
            continue
        for one, other in zip(scored[row], logprobs[row][:count], strict=True):
            assert other is not None
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def _kept(samples: SampleOutput) -> SampleOutput:
    """In memory of its own: the next replay overwrites it."""
    return SampleOutput(
        samples.token_ids.clone(), samples.logprobs, samples.scored, samples.top_counts
    )


def test_what_the_host_must_place_has_no_bounds(checkpoint_of: Path) -> None:
    oracle = Oracle(0, 0)
    engine = Engine(checkpoint_of, oracle.proposing)
    params = SamplingParams(min_tokens=4, temperature=0.0)
    request = DeviceRequest(
        key=0, prompt_len=PROMPT, params=params, seed=0, end_token_ids=frozenset({1})
    )
    install(engine, [{}] * ROWS)
    engine.sampler.state.install(0, request, PROMPT)
    steps = DraftedSteps(engine.forward, engine.rows, engine.sampler, oracle.proposing)
    bounded = RowStep(0, 1, PROMPT - 1, 3, True, 2, 0, 30)
    with pytest.raises(ValueError, match="row 0 has bounds"):
        steps.compute(plan(bounded), engine.code)
    # Beside rows with bounds it may be, and its end tokens are banned.
    exact = RowStep(0, 1, PROMPT - 1, 1, True)
    out = steps.compute(plan(exact, RowStep(1, 1, PROMPT - 1, 3, True, 2, 0, 30)), engine.code)
    assert [each.kept > 0 for each in out.verdicts.rows()] == [True, True]
    assert out.samples.token_ids[0] != 1
    # Once they are allowed, the position does not matter.
    later = RowStep(0, 1, PROMPT + 3, 3, True, 2, 0, 30)
    engine.rows.tokens[0, PROMPT : PROMPT + 4] = 5
    steps.compute(plan(later), engine.code)


def test_a_mask_is_for_the_first_entry_of_its_row() -> None:
    table = torch.tensor([[0b0110]], dtype=torch.int32)
    chunk = RowStep(3, 1, 0, 5, False)
    rows = plan(RowStep(0, 1, 5, 1, True, 0, 2, 9), chunk, RowStep(1, 1, 5, 1, True))
    masks = spread_masks(rows, RowMasks(table, [-1, 0], None, (), [1]), 2)
    assert list(masks.rows) == [-1, -1, -1, -1, 0, -1]
    assert list(masks.forced) == [4]
    added = masks.to(torch.device("cpu"), 4)
    assert added[4].tolist() == [-torch.inf, 0, 0, -torch.inf]
    assert (added[[0, 1, 2, 3, 5]] == 0).all()


def test_results_are_of_tokens_that_hold() -> None:
    steps = (
        RowStep(3, 7, 9, 3, True, 2, 1, 30),
        RowStep(1, 2, 9, 1, True),
        RowStep(0, 1, 4, 2, True, 1, 2, 6),
        RowStep(2, 1, 0, 5, False),
    )
    samples = SampleOutput(torch.tensor([5, 6, 7, -1, 9, 9, 4, 4, 4, 8, 8, 8]), None, (), ())
    numbers = torch.tensor([[2, 1, 0, 0, 0], [2, 0, -1, -1, -1], [4, 0, 0, 0, 0]])
    rows, unsound = read_rows(plan(*steps), samples, Verdicts(numbers.int(), 3), "ngram")
    assert rows == [
        RowResult(3, 7, [5, 6], drafted=2, accepted=1, source="ngram"),
        RowResult(1, 2, [-1]),
        RowResult(0, 1, []),
        RowResult(2, 1, []),
    ]
    assert unsound == [1]


def test_warming_up_compiles_every_width_and_changes_nothing(
    checkpoint_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(0, 0)
    engine = Engine(checkpoint_of, oracle.proposing)
    looked: list[int] = []
    accepted: list[int] = []

    def proposing(most: int) -> Propose:
        looked.append(most)
        return oracle.proposing(most)

    def accepting(*given: torch.Tensor) -> None:
        accepted.append(given[0].shape[1])
        accept_drafts(*given)

    monkeypatch.setattr(drafted_steps, "accept_drafts", accepting)
    before = engine.rows.tokens.clone(), engine.rows.lengths.clone()
    DraftedSteps(engine.forward, engine.rows, engine.sampler, proposing).warm_up(11)
    assert looked == [0, 1, 2, 4, 8, 11]
    assert accepted == [1, 2, 3, 5, 9, 12]
    assert torch.equal(engine.rows.tokens, before[0])
    assert torch.equal(engine.rows.lengths, before[1])
