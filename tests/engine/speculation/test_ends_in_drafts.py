"""Requests that end within a draft: at every token of it, by every rule, and by who goes away."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.outputs import FinishReason, GenerationResult
from src.core.plan import StepPlan
from src.engine.execution.step_computer import StepComputer
from src.engine.scheduling.request_state import RequestState
from src.engine.scheduling.scheduler import Scheduler
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.scripted import Continuing
from tests.engine.speculation.test_exactness import ASKED, answer, ask, config, speculating, texts
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompts, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

WIDTH = 6
# Where a text ends, as an index into its output: a whole draft fits before, and some behind.
END = 14
PROMPT = [*range(30, 39)]
FREE = SamplingParams(
    temperature=1.0,
    max_tokens=40,
    logprobs=2,
    ignore_eos=True,
    # Letters, so that the text has one for each token.
    allowed_token_ids=tuple(range(67, 93)),
)
# What ends a text there. The device knows nothing of stops; stop strings are found in the text.
RULES = ("token", "shown token", "string", "shown string", "string of two", "length", "context")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ends")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def free(checkpoint: Path) -> tuple[int, GenerationResult]:
    """A seed, and what is said with it where nothing ends it: the letter at `END` is new there."""

    async def run() -> tuple[int, GenerationResult]:
        async with AsyncEngine.open(config(checkpoint)) as engine:
            for seed in range(50):
                result = await engine.generate(PROMPT, FREE.__replace__(seed=seed))
                if result.text.find(result.text[END]) == END:
                    return seed, result
        raise AssertionError("no text has a new letter there")

    return asyncio.run(run())


def ended(rule: str, seed: int, result: GenerationResult) -> tuple[SamplingParams, dict[str, Any]]:
    """A request for the same text that ends at `END`, and the engine's settings for it."""
    params, text = FREE.__replace__(seed=seed), result.text
    params = params.__replace__(include_stop_str_in_output=rule.startswith("shown"))
    match rule:
        case "token" | "shown token":
            return params.__replace__(stop_token_ids=(result.token_ids[END],)), {}
        case "string" | "shown string":
            return params.__replace__(stop=(text[END],)), {}
        case "string of two":
            return params.__replace__(stop=(text[END - 1 : END + 1],)), {}
        case "length":
            return params.__replace__(max_tokens=END + 1), {}
    return params.__replace__(max_tokens=None), {"model__max_model_len": len(PROMPT) + END + 1}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rule", RULES)
async def test_a_text_ends_at_any_token_of_a_draft(
    rule: str,
    depth: int,
    checkpoint: Path,
    free: tuple[int, GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The draft goes on behind the end, as the text would; so does that of a step in flight."""
    seed, unended = free
    params, settings = ended(rule, seed, unended)
    settings |= {"scheduler__pipeline_depth": depth, "observability__log_requests": True}
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        wanted = await engine.generate(PROMPT, params)
    assert wanted.token_ids == unended.token_ids[: END + 1]
    caplog.set_level(logging.INFO, "src.requests")
    end = len(PROMPT) + END
    drafter = Continuing([*PROMPT, *unended.token_ids])
    settings |= speculating(monkeypatch, drafter)
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        for place in range(WIDTH + 1):
            caplog.clear()
            drafter.asked.clear()
            drafter.begins = partial(begins, end, place)
            got = await engine.generate(PROMPT, params)
            await until_idle(engine)
            assert answer(got) == answer(wanted), place
            assert got.completions[0].logprobs is not None
            assert len(got.completions[0].logprobs) == END + 1
            # The device itself ends by length. Behind a stop right drafts are none of the output.
            has_length = rule in ("length", "context")
            drafted = place if has_length else WIDTH
            accepted = place if has_length else min(WIDTH, place + 1)
            [record] = [each for each in caplog.records if each.name == "src.requests"]
            found = record.__dict__
            assert (found["drafted_tokens"], found["accepted_tokens"]) == (drafted, accepted), place
            assert drafter.asked
            if has_length:
                assert all(known + most <= end for known, most in drafter.asked)


def begins(end: int, place: int, known: int) -> bool:
    """One draft has the last token at this place; behind it there are others."""
    return known == end - place or known > end


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_request_goes_away_while_its_drafts_are_verified(
    depth: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device holds the step until the request is aborted, and all of its drafts are right."""
    names = ("greedy, scored", "seeded 1.5", "penalized", "stops")
    asked = list(zip(random_prompts(4, longest=20, seed=42), map(ASKED.get, names), strict=True))
    settings: dict[str, Any] = {"scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        wanted = await ask(engine, asked)  # type: ignore[arg-type]
    adversary = Adversary(texts(asked, wanted), seed=depth, spoils=0.0)  # type: ignore[arg-type]
    settings |= speculating(monkeypatch, adversary)
    loop, compute = asyncio.get_running_loop(), StepComputer.compute
    # What the next step with drafts does first.
    calls: list[Callable[[], object]] = []

    def held(self: StepComputer, plan: StepPlan, *arguments: Any, **named: Any) -> Any:
        if calls and plan.num_drafts:
            call, done = calls.pop(), threading.Event()
            loop.call_soon_threadsafe(lambda: (call(), done.set()))
            assert done.wait(60)
        return compute(self, plan, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", held)
    prompt, params = asked[0]
    assert params is not None
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        for others in (False, True):
            async with engine.submit(prompt, params) as submission:
                calls.append(submission.abort)
                beside = ask(engine, asked[1:] if others else [])  # type: ignore[arg-type]
                results, gone = await asyncio.gather(beside, submission.result())
            assert not calls
            assert gone.completions[0].finish_reason is FinishReason.ABORT
            said = gone.token_ids
            assert said == wanted[0].token_ids[: len(said)]
            for got, expected in zip(results, wanted[1:], strict=False):
                assert answer(got) == answer(expected)
            await until_idle(engine)
            # What it has left in the cache is its text.
            again = await engine.generate(prompt, params)
            assert answer(again) == answer(wanted[0])
        await until_idle(engine)


async def test_rows_are_taken_from_requests_whose_drafts_are_verified(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = ASKED["greedy, scored"].__replace__(max_tokens=50)
    asked = [(prompt, params) for prompt in random_prompts(16, longest=24, seed=43)]
    settings: dict[str, Any] = {"cache__num_blocks": 24, "model__max_model_len": 80}
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        wanted = await ask(engine, asked)
    slacks: list[int] = []
    preempt, compute = Scheduler._preempt, StepComputer.compute

    def noting(self: Scheduler, victim: RequestState) -> None:
        slacks.append(victim.slack)
        preempt(self, victim)

    def slow(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        # So that the next step is planned while this one is on its way.
        time.sleep(0.003)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt", noting)
    monkeypatch.setattr(StepComputer, "compute", slow)
    settings |= speculating(monkeypatch, Adversary(texts(asked, wanted), seed=2, spoils=0.2))
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        results = await ask(engine, asked)
        await until_idle(engine)
        assert sum(record.accepted_tokens for record in engine.timeline) > 0
    assert [answer(got) for got in results] == [answer(each) for each in wanted]
    assert max(slacks) > 0
