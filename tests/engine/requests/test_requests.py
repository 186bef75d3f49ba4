"""Life of a request: streams, ends, refusals, aborts, and that nobody else is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src import AsyncEngine, ChatOptions, FinishReason, SamplingParams
from src.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    ShuttingDownError,
)
from src.engine.execution.step_computer import StepComputer
from src.engine.requests.prompts import _OPTION_TYPES, RequestOptions
from src.engine.scheduling.scheduler import Scheduler
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        yield engine
        await until_idle(engine)
        assert_idle(engine)


async def until_running(engine: AsyncEngine, count: int = 1) -> None:
    while engine.stats.num_running < count:
        await asyncio.sleep(0)


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats.num_running or engine.stats.kv_usage:
        await asyncio.sleep(0.001)


async def test_a_checkpoint_says_how_much_output_there_is_by_default(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    generation = tmp_path / "model" / "generation_config.json"
    values = json.loads(generation.read_text()) if generation.is_file() else {}
    generation.write_text(json.dumps({**values, "max_new_tokens": 5}))
    async with AsyncEngine.open(small_config(tmp_path / "model")) as engine:
        room = engine.model_info.max_model_len - 3
        for asked, prompt_len, tokens in ((None, 3, 5), (9, 3, 9), (None, room, 3)):
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asked)
            result = await engine.generate([7] * prompt_len, params)
            assert len(result.token_ids) == tokens
            assert result.finish_reason is FinishReason.LENGTH


async def test_a_checkpoint_says_how_tokens_are_chosen_by_default(
    checkpoint: Path, tmp_path: Path
) -> None:
    said = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}
    for does_sample, expected in (
        (True, said),
        (False, {"temperature": 0.0, "repetition_penalty": 1.3}),
    ):
        directory = tmp_path / str(does_sample)
        shutil.copytree(checkpoint, directory)
        generation = json.dumps({**said, "do_sample": does_sample})
        (directory / "generation_config.json").write_text(generation)
        async with AsyncEngine.open(small_config(directory)) as engine:
            assert engine.model_info.default_sampling == expected


async def test_streamed_pieces_join_to_the_whole(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=1.2, seed=7, max_tokens=60, n=3, logprobs=1)
    whole = await engine.generate("Once upon a time", params)
    texts, ids, ends = [""] * 3, [[], [], []], [None] * 3
    async for delta in engine.stream("Once upon a time", params):
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        assert delta.logprobs is not None
        assert len(delta.logprobs) == len(delta.token_ids)
        ends[delta.index] = delta.finish_reason
    assert texts == [completion.text for completion in whole.completions]
    assert ids == [completion.token_ids for completion in whole.completions]
    assert ends == [completion.finish_reason for completion in whole.completions]
    assert len({tuple(tokens) for tokens in ids}) == 3
    assert whole.usage.completion_tokens == sum(map(len, ids))


async def test_a_prompt_is_text_or_ids_or_messages(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "Hello"}]
    text = engine.tokenizer.chat_template.render(messages)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    of_messages = await engine.generate(messages, params)
    of_ids = await engine.generate(ids, params)
    assert of_messages.prompt_token_ids == ids
    assert of_messages.token_ids == of_ids.token_ids
    of_text = await engine.generate("Hello", params)
    assert of_text.prompt_token_ids == engine.tokenizer.encode("Hello")


async def test_seeded_requests_repeat_alone_in_a_batch_and_after_preemption(
    checkpoint: Path,
) -> None:
    prompts = random_prompts(10, longest=30, seed=9)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=30) for i in range(10)]

    async def run(*, alone: bool, **changes: Any) -> list[list[int]]:
        async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
            if alone:
                results = [await engine.generate(p, q) for p, q in zip(prompts, params)]
            else:
                results = await asyncio.gather(
                    *(engine.generate(p, q) for p, q in zip(prompts, params))
                )
            if "cache__num_blocks" in changes:
                assert engine.stats.preemptions > 0
            assert_idle(engine)
            return [result.token_ids for result in results]

    alone = await run(alone=True, scheduler__pipeline_depth=1)
    assert await run(alone=False) == alone
    assert await run(alone=False, scheduler__pipeline_depth=1) == alone
    assert await run(alone=False, scheduler__max_num_batched_tokens=7) == alone
    tight = {"cache__num_blocks": 18, "model__max_model_len": 64}
    assert await run(alone=False, **tight) == alone
    assert await run(alone=False, **tight, scheduler__pipeline_depth=1) == alone


async def test_stop_strings_end_the_text_and_hide_themselves(
    engine: AsyncEngine, reference: Any
) -> None:
    prompt = random_prompts(1, longest=20, seed=11)[0]
    plain = await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=40))
    stop = plain.text[8:11]
    at = plain.text.index(stop)
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=40, stop=(stop,), include_stop_str_in_output=include
        )
        seen = ""
        async for delta in engine.stream(prompt, params):
            seen += delta.text
            assert include or stop not in seen
            last = delta
        assert seen == plain.text[: at + len(stop) * include]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
        result = await engine.generate(prompt, params)
        assert result.text == seen
        assert result.token_ids == plain.token_ids[: len(result.token_ids)]
        assert result.usage.completion_tokens == len(result.token_ids)


async def test_stop_tokens_min_tokens_and_ignore_eos(engine: AsyncEngine) -> None:
    prompt = random_prompts(1, longest=20, seed=12)[0]
    plain = await engine.generate(
        prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    )
    token = plain.token_ids[5]
    first = plain.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=(token,))
    stopped = await engine.generate(prompt, params)
    assert stopped.token_ids == plain.token_ids[: first + 1]
    completion = stopped.completions[0]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, token)
    late = await engine.generate(
        prompt,
        SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=(token,), min_tokens=20
        ),
    )
    assert len(late.token_ids) >= 20
    assert token not in late.token_ids[:20]
    assert len(plain.token_ids) == 30
    assert plain.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], SamplingParams(), InvalidRequestError, "prompt"),
        ("", SamplingParams(), InvalidRequestError, "prompt"),
        ([5, 320], SamplingParams(), InvalidRequestError, "prompt"),
        ([5, -1], SamplingParams(), InvalidRequestError, "prompt"),
        ([5, 1.5], SamplingParams(), InvalidRequestError, "prompt"),
        ([5] * 256, SamplingParams(), PromptTooLongError, "prompt"),
        ("x" * 3_000_000, SamplingParams(), PromptTooLongError, "prompt"),
        ([5] * 200, SamplingParams(max_tokens=57), PromptTooLongError, "max_tokens"),
        ([5], SamplingParams(temperature=float("nan")), InvalidRequestError, "temperature"),
        ([5], SamplingParams(top_p=-0.1), InvalidRequestError, "top_p"),
        ([5], SamplingParams(n=0), InvalidRequestError, "n"),
        ([5], SamplingParams(n=10**6), InvalidRequestError, "n"),
        ([5], SamplingParams(stop_token_ids=(320,)), InvalidRequestError, "stop_token_ids"),
        ([5], SamplingParams(logit_bias={320: 1.0}), InvalidRequestError, "logit_bias"),
        ([5], SamplingParams(stop=("",)), InvalidRequestError, "stop"),
        ([{"role": "user"}, 5], SamplingParams(), InvalidRequestError, None),
        ("\ud800", SamplingParams(), InvalidRequestError, None),
    ],
)
async def test_what_cannot_be_served_is_refused_and_disturbs_nobody(
    engine: AsyncEngine, prompt: Any, params: SamplingParams, error: type[Exception], param: str
) -> None:
    good = asyncio.create_task(
        engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    )
    with pytest.raises(error) as caught:
        await engine.generate(prompt, params)
    if param is not None:
        assert caught.value.param == param
    assert len((await good).token_ids) == 8


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_k": 2.5}, "top_k"),
        ({"logprobs": 2.5}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"stop": "text"}, "stop"),
        ({"bad_words": "text"}, "bad_words"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"seed": 2**63}, "seed"),
    ],
)
async def test_parameters_of_the_wrong_type_are_refused_by_name(
    engine: AsyncEngine, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate([5, 6], SamplingParams(**changes))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": {"role": "user"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": 0.0}, "timeout"),
        ({"priority": 2**70}, "priority"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
async def test_arguments_out_of_range_are_refused_by_name(
    engine: AsyncEngine, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate(**{"prompt": [5, 6], **arguments})
    assert caught.value.param == param


async def test_only_the_first_completion_scores_the_prompt(engine: AsyncEngine) -> None:
    prompt = list(range(10, 60))
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=1)
    plain = await engine.generate(prompt, SamplingParams(max_tokens=1))
    hits = engine.metrics.value("vllm:prefix_cache_hits_total")
    result = await engine.generate(prompt, params)
    assert plain.usage.cached_tokens == 0
    assert len(result.prompt_logprobs or []) == len(prompt)
    # The other two read the cache; the one that scores the prompt cannot, so the request has not
    # been spared the prompt.
    assert engine.metrics.value("vllm:prefix_cache_hits_total") - hits == 96
    assert result.usage.cached_tokens == 0


async def test_completions_share_their_parameters(engine: AsyncEngine) -> None:
    """What goes by them is made once."""
    for scores, count in ((None, 1), (1, 2)):
        params = SamplingParams(n=3, allowed_token_ids=(5, 6), prompt_logprobs=scores)
        requests = await Probe(engine).parts.builder.requests(
            [5, 6], params, arrival=0.0, priority=0, timeout=None, cache_salt=""
        )
        assert len({id(request.params) for request in requests}) == count
        assert requests[0].params is params


async def test_what_completions_find_of_each_other_is_no_saving(engine: AsyncEngine) -> None:
    prompt = list(range(100, 150))
    for cached in (0, 48):
        result = await engine.generate(prompt, SamplingParams(n=3, max_tokens=2))
        assert result.usage.cached_tokens == cached


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "a"),
        ("priority", None),
        ("priority", 1.5),
        ("timeout", "x"),
        ("cache_salt", 5),
        ("cache_salt", None),
        ("request_id", 7),
        ("chat", {"tools": []}),
        ("params", {"temperature": 0}),
    ],
)
async def test_what_a_program_gives_is_of_the_right_type(
    engine: AsyncEngine, name: str, value: Any
) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequestError, match=f"{name}: expected") as caught:
        await engine.generate([5, 6], **given)
    assert caught.value.param == name


async def test_an_option_that_there_is_not_is_no_option(engine: AsyncEngine) -> None:
    """A sampling parameter in the wrong place would be overlooked."""
    assert _OPTION_TYPES.keys() == RequestOptions.__annotations__.keys()
    given: dict[str, Any] = {"temperature": 0.0}
    with pytest.raises(TypeError, match="no option 'temperature'"):
        await engine.generate([5, 6], **given)
    nothing: dict[str, Any] = {"request_id": None, "timeout": None, "chat": None}
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    result = await engine.generate([5, 6], params, priority=np.int64(3), **nothing)
    assert len(result.token_ids) == 2


async def test_template_kwargs_may_not_shadow_fields(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate(
            [{"role": "user", "content": "x"}], chat=ChatOptions(template_kwargs={"tools": []})
        )
    assert caught.value.param == "chat_template_kwargs"


async def test_cancelling_the_awaiting_task_frees_memory_within_a_step(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, compute = threading.Event(), StepComputer.compute

    def held(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        goes_on.wait(60)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", held)
    task = asyncio.create_task(engine.generate([5, 6, 7], LONG))
    await until_running(engine)
    steps = engine.stats.num_steps
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert engine.stats.num_running <= 1
    goes_on.set()
    await until_idle(engine)
    # What was launched when the cancellation came, and nothing after it.
    await Probe(engine).idle()
    assert 1 <= engine.stats.num_steps - steps <= 2


async def test_abort_by_name_ends_the_reader(engine: AsyncEngine) -> None:
    task = asyncio.create_task(engine.generate([5, 6, 7], LONG, request_id="mine"))
    await until_running(engine)
    assert engine.abort("mine")
    with pytest.raises(RequestAbortedError, match="mine"):
        await task
    assert not engine.abort("mine")
    await until_idle(engine)


async def test_closing_a_stream_aborts(engine: AsyncEngine) -> None:
    async with contextlib.aclosing(engine.stream([5, 6, 7], LONG)) as stream:
        async for _ in stream:
            break
    await until_idle(engine)


async def test_a_reader_that_never_reads_gets_everything_at_once(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with engine.submit([5, 6, 7], params) as submission:
        while engine.stats.num_running or not engine.stats.num_steps:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        deltas = [delta async for delta in submission]
    assert len(deltas) == 1
    assert len(deltas[0].token_ids) == 50


async def test_a_deadline_ends_a_request_with_what_it_has(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint, scheduler__max_num_seqs=1)) as engine:
        running = asyncio.create_task(engine.generate([5, 6, 7], LONG))
        await until_running(engine)
        waiting = await engine.generate([5, 6], LONG, timeout=0.001)
        assert waiting.finish_reason is FinishReason.DEADLINE
        assert waiting.token_ids == []
        await running
        assert_idle(engine)


async def test_a_deadline_cuts_a_running_request_short_and_keeps_its_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        whole = await engine.generate([5, 6], LONG)
        async with engine.submit([5, 6], LONG, timeout=600) as submission:
            deltas = await submission.take()
            # Ten minutes go by at once, whatever the machine does.
            expire = Scheduler.expire
            monkeypatch.setattr(Scheduler, "expire", lambda self, now: expire(self, now + 600))
            while deltas[-1].finish_reason is None:
                deltas += await submission.take()
        assert deltas[-1].finish_reason is FinishReason.DEADLINE
        cut = [token_id for delta in deltas for token_id in delta.token_ids]
        assert 0 < len(cut) < 30
        assert cut == whole.token_ids[: len(cut)]
        await until_idle(engine)
        assert_idle(engine)


async def test_the_queue_is_bounded(checkpoint: Path) -> None:
    config = small_config(checkpoint, scheduler__max_num_seqs=1, scheduler__max_waiting_requests=2)
    async with AsyncEngine.open(config) as engine:
        tasks = [asyncio.create_task(engine.generate([5, 6, 7], LONG))]
        await until_running(engine)
        tasks += [asyncio.create_task(engine.generate([5, 6, 7], LONG)) for _ in range(2)]
        while engine.stats.num_waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as caught:
            await engine.generate([5, 6, 7], LONG)
        assert caught.value.retry_after > 0
        # All or none of the completions of one request are queued.
        with pytest.raises(QueueFullError):
            await engine.generate([5, 6, 7], SamplingParams(n=2))
        # More than the queue can ever hold is not to be tried again.
        with pytest.raises(InvalidRequestError):
            await engine.generate([5, 6, 7], SamplingParams(n=3))
        assert engine.stats.num_waiting == 2
        results = await asyncio.gather(*tasks)
        assert len({tuple(result.token_ids) for result in results}) == 1
        assert_idle(engine)


async def test_a_thousand_requests_at_once_are_batched(checkpoint: Path, reference: Any) -> None:
    async with AsyncEngine.open(small_config(checkpoint, scheduler__max_num_seqs=64)) as engine:
        params = SamplingParams(temperature=0, max_tokens=5)
        prompts = [[5 + i % 10, 7, 9] for i in range(1000)]
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert engine.stats.num_steps < 200
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 5)


async def test_draining_finishes_what_runs_and_refuses_the_rest(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        task = asyncio.create_task(engine.generate([5, 6, 7], LONG))
        await until_running(engine)
        drain = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await engine.generate([5], LONG)
        await drain
        assert len((await task).token_ids) == 200


async def test_draining_aborts_what_takes_too_long(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        task = asyncio.create_task(engine.generate([5, 6, 7], LONG))
        await until_running(engine)
        await engine.drain(0.001)
        with pytest.raises(RequestAbortedError):
            await task
        assert_idle(engine)


async def test_random_traffic_leaves_nothing_behind(checkpoint: Path) -> None:
    """Many requests, some cancelled at random moments, in a pool that is too small for all."""
    import random

    source = random.Random(1)
    config = small_config(checkpoint, cache__num_blocks=40, model__max_model_len=96)
    before = asyncio.all_tasks()
    async with AsyncEngine.open(config) as engine:

        async def one(index: int) -> None:
            params = SamplingParams(
                temperature=source.choice((0.0, 0.9)), seed=index, max_tokens=source.randint(1, 40)
            )
            prompt = [source.randrange(3, 320) for _ in range(source.randint(1, 50))]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(source.choice((None, 0.01, 0.1, 0.3))):
                    result = await engine.generate(prompt, params)
                    assert len(result.token_ids) <= 40

        await asyncio.gather(*(one(index) for index in range(120)))
        await until_idle(engine)
        assert_idle(engine)
    assert asyncio.all_tasks() == before


async def test_after_close_nobody_is_admitted_and_nobody_hangs(checkpoint: Path) -> None:
    engine = AsyncEngine(small_config(checkpoint))
    engine.start()
    await engine.wait_ready()

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(EngineDeadError, ShuttingDownError):
                await engine.generate([5, 6, 7], LONG)
                continue
            if engine.status.phase == "closed":
                return

    clients = [asyncio.create_task(stubborn()) for _ in range(4)]
    await until_running(engine)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait_for(asyncio.gather(*clients), 20)
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    with pytest.raises(ShuttingDownError):
        await engine.generate([5], LONG)
    assert isinstance(await engine.wait_dead(), ShuttingDownError)
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.start()


async def test_draining_while_loading_admits_nobody_later(checkpoint: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = AsyncEngine(small_config(checkpoint))
        stack.push_async_callback(engine.close)
        engine.start()
        await engine.drain(1)
        with pytest.raises(ShuttingDownError):
            await engine.wait_ready()
        assert engine.status.phase == "draining"


async def test_draining_does_not_wait_for_a_device_that_hangs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    compute = StepComputer.compute

    def hanging(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        released.wait(30)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", hanging)
    monkeypatch.setattr("src.engine.client._ABORT_GRACE", 0.2)
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        task = asyncio.create_task(engine.generate([5, 6, 7], LONG))
        await until_running(engine)
        async with asyncio.timeout(60):
            await engine.drain(0.1)
        with pytest.raises(RequestAbortedError):
            await task
        released.set()
