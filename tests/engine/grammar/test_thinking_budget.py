"""A budget of thinking is kept to the token, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.core.errors import DeadEndError, InvalidRequestError
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking
from src.engine.grammar.thinking import RowThinking
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

TAG = "</think>"
OPEN = Thinking(openings=("<think>",), closings=(TAG,), is_open=True)
PROMPT = list(range(30, 50))
FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=[1, 2])
async def engine(
    request: pytest.FixtureRequest, checkpoint: Path, anyio_backend: str
) -> AsyncIterator[AsyncEngine]:
    config = one_rounding(checkpoint, scheduler__pipeline_depth=request.param)
    async with AsyncEngine.open(config) as opened:
        yield opened
        await ends_idle(opened)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def one_rounding(checkpoint: Path, **changes: Any) -> Config:
    """Tokens are compared with those of other steps; draws of any seed may be very close."""
    return small_config(checkpoint, model__deterministic=True, **changes)


async def ends_idle(engine: AsyncEngine) -> None:
    await Probe(engine).idle()
    assert_idle(engine)


def within(params: SamplingParams, budget: int, **thinking: Any) -> SamplingParams:
    bound = msgspec.structs.replace(OPEN, budget=budget, **thinking)
    return msgspec.structs.replace(params, thinking=bound)


def tag_of(engine: AsyncEngine) -> list[int]:
    token_ids = engine.tokenizer.encode(TAG, add_special_tokens=False)
    assert len(token_ids) > 1
    return token_ids


async def tokens(engine: AsyncEngine, params: SamplingParams, prompt: list[int]) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


async def expected(
    engine: AsyncEngine, params: SamplingParams, budget: int, prompt: list[int] = PROMPT
) -> list[int]:
    """As long as it may think what it would write anyway; the tag; what follows both."""
    assert params.max_tokens is not None
    tag = tag_of(engine)
    free = await tokens(engine, params, prompt)
    begun = [*free[:budget], *tag][: params.max_tokens]
    left = params.max_tokens - len(begun)
    if not left:
        return begun
    rest = msgspec.structs.replace(params, max_tokens=left)
    return begun + await tokens(engine, rest, [*prompt, *begun])


@pytest.mark.parametrize(
    "params",
    [
        FREE,
        SamplingParams(temperature=1, seed=11, max_tokens=30, ignore_eos=True),
        SamplingParams(
            temperature=0.8, top_k=30, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True
        ),
    ],
)
async def test_it_thinks_as_long_as_it_may_and_then_answers(
    engine: AsyncEngine, params: SamplingParams
) -> None:
    for budget in (0, 1, 9, 28, 100):
        wanted = await expected(engine, params, budget)
        result = await engine.generate(PROMPT, within(params, budget))
        assert result.token_ids == wanted, budget
        streamed: list[int] = []
        text = ""
        async for delta in engine.stream(PROMPT, within(params, budget)):
            streamed += delta.token_ids
            text += delta.text
        assert (streamed, text) == (wanted, result.text)
        if budget < 10:
            assert TAG in result.text


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    budgets=st.lists(st.integers(0, 25) | st.none(), min_size=2, max_size=8),
    seed=st.integers(0, 3),
)
def test_neighbours_with_any_budgets_are_as_alone(
    loop_engine: tuple[asyncio.AbstractEventLoop, AsyncEngine, dict[Any, list[int]]],
    budgets: list[int | None],
    seed: int,
) -> None:
    loop, engine, alone = loop_engine
    prompts = random_prompts(len(budgets), longest=20, seed=seed)
    params = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)

    def asked(budget: int | None) -> SamplingParams:
        return params if budget is None else within(params, budget)

    async def all_of_them() -> None:
        for prompt, budget in zip(prompts, budgets, strict=True):
            key = (tuple(prompt), budget)
            if key not in alone:
                alone[key] = await (
                    tokens(engine, params, prompt)
                    if budget is None
                    else expected(engine, params, budget, prompt)
                )
        results = await asyncio.gather(
            *(
                tokens(engine, asked(budget), prompt)
                for prompt, budget in zip(prompts, budgets, strict=True)
            )
        )
        assert results == [alone[tuple(p), b] for p, b in zip(prompts, budgets, strict=True)]

    loop.run_until_complete(all_of_them())


@pytest.fixture(scope="module")
def loop_engine(checkpoint: Path) -> Any:
    """An engine on a loop of its own, for a property that is no coroutine; few blocks."""
    loop = asyncio.new_event_loop()
    config = one_rounding(checkpoint, cache__num_blocks=28)
    manager = AsyncEngine.open(config)
    engine = loop.run_until_complete(manager.__aenter__())
    yield loop, engine, {}
    loop.run_until_complete(ends_idle(engine))
    loop.run_until_complete(manager.__aexit__(None, None, None))
    loop.close()


async def test_it_is_kept_by_whoever_was_preempted(checkpoint: Path) -> None:
    """So few blocks that rows are taken from requests, before and behind the end of thinking."""
    params = msgspec.structs.replace(FREE, max_tokens=48)
    prompts = [[index + 5, *range(60, 70)] for index in range(6)]
    for depth in (1, 2):
        config = one_rounding(checkpoint, scheduler__pipeline_depth=depth, cache__num_blocks=40)
        async with AsyncEngine.open(config) as engine:
            wanted = [await expected(engine, params, 9 + i, p) for i, p in enumerate(prompts)]
            before = engine.stats.preemptions
            results = await asyncio.gather(
                *(tokens(engine, within(params, 9 + i), p) for i, p in enumerate(prompts))
            )
            assert engine.stats.preemptions > before
            assert results == wanted
            await ends_idle(engine)


async def test_each_of_several_completions_has_the_budget(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=1, seed=7, n=4, max_tokens=24, ignore_eos=True)
    result = await engine.generate(PROMPT, within(params, 5))
    tag = tag_of(engine)
    assert len({tuple(c.token_ids) for c in result.completions}) == 4
    for index, completion in enumerate(result.completions):
        one = msgspec.structs.replace(params, n=1, seed=7 + index)
        assert completion.token_ids == await expected(engine, one, 5)
        assert completion.token_ids[5 : 5 + len(tag)] == tag


async def test_nothing_else_that_is_asked_for_keeps_it_from_ending(engine: AsyncEngine) -> None:
    tag = tag_of(engine)
    others = [token_id for token_id in range(40, 60) if token_id not in tag]
    for params in (
        msgspec.structs.replace(FREE, allowed_token_ids=tuple(others)),
        msgspec.structs.replace(FREE, logit_bias=dict.fromkeys(tag, -100.0)),
        msgspec.structs.replace(FREE, bad_words=(TAG,)),
        msgspec.structs.replace(FREE, presence_penalty=2.0, frequency_penalty=2.0),
        msgspec.structs.replace(FREE, min_tokens=30, ignore_eos=False),
        msgspec.structs.replace(FREE, temperature=1.0, seed=1, top_k=1, min_p=0.5),
    ):
        token_ids = await tokens(engine, within(params, 6), PROMPT)
        assert token_ids[6 : 6 + len(tag)] == tag
        assert token_ids[:6] == (await tokens(engine, params, PROMPT))[:6]
        if params.allowed_token_ids:
            assert set(token_ids[6 + len(tag) :]) <= set(others)


async def test_log_probabilities_are_the_models_own(engine: AsyncEngine) -> None:
    params = msgspec.structs.replace(FREE, logprobs=3)
    (completion,) = (await engine.generate(PROMPT, within(params, 4))).completions
    tag = tag_of(engine)
    logprobs = completion.logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == completion.token_ids
    # As the prompt's scores have them, of the same tokens.
    length = 4 + len(tag)
    scored = await engine.generate(
        [*PROMPT, *completion.token_ids[:length]],
        SamplingParams(max_tokens=1, prompt_logprobs=3),
    )
    assert scored.prompt_logprobs is not None
    for entry, same in zip(logprobs, scored.prompt_logprobs[len(PROMPT) :], strict=False):
        assert same is not None
        assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
    assert any(entry.rank > 1 for entry in logprobs[4:length])


async def test_a_form_begins_behind_the_thinking(engine: AsyncEngine) -> None:
    tag = tag_of(engine)
    rules = f'start: thought /[ab]{{4}}/\nthought[stop="{TAG}"]: /(.|\\n)*/\n'
    form = StructuredOutput.grammar(rules)
    for params in (FREE, msgspec.structs.replace(FREE, temperature=1.0, seed=4)):
        asked = msgspec.structs.replace(params, structured_output=form, ignore_eos=False)
        for budget in (0, 3, 10):
            result = await engine.generate(PROMPT, within(asked, budget))
            thought, _, answer = result.text.partition(TAG)
            assert set(answer) <= {"a", "b"}
            assert len(answer) == 4
            # A character that has begun is completed, though it take more tokens than there were.
            ends = [
                n for n in range(budget, budget + 4) if result.token_ids[n : n + len(tag)] == tag
            ]
            assert ends[0] == budget or "\ufffd" in engine.tokenizer.decode(
                result.token_ids[:budget], skip_special_tokens=False
            )
            assert TAG not in thought
            assert "\ufffd" not in thought


async def test_what_the_model_opens_by_itself_counts_from_there(engine: AsyncEngine) -> None:
    opening = engine.tokenizer.encode("<think>", add_special_tokens=False)
    form = StructuredOutput.grammar('start: "<think>" thought\nthought: /[ -~]*/\n')
    opens = msgspec.structs.replace(FREE, structured_output=form)
    written = await tokens(engine, opens, PROMPT)
    number = next(
        n
        for n in range(len(written))
        if "<think>" in engine.tokenizer.decode(written[:n], skip_special_tokens=False)
    )
    assert number >= len(opening)
    tag = tag_of(engine)
    for budget in (0, 5):
        token_ids = await tokens(engine, within(opens, budget, is_open=False), PROMPT)
        assert token_ids[: number + budget] == written[: number + budget]
        assert token_ids[number + budget :][: len(tag)] == tag
    # Without thinking there is nothing to end.
    free = await tokens(engine, FREE, PROMPT)
    assert await tokens(engine, within(FREE, 2, is_open=False), PROMPT) == free


async def test_stop_strings_wait_for_the_answer(engine: AsyncEngine) -> None:
    text = (await engine.generate(PROMPT, FREE)).text
    stop = text.strip()[2]
    assert (await engine.generate(PROMPT, msgspec.structs.replace(FREE, stop=(stop,)))).text != text
    asked = msgspec.structs.replace(within(FREE, 8), stop=(stop,))
    result = await engine.generate(PROMPT, asked)
    thought, tag, answer = result.text.partition(TAG)
    assert tag
    assert stop in thought
    assert stop not in answer
    assert result.completions[0].stop_reason in (stop, None)


@pytest.mark.parametrize("budget", [-1, 2**63, True, 1.5])
async def test_a_budget_is_a_number_of_tokens(engine: AsyncEngine, budget: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking"):
        await engine.generate(PROMPT, within(FREE, budget))


async def test_steps_wait_only_where_the_budget_may_be_spent(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    may_force = RowThinking.may_force

    def watched(self: RowThinking, rows: Any, positions: Any) -> bool:
        waited.append(may_force(self, rows, positions))
        return waited[-1]

    monkeypatch.setattr(RowThinking, "may_force", watched)
    await tokens(engine, within(FREE, 10), PROMPT)
    # At depth 2 who learns that it is over may do so a few steps late.
    assert waited[:10] == [False] * 10
    tag = tag_of(engine)
    assert all(waited[10 : 10 + len(tag)])
    assert len(tag) <= sum(waited) <= len(tag) + 3


async def test_thinking_that_could_not_be_followed_fails_alone(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = RowThinking.take
    asked = []

    def broken(self: RowThinking, rows: Any, token_ids: Any) -> None:
        asked.append(rows)
        if len(asked) == 3:
            raise MemoryError
        take(self, rows, token_ids)

    monkeypatch.setattr(RowThinking, "take", broken)
    with pytest.raises(DeadEndError, match="could not be followed"):
        await tokens(engine, within(FREE, 10), PROMPT)
    monkeypatch.undo()
    assert len(await tokens(engine, within(FREE, 10), PROMPT)) == 30
