"""A row that no step can compute ends its own request, and nobody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from src import AsyncEngine, GenerationResult, SamplingParams
from src.core.config import CompileSection, Config
from src.core.errors import GenerationError
from src.core.request import Request
from src.core.structured_output import StructuredOutput
from src.engine.requests.prompts import RequestBuilder
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BAD = 311  # a token whose embedding is no number
PROMPTS = [[5, 6, 7], [8, 9], [10] * 9]
CODES = {
    "uncompiled": CompileSection(enforce_eager=True),
    "compiled": CompileSection(startup="wait"),
}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose arithmetic goes wrong for whoever has the token `BAD`."""
    path = make_checkpoint(
        tmp_path_factory.mktemp("bad_rows") / "tiny", tokenizer=True, num_hidden_layers=2
    )
    file = path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    return path


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def config(spoilt: Path, request: pytest.FixtureRequest) -> Config:
    return small_config(spoilt, scheduler__pipeline_depth=request.param)


async def beside(engine: AsyncEngine, bad: Any) -> BaseException | GenerationResult:
    """What a bad request ends with, beside others, who get what they get without it."""

    async def others() -> list[list[int]]:
        results = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS))
        return [result.token_ids for result in results]

    alone = await others()
    together = asyncio.create_task(others())
    # They are under way.
    while engine.stats.num_running < len(PROMPTS):
        await asyncio.sleep(0)
    (outcome,) = await asyncio.gather(bad, return_exceptions=True)
    assert await together == alone
    assert engine.metrics.value("slipstream_step_failures_total") == 0
    assert engine.status.ready
    await idle(engine)
    return outcome


async def idle(engine: AsyncEngine) -> None:
    await Probe(engine).idle()
    assert_idle(engine)


def failures(engine: AsyncEngine, reason: str) -> float:
    return engine.metrics.value("slipstream_row_failures_total", reason=reason)


SLIPPED: dict[str, dict[str, Any]] = {
    "a token beyond the vocabulary": {"prompt_token_ids": [4, 320, 4]},
    "a seed beyond 64 bits": {"seed": 1 << 70},
    "a bad word beyond 32 bits": {"bad_words_token_ids": ((1 << 40, 4),)},
    "a temperature that is text": {"temperature": "hot"},
    "min_p below 0": {"min_p": -1.0, "temperature": 1.0},
    "a negative number of log-probabilities": {"logprobs": -3},
    "too many log-probabilities": {"prompt_logprobs": 1 << 40},
    "a bias that is text": {"logit_bias": {5: "much"}},
    "a biased token that is text": {"logit_bias": {"five": 1.0}},
    "min_tokens that are text": {"min_tokens": "many"},
}
# Whoever would turn their output into text cannot begin with it.
UNREADABLE: dict[str, dict[str, Any]] = {
    "a negative token": {"prompt_token_ids": [4, -1, 4]},
    "a token beyond 32 bits": {"prompt_token_ids": [4, 1 << 40]},
    "a token beyond 64 bits": {"prompt_token_ids": [4, 1 << 80]},
    "a token that is no number": {"prompt_token_ids": [4, "a"]},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "end tokens outside of the vocabulary": {"stop_token_ids": (320, -1, 1 << 80), "min_tokens": 2},
    "biased tokens outside of the vocabulary": {"logit_bias": {320: 1.0, -1: 1.0, 5: -1.0}},
    "allowed tokens outside of the vocabulary": {"allowed_token_ids": (320, 5, 6)},
    "bad words outside of the vocabulary": {"bad_words_token_ids": ((320,), (-1,), (320, 5))},
    "an infinite temperature": {"temperature": float("inf"), "allowed_token_ids": (5, 6)},
    "top_k beyond 64 bits": {"top_k": 1 << 70, "temperature": 1.0},
    "a temperature that is no number": {"temperature": float("nan")},
    "a negative top_p": {"top_p": -1.0, "temperature": 1.0},
    "top_p over 1": {"top_p": 3.0, "temperature": 1.0},
}
UNSOUND: dict[str, dict[str, Any]] = {
    "a bias that is no number": {"logit_bias": {5: float("nan")}},
    "an infinite bias": {"logit_bias": {5: float("inf")}},
    "a repetition penalty that is no number": {"repetition_penalty": float("nan")},
}


def slip(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> list[int]:
    """Have the request whose prompt is returned built with what no validation has seen."""
    prompt = [4, 4, 4]
    build = RequestBuilder.requests

    async def built(
        self: RequestBuilder, ids: list[int], *given: Any, **more: Any
    ) -> list[Request]:
        requests = await build(self, ids, *given, **more)
        if ids != prompt:
            return requests
        own = {name: changes[name] for name in changes if hasattr(requests[0], name)}
        asked = {name: value for name, value in changes.items() if name not in own}
        return [
            msgspec.structs.replace(
                each, **own, params=msgspec.structs.replace(each.params, **asked)
            )
            for each in requests
        ]

    monkeypatch.setattr(RequestBuilder, "requests", built)
    return prompt


@pytest.mark.parametrize("changes", SLIPPED.values(), ids=SLIPPED)
async def test_what_slipped_through_is_refused_a_row_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prompt = slip(monkeypatch, changes)
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate(prompt, PARAMS))
        assert isinstance(outcome, GenerationError), outcome
        assert outcome.code == "row_refused"
        assert failures(engine, "refused") == 1


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
async def test_what_is_not_even_queued_fails_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prompt = slip(monkeypatch, changes)
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate(prompt, PARAMS))
        assert isinstance(outcome, OverflowError | TypeError), outcome


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
async def test_what_slipped_through_and_means_nothing_disturbs_nobody(
    config: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prompt = slip(monkeypatch, changes)
    # Where it draws, not the token that is no number.
    params = msgspec.structs.replace(PARAMS, logit_bias={BAD: -100.0})
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate(prompt, params))
        assert isinstance(outcome, GenerationResult), outcome


@pytest.mark.parametrize("changes", UNSOUND.values(), ids=UNSOUND)
async def test_parameters_that_leave_no_choice_end_their_own_request(
    config: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prompt = slip(monkeypatch, changes)
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate(prompt, PARAMS))
        assert isinstance(outcome, GenerationError), outcome
        assert outcome.code == "invalid_logits"
        assert failures(engine, "logits") == 1


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "with log-probabilities": {"logprobs": 2},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.5},
    "penalized": {"repetition_penalty": 1.5, "presence_penalty": 1.0},
    "allowed tokens": {"allowed_token_ids": (5, 6)},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False},
    "constrained": {"structured_output": StructuredOutput.regex("[a-z ]{1,200}")},
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_logits_that_are_no_numbers_end_their_own_request(
    config: Config, code: str, asked: dict[str, Any]
) -> None:
    config = msgspec.structs.replace(config, compile=CODES[code])
    params = msgspec.structs.replace(PARAMS, **asked)
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate([4, BAD, 4], params))
        assert isinstance(outcome, GenerationError), outcome
        assert outcome.code == "invalid_logits"
        assert "NaN" in outcome.message
        assert failures(engine, "logits") == 1


async def test_log_probabilities_of_a_prompt_are_numbers_or_an_error(config: Config) -> None:
    params = msgspec.structs.replace(PARAMS, prompt_logprobs=1, max_tokens=1)
    async with AsyncEngine.open(config) as engine:
        outcome = await beside(engine, engine.generate([4, BAD, 4], params))
        assert isinstance(outcome, GenerationError), outcome
        assert outcome.code == "invalid_logits"


async def test_a_constrained_neighbour_goes_on(config: Config) -> None:
    """The grammars of a batch are followed together: a row without a token leaves it alone."""
    form = StructuredOutput.regex("[a-z ]{30,200}")
    params = msgspec.structs.replace(PARAMS, structured_output=form, logit_bias={BAD: -100.0})
    async with AsyncEngine.open(config) as engine:
        alone = await engine.generate([5, 6, 7], params)
        tasks = [
            asyncio.create_task(engine.generate(prompt, params))
            for prompt in ([5, 6, 7], [4, BAD, 4], [5, 6, 7])
        ]
        good, bad, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, GenerationError), bad
        for result in (good, other):
            assert isinstance(result, GenerationResult), result
            assert result.token_ids == alone.token_ids
        await idle(engine)
