"""OpenAI's predicted outputs: the answer is the same, comes in fewer steps, and usage says so."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, ModelSection, SpeculationSection
from src.engine.telemetry.stats_line import StatsLine
from src.http import create_app
from src.text import Tokenizer
from tests.http.asking import ASKS_WEATHER, CHAT, COMPLETIONS, client_of, post, refused
from tests.support.steady_steps import steady_steps

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

STORY = "Once upon a time there was"
DETAILS = "completion_tokens_details"


@pytest.fixture(scope="module")
async def drafting_app(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    """The bundled model, with speculation, and the same bits for every number of drafts."""
    changed = msgspec.structs.replace(
        config,
        model=ModelSection(served_model_name=("demo",), deterministic=True),
        speculation=SpeculationSection(method="auto"),
    )
    app = create_app(changed, owns_process=False)
    with pytest.MonkeyPatch.context() as patch:
        steady_steps(patch)
        async with app.router.lifespan_context(app):
            await app.state.server._engine.wait_ready()
            yield app


@pytest.fixture
async def drafting(drafting_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(drafting_app) as client:
        yield client


def predicting(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]


def tried(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"][DETAILS]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def num_steps(app: Starlette) -> int:
    found: int = app.state.server._engine.stats.num_steps
    return found


@pytest.mark.parametrize("form", [str, in_parts])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_was_predicted_takes_fewer_steps(
    drafting: httpx.AsyncClient, drafting_app: Starlette, path: str, form: Any
) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 5, "temperature": 0.7, "logprobs": 1}
    if path == CHAT:
        asked |= {"messages": ASKS_WEATHER, "logprobs": True, "ignore_eos": True}
    else:
        asked |= {"prompt": STORY, "ignore_eos": True}
    begun = num_steps(drafting_app)
    plain = await post(drafting, path, **asked)
    between = num_steps(drafting_app)
    assert (
        DETAILS not in plain["usage"]
        or "accepted_prediction_tokens" not in (plain["usage"][DETAILS])
    )
    [choice] = plain["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    answer = await post(drafting, path, **asked, **predicting(form(text)))
    assert answer["choices"] == plain["choices"]
    assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    accepted, rejected = tried(answer)
    assert accepted > 20
    assert 0 <= rejected < 60
    assert num_steps(drafting_app) - between < (between - begun) * 0.7


async def test_every_completion_is_served_and_a_stream_says_so(
    drafting: httpx.AsyncClient,
) -> None:
    asked: dict[str, Any] = {"prompt": STORY, "max_tokens": 40, "temperature": 0, "n": 3}
    asked["ignore_eos"] = True
    plain = await post(drafting, COMPLETIONS, **asked)
    text = plain["choices"][0]["text"]
    answer = await post(drafting, COMPLETIONS, **asked, **predicting(text))
    assert answer["choices"] == plain["choices"]
    # One completion has 40 tokens.
    assert tried(answer)[0] > 40
    streamed = await drafting.post(
        COMPLETIONS,
        json={**asked, **predicting(text), "stream": True}
        | {"stream_options": {"include_usage": True}},
    )
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    assert tried(events[-1])[0] > 40
    texts = dict.fromkeys(range(3), "")
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in plain["choices"]]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_says_which_tokens_came_of_one_step(
    drafting: httpx.AsyncClient, drafting_app: Starlette, path: str, scored: bool
) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    if path == CHAT:
        asked |= {"messages": ASKS_WEATHER, "logprobs": scored}
    else:
        asked |= {"prompt": STORY, "logprobs": 0 if scored else None}
    plain = await post(drafting, path, **asked)
    [choice] = plain["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    asked |= predicting(text)
    for options in ({"include_steps": True}, {"include_steps": False}, {}):
        begun = num_steps(drafting_app)
        body = {**asked, "stream": True, "stream_options": options, "return_token_ids": True}
        streamed = await drafting.post(path, json=body)
        chunks = [
            choice
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line.removeprefix("data: "))["choices"]
        ]
        assert sum(len(each.get("token_ids", ())) for each in chunks) == 60
        if not options.get("include_steps"):
            assert not any("step_starts" in each for each in chunks)
            continue
        starts = [start for each in chunks for start in each.get("step_starts", ())]
        for each in chunks:
            assert all(start < len(each["token_ids"]) for start in each.get("step_starts", ()))
        # A step of it computes the prompt, and says the first token.
        assert 1 < len(starts) <= num_steps(drafting_app) - begun < 50
        assert next(each["step_starts"] for each in chunks if each.get("token_ids"))[0] == 0


async def test_a_wrong_prediction_changes_nothing_and_a_long_one_is_cut(
    drafting: httpx.AsyncClient,
) -> None:
    asked: dict[str, Any] = {"prompt": STORY, "max_tokens": 30, "temperature": 0}
    plain = await post(drafting, COMPLETIONS, **asked)
    for text in ("", "zzz " * 50, "Something else. " * 4000):
        answer = await post(drafting, COMPLETIONS, **asked, **predicting(text))
        assert answer["choices"] == plain["choices"]
        accepted, rejected = tried(answer)
        assert accepted < 15
        if not text:
            assert (accepted, rejected) == (0, 0)


async def test_without_speculation_nothing_is_tried(config: Config) -> None:
    changed = msgspec.structs.replace(
        config,
        model=ModelSection(served_model_name=("demo",), deterministic=True),
        speculation=SpeculationSection(method="off"),
    )
    app = create_app(changed, owns_process=False)
    asked: dict[str, Any] = {"messages": ASKS_WEATHER, "max_tokens": 30, "temperature": 0}
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server._engine.wait_ready()
        plain = await post(client, CHAT, **asked)
        text = plain["choices"][0]["message"]["content"]
        answer = await post(client, CHAT, **asked, **predicting(text))
    assert answer["choices"] == plain["choices"]
    assert tried(answer) == (0, 0)


async def test_drafts_are_seen_from_outside(
    drafting: httpx.AsyncClient, drafting_app: Starlette, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafting_app.state.server._engine
    before = engine.metrics.value("slipstream_draft_tokens_total", source="prediction")
    asked: dict[str, Any] = {"prompt": STORY, "max_tokens": 30, "temperature": 0}
    plain = await post(drafting, COMPLETIONS, **asked)
    answer = await post(drafting, COMPLETIONS, **asked, **predicting(plain["choices"][0]["text"]))
    accepted, rejected = tried(answer)
    assert accepted > 10
    text = (await drafting.get("/metrics")).text
    for name, count in (("draft", accepted + rejected), ("accepted_draft", accepted)):
        assert f'slipstream_{name}_tokens_total{{source="prediction"}}' in text
        value = engine.metrics.value(f"slipstream_{name}_tokens_total", source="prediction")
        assert value >= count
    assert (
        engine.metrics.value("slipstream_draft_tokens_total", source="prediction")
        == before + accepted + rejected
    )
    track = engine.inspector.timeline().requests[-1]
    assert track.drafted >= accepted + rejected
    assert track.drafted >= track.accepted >= accepted
    caplog.set_level("INFO", "src")
    line = StatsLine(engine.metrics)
    await post(drafting, COMPLETIONS, **asked, **predicting(plain["choices"][0]["text"]))
    line.write(engine.stats)
    assert re.search(r"bubble [0-9.]+ %, drafts accepted [0-9.]+ %$", caplog.records[-1].message)


async def test_all_prompts_of_a_body_have_one_prediction_which_is_read_once(
    drafting: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode

    def noting(self: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        texts.append(text)
        return encode(self, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    prompts = [f"{STORY} {number}" for number in range(5)]
    answer = await post(
        drafting, COMPLETIONS, prompt=prompts, max_tokens=4, **predicting("a prediction")
    )
    assert len(answer["choices"]) == 5
    assert texts.count("a prediction") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        [],
        {},
        {"type": "content"},
        {"content": "text"},
        {"type": "text", "content": "text"},
        {"type": "content", "content": 5},
        {"type": "content", "content": ["text"]},
        {"type": "content", "content": [{"type": "image_url", "image_url": {}}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": [{"type": "text", "text": "a"}] * 1025},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_shape_is_refused_by_name(
    demo_client: httpx.AsyncClient, path: str, wrong: Any
) -> None:
    what = {"messages": ASKS_WEATHER} if path == CHAT else {"prompt": "a"}
    error = await refused(demo_client, path, **what, max_tokens=2, prediction=wrong)
    assert error["param"].partition(".")[0] == "prediction"
    assert "prediction" in error["message"]
