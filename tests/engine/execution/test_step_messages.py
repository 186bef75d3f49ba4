"""What the device half is told of a run is data: written down, it does the run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from src import AsyncEngine, SamplingParams
from src.core.plan import RowResult, StepResult
from src.core.request import Request
from src.core.step_message import DeviceRequest, StepMessage
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking
from src.engine.execution.in_flight import InFlight
from src.engine.execution.worker import Worker
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

THINKING = Thinking(openings=("<think>",), closings=("</think>",), is_open=True, budget=6)
LETTERS = StructuredOutput.regex("([ab]{1,3} )+[cd]{4}")
ASKED = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(n=2, seed=5, max_tokens=20, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=20),
    SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=20
    ),
    SamplingParams(logit_bias={5: 3.0, 9: -100.0}, min_tokens=6, max_tokens=20, logprobs=3),
    SamplingParams(allowed_token_ids=(5, 6, 7, 8), stop_token_ids=(8,), max_tokens=20),
    SamplingParams(bad_words=("fox", "the lazy dog"), stop=("ab", "e"), max_tokens=20),
    SamplingParams(structured_output=StructuredOutput.regex("[a-z]{90,99}"), max_tokens=30),
    SamplingParams(structured_output=LETTERS, temperature=0, ignore_eos=True, max_tokens=20),
    SamplingParams(structured_output=StructuredOutput.choice(["yes", "no"]), max_tokens=20),
    SamplingParams(thinking=THINKING, seed=3, max_tokens=24, ignore_eos=True),
]
# Tokens after which a request is aborted, by its place in ASKED.
ABORTED = {0: 7, 8: 4}
# Key and position of a sampled token.
Place = tuple[int, int]


class Recording:
    """The messages of an engine's steps, written down, and what came of the steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[bytes] = []
        self.steps: list[InFlight] = []
        launch = Worker.launch

        def recorded(worker: Worker, message: StepMessage, then: Callable[[], object]) -> InFlight:
            line = msgspec.msgpack.encode(message)
            assert msgspec.msgpack.decode(line, type=StepMessage) == message
            text = msgspec.json.encode(message)
            assert msgspec.json.decode(text, type=StepMessage) == message
            self.lines.append(line)
            self.steps.append(launch(worker, message, then))
            return self.steps[-1]

        monkeypatch.setattr(Worker, "launch", recorded)

    @property
    def messages(self) -> list[StepMessage]:
        return [msgspec.msgpack.decode(line, type=StepMessage) for line in self.lines]

    @property
    def results(self) -> list[StepResult]:
        return [result_of(step) for step in self.steps]


def result_of(step: InFlight) -> StepResult:
    assert isinstance(step.outcome, StepResult)
    return step.outcome


async def ask(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, enough: int | None
) -> dict[Place, int]:
    """What the caller got, by key and position."""
    got: dict[Place, int] = {}
    lengths: Counter[int] = Counter()
    async with engine.submit(prompt, params) as submission:
        async for delta in submission:
            key = submission.choices[delta.index].request.key
            for token_id in delta.token_ids:
                got[key, len(prompt) + lengths[key]] = token_id
                lengths[key] += 1
            if enough is not None and lengths[key] >= enough:
                assert delta.finish_reason is None
                submission.abort()
                break
    return got


async def run(engine: AsyncEngine) -> dict[Place, int]:
    prompts = random_prompts(len(ASKED), longest=20, seed=1)
    # Some of them begin alike.
    prompts[2] = list(range(20, 40))
    prompts[1] = prompts[3] = [*prompts[2], 7, 8, 9]
    gathered = await asyncio.gather(
        *(
            ask(engine, prompt, params, ABORTED.get(index))
            for index, (prompt, params) in enumerate(zip(prompts, ASKED, strict=True))
        )
    )
    return {place: token_id for got in gathered for place, token_id in got.items()}


async def forgets(engine: AsyncEngine, ended: Sequence[int] = ()) -> None:
    worker = Probe(engine).worker
    worker.forget(ended)
    await asyncio.wrap_future(worker.call(lambda: None))
    assert Probe(engine).row_owners.num_known == 0
    assert Probe(engine).num_grammars == 0


async def replay(engine: AsyncEngine, messages: Sequence[StepMessage]) -> list[StepResult]:
    """What a worker that knows nothing makes of them, one after the other."""
    worker, compiler = Probe(engine).worker, Probe(engine).parts.grammars
    results = []
    for message in messages:
        for request in message.admitted:
            if request.grammar is not None:
                asked = request.params.structured_output
                assert asked is not None
                worker.hold_grammar(request.grammar, await compiler.compile(asked))
            if request.thinking is not None:
                thinking = request.params.thinking
                assert thinking is not None
                guides = Probe(engine).parts.builder._guides
                worker.hold_thinking(request.thinking, await guides.guide(thinking, ""))
        arrived = asyncio.Event()
        step = worker.launch(message, arrived.set)
        await arrived.wait()
        results.append(result_of(step))
    return results


def owned(
    messages: Sequence[StepMessage], results: Sequence[StepResult]
) -> list[tuple[int, int, RowResult]]:
    """Key, position behind the step's tokens, and what came of it, for every row of every step."""
    owners: dict[int, int] = {}
    found = []
    for message, result in zip(messages, results, strict=True):
        owners.update((install.row, install.request_key) for install in message.plan.installs)
        found += [
            (owners[step.row], step.start + step.num_tokens, row)
            for step, row in zip(message.plan.rows, result.rows, strict=True)
        ]
    return found


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def config(checkpoint: Path, request: pytest.FixtureRequest) -> Any:
    return small_config(
        checkpoint,
        scheduler__pipeline_depth=request.param,
        # The first three requests alone grow to more than this, so somebody is preempted.
        cache__num_blocks=18,
        model__max_model_len=64,
    )


@pytest.fixture
async def fresh(config: Any) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(config) as engine:
        yield engine


async def test_written_down_messages_have_a_fresh_worker_sample_the_same_tokens(
    config: Any, fresh: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(monkeypatch)
    async with AsyncEngine.open(config) as engine:
        got = await run(engine)
        await Probe(engine).idle()
        assert_idle(engine)
        assert engine.stats.preemptions > 0
        await forgets(engine)
        messages, expected = recording.messages, recording.results
    admitted = {request.key: request for message in messages for request in message.admitted}
    assert len(admitted) == sum(params.n for params in ASKED)
    assert any(message.ended for message in messages)
    monkeypatch.undo()

    results = await replay(fresh, messages)
    await forgets(fresh, list(admitted))
    rows = owned(messages, results)
    sampled = {(key, end): row.token_ids[0] for key, end, row in rows if row.token_ids}
    assert got == {place: sampled[place] for place in got}
    # Whoever ends with a grammar is followed no further, at once: what its row then samples, and
    # nobody gets, is a matter of time. Of all others everything is the same.
    for (key, end, row), (_, _, before) in zip(rows, owned(messages, expected), strict=True):
        if admitted[key].grammar is None:
            assert row == before, (key, end)
    assert any(row.prompt_logprobs for _, _, row in rows)
    assert any(row.logprobs for _, _, row in rows)


async def test_a_handle_that_nobody_holds_fails_its_request_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(monkeypatch)
    prompts = random_prompts(2, longest=9, seed=3)
    both = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        constrained = msgspec.structs.replace(both, structured_output=LETTERS)
        await asyncio.gather(
            engine.generate(prompts[0], both), engine.generate(prompts[1], constrained)
        )
        await Probe(engine).idle()
        messages, expected = recording.messages, recording.results
    monkeypatch.undo()
    (key,) = (
        request.grammar
        for message in messages
        for request in message.admitted
        if request.grammar is not None
    )
    strip = [
        msgspec.structs.replace(
            message, admitted=[without_structure(each) for each in message.admitted]
        )
        for message in messages
    ]
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        results = []
        for message in strip:
            arrived = asyncio.Event()
            step = Probe(engine).worker.launch(message, arrived.set)
            await arrived.wait()
            results.append(result_of(step))
    refused = [entry for result in results for entry in result.refused]
    assert [owner for owner, _ in refused] == [key]
    assert f"handle {key}" in refused[0][1]
    others = zip(owned(strip, results), owned(messages, expected), strict=True)
    compared = [row == before for (owner, _, row), (_, _, before) in others if owner != key]
    assert len(compared) >= 5
    assert all(compared)


def without_structure(request: DeviceRequest) -> DeviceRequest:
    """As it comes to whoever compiled nothing."""
    params = msgspec.structs.replace(request.params, structured_output=None)
    return msgspec.structs.replace(request, params=params)


def test_neither_prompts_nor_compiled_grammars_travel() -> None:
    """A key takes their place, so what was made of a request can be encoded."""
    request = Request(
        key=7,
        prompt_token_ids=[11, 12, 13],
        params=SamplingParams(structured_output=LETTERS),
        max_tokens=9,
        end_token_ids=frozenset([2]),
        cache_salt="secret",
        grammar=object(),
    )
    told = msgspec.to_builtins(DeviceRequest.of(request))
    assert told == {
        "key": 7,
        "prompt_len": 3,
        "params": msgspec.to_builtins(request.params),
        "end_token_ids": [2],
        "grammar": 7,
        # Of the tenant, the salt and the adapter: who may be told of its output.
        "scope": ("", "secret", 0),
    }
