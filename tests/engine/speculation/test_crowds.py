"""Requests that come, go, wait and share while somebody drafts: nobody gets what is another's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src import AsyncEngine, SamplingParams
from src.core.errors import ModelNotFoundError, SlipstreamError
from src.core.outputs import FinishReason
from src.core.plan import StepPlan
from src.engine.execution.step_computer import StepComputer
from src.engine.speculation import Guess, Widths, verification
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.crowd import crowd
from tests.engine.speculation.scripted import Continuing
from tests.engine.speculation.test_exactness import ASKED, answer, ask, config, speculating, texts
from tests.engine.speculation.test_restricted import ASKED as RESTRICTED
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import random_prompts, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PROMPTS = random_prompts(6, longest=20, seed=61)
LONG = SamplingParams(temperature=0, max_tokens=60, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crowds")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_reference(checkpoint)
    return [str(make_adapter(folder / str(seed), model, seed=seed)) for seed in (1, 2)]


async def test_a_crowd_is_answered_as_each_of_it_alone(
    checkpoint: Path, adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions, predictions, adapters, salts, deadlines and aborts, in few rows and blocks."""
    drafted, accepted, _ = await crowd(
        checkpoint,
        7,
        partial(speculating, monkeypatch),
        count=36,
        adapters=("other", None),
        lora__adapters={"other": adapters[0]},
    )
    assert 0 < accepted < drafted


def in_step(
    patch: pytest.MonkeyPatch, call: Callable[[], object], *, beside: bool = True
) -> list[int]:
    """Do this while a step with drafts is held; the list has one entry once it was done.

    ``beside``: on the event loop's thread.
    """
    loop, compute = asyncio.get_running_loop(), StepComputer.compute
    done: list[int] = []

    def held(self: StepComputer, plan: StepPlan, *arguments: Any, **named: Any) -> Any:
        if plan.num_drafts and not done:
            done.append(plan.num_drafts)
            if beside:
                told = threading.Event()
                loop.call_soon_threadsafe(lambda: (call(), told.set()))
                assert told.wait(60)
            else:
                call()
        return compute(self, plan, *arguments, **named)

    patch.setattr(StepComputer, "compute", held)
    return done


async def test_an_adapter_is_unloaded_and_replaced_while_its_drafts_are_verified(
    checkpoint: Path, adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lora__adapters": {"first": adapters[0], "second": adapters[1]}}
    prompt = PROMPTS[0]
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        first, second, none = [
            await engine.generate(prompt, LONG, lora=name) for name in ("first", "second", None)
        ]
    known = texts([(prompt, LONG)] * 3, [first, second, none])
    assert known[0] != known[1]
    settings = {"lora__adapters": {"it": adapters[0]}, "lora__directories": (adapters[1],)}
    settings |= speculating(monkeypatch, Adversary(known, seed=1, spoils=0.2))
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        leaving: list[asyncio.Task[None]] = []
        done = in_step(
            monkeypatch,
            lambda: leaving.append(asyncio.ensure_future(engine.adapters.unload("it"))),
        )
        beside, got = await asyncio.gather(
            engine.generate(prompt, LONG), engine.generate(prompt, LONG, lora="it")
        )
        assert done
        await asyncio.wait_for(leaving[0], 60)
        assert answer(got) == answer(first)
        assert answer(beside) == answer(none)
        with pytest.raises(ModelNotFoundError):
            await engine.generate(prompt, LONG, lora="it")
        # Under the same name, and with the same prompt: nothing of the other is found.
        await engine.adapters.load("it", adapters[1])
        assert answer(await engine.generate(prompt, LONG, lora="it")) == answer(second)
        await until_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_deadline_passes_while_drafts_are_verified(
    depth: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = max(PROMPTS, key=len)
    settings: dict[str, Any] = {"scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        whole = await engine.generate(prompt, LONG)
    settings |= speculating(monkeypatch, Continuing(texts([(prompt, LONG)], [whole])[0]))
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        done = in_step(monkeypatch, lambda: time.sleep(0.9), beside=False)
        got = await engine.generate(prompt, LONG, timeout=0.6)
        assert done
        assert got.completions[0].finish_reason is FinishReason.DEADLINE
        said = got.token_ids
        assert len(said) < 60
        assert said == whole.token_ids[: len(said)]
        assert len(got.completions[0].logprobs or ()) == len(said)
        await until_idle(engine)
        assert answer(await engine.generate(prompt, LONG)) == answer(whole)


async def test_prefixes_are_forgotten_while_drafts_are_verified(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt, LONG) for prompt in PROMPTS]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        wanted = await ask(engine, asked)
    changes = speculating(monkeypatch, Adversary(texts(asked, wanted), seed=3))
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        done = in_step(monkeypatch, lambda: engine.inspector.reset_prefix_cache())
        for _ in range(2):
            results = await ask(engine, asked)
            assert [answer(got) for got in results] == [answer(each) for each in wanted]
        assert done
        await until_idle(engine)


async def test_an_engine_ends_while_drafts_are_verified(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and each request has an end."""
    changes = speculating(monkeypatch, Adversary([], seed=4))
    closing = asyncio.Event()
    done = in_step(monkeypatch, closing.set)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        calls = [asyncio.ensure_future(engine.generate(each, LONG)) for each in PROMPTS]
        await asyncio.wait_for(closing.wait(), 60)
    assert done
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert all(isinstance(each, SlipstreamError) for each in results)


class Beyond:
    """Guesses a text with other tokens put in at some place, and goes on behind its end."""

    def __init__(self, text: list[int]) -> None:
        self._text = text
        self.place, self.tokens = 0, [5]

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        rest = [*self._text[len(tokens) :], *([5] * most)]
        return Guess([*rest[: self.place], *self.tokens, *rest[self.place :]][:most], 1)


async def check_ends(
    checkpoint: Path, params: SamplingParams, patch: pytest.MonkeyPatch, **settings: Any
) -> list[int]:
    """Ask with end tokens and others at every place of a draft; returns the output."""
    prompt = PROMPTS[2]
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        wanted = await engine.generate(prompt, params)
    drafter = Beyond(texts([(prompt, params)], [wanted])[0])
    settings |= speculating(patch, drafter)
    async with AsyncEngine.open(config(checkpoint, **settings)) as engine:
        for place in range(6):
            for tokens in ([2], [2, 2, 5], [5], []):
                drafter.place, drafter.tokens = place, tokens
                got = await engine.generate(prompt, params)
                assert answer(got) == answer(wanted), (place, tokens)
        await until_idle(engine)
        # The first token is drawn with the prompt, and may be the last one.
        assert engine.metrics.draft_counts[1] > 0 or len(wanted.token_ids) < 3
    return wanted.token_ids


@pytest.mark.parametrize(
    ("name", "depth"),
    [("schema, scored", 2), ("regex", 2), ("regex that goes on", 2), ("choice", 2), ("choice", 1)],
)
async def test_a_grammar_ends_at_any_token_of_a_draft(
    name: str, depth: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = RESTRICTED[name]
    await check_ends(checkpoint, params, monkeypatch, scheduler__pipeline_depth=depth)


@pytest.mark.parametrize("least", [0, 1, 5, 9])
async def test_end_tokens_are_drafted_before_and_behind_min_tokens(
    least: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias makes the end the likeliest token, as soon as it is allowed."""
    params = SamplingParams(
        temperature=0, logit_bias={2: 40.0}, min_tokens=least, max_tokens=30, logprobs=2
    )
    said = await check_ends(checkpoint, params, monkeypatch)
    assert (len(said), said[-1]) == (least + 1, 2)


async def test_completions_with_a_prediction_go_away_one_by_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction serves all completions, and those that stay also when others are gone."""
    params = ASKED["several"].__replace__(n=4, logprobs=1, stop=("a",))
    async with AsyncEngine.open(config(checkpoint)) as engine:
        wanted = await engine.generate(PROMPTS[4], params)
    ends = {len(each.token_ids) for each in wanted.completions}
    assert len(ends) > 1
    longest = max(wanted.completions, key=lambda each: len(each.token_ids))
    changes = {"speculation__method": "suffix", "speculation__num_speculative_tokens": 6}
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        prediction = [*longest.token_ids]
        gone = asyncio.ensure_future(
            engine.generate(PROMPTS[4], params, prediction=prediction, request_id="gone")
        )
        done = in_step(monkeypatch, lambda: engine.abort("gone"))
        got = await engine.generate(PROMPTS[4], params, prediction=prediction)
        assert done
        with pytest.raises(SlipstreamError):
            await gone
        for some, other in zip(got.completions, wanted.completions, strict=True):
            assert (some.token_ids, some.text, some.stop_reason, some.logprobs) == (
                *(other.token_ids, other.text, other.stop_reason),
                other.logprobs,
            )
        assert got.usage.accepted_prediction_tokens
        await until_idle(engine)
