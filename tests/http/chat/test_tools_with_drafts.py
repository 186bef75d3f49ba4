"""Calls of tools and budgets of thinking while somebody drafts: the answers are those of `off`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from src.core.config import ChatSection, Config, ModelSection, SpeculationSection
from src.engine.speculation.guess import FORCED
from src.http import create_app
from tests.engine.speculation.scripted import Hearing
from tests.engine.speculation.test_exactness import speculating
from tests.engine.speculation.test_restricted import Silent
from tests.http.asking import ASKS_WEATHER, CHAT, WEATHER, client_of
from tests.http.strict import events_of
from tests.support.engines import until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DEMO = Path(__file__).parents[3] / "configs" / "demo"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKS_SUM = [{"role": "user", "content": "Use the tool to add 123 and 456."}]
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
NAMED = {"type": "function", "function": {"name": "add"}}
COLD, WARM = {"temperature": 0}, {"temperature": 1.1, "seed": 4}
TOOLS: dict[str, dict[str, Any]] = {
    "auto": {"messages": ASKS_WEATHER, "tool_choice": "auto", **COLD},
    "none": {"messages": ASKS_WEATHER, "tool_choice": "none", **COLD},
    "required": {"messages": ASKS_SUM, "tool_choice": "required", **COLD},
    "required, drawn": {"messages": ASKS_WEATHER, "tool_choice": "required", **WARM},
    "required, several": {"messages": ASKS_SUM, "tool_choice": "required", "n": 2, **WARM},
    "named": {"messages": ASKS_WEATHER, "tool_choice": NAMED, **COLD},
    "named, penalized": {"messages": ASKS_SUM, "tool_choice": NAMED, **WARM, **PENALTIES},
    "named, cut short": {"messages": ASKS_SUM, "tool_choice": NAMED, "max_tokens": 15, **COLD},
    "one at a time": {
        "messages": ASKS_SUM,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **WARM,
    },
}
# Of the small model, whose every answer begins with thinking.
THINKING: dict[str, dict[str, Any]] = {
    f"budget of {budget}{', drawn' if heat else ''}": {
        "messages": [{"role": "user", "content": "hello"}],
        "thinking_token_budget": budget,
        "temperature": heat,
        "seed": 3,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    for budget in (0, 1, 5, 12)
    for heat in (0, 0.9)
}


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that these deltas are of."""
    message: dict[str, Any] = {"calls": []}
    for delta in deltas:
        for field in ("content", "reasoning"):
            message[field] = message.get(field, "") + (delta.get(field) or "")
        for piece in delta.get("tool_calls") or ():
            function = piece["function"]
            if piece["index"] == len(message["calls"]):
                message["calls"].append([function["name"], ""])
            message["calls"][piece["index"]][1] += function.get("arguments") or ""
    return message


def whole(message: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that is not streamed."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
    }


def places(choice: dict[str, Any]) -> list[Any]:
    return ((choice.get("logprobs") or {}).get("content")) or []


async def ask(client: httpx.AsyncClient, body: dict[str, Any], *, streams: bool) -> Any:
    """Per choice its message, why it ended and its log-probabilities; and the usage."""
    body = {"max_tokens": 120, "logprobs": True, **body}
    if not streams:
        response = await client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        found = response.json()
        choices = {
            each["index"]: (whole(each["message"]), each["finish_reason"], places(each))
            for each in found["choices"]
        }
        return choices, found["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(CHAT, json={**body, **options})
    assert response.status_code == 200, response.text
    events = [json.loads(data) for _, data in events_of(response.text) if data != "[DONE]"]
    by_index: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for each in event["choices"]:
            by_index.setdefault(each["index"], []).append(each)
    choices = {
        index: (
            joined([each["delta"] for each in parts]),
            next(each["finish_reason"] for each in parts if each["finish_reason"]),
            [place for each in parts for place in places(each)],
        )
        for index, parts in by_index.items()
    }
    return choices, events[-1]["usage"]


def without_cache(answer: Any) -> Any:
    """How much of a prompt is cached depends on who was asked before."""
    choices, usage = answer
    kept = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return choices, kept | {"details": usage.get("completion_tokens_details")}


@asynccontextmanager
async def serving(config: Config, **changes: Any) -> Any:
    """A client of an application in this process, and the application's engine."""
    app = create_app(msgspec.structs.replace(config, **changes), owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client, await app.state.server.ready_engine()


async def compare(
    config: Config,
    bodies: dict[str, dict[str, Any]],
    drafter: Any,
    monkeypatch: pytest.MonkeyPatch,
    **sections: Any,
) -> None:
    """Ask each of them in turn, streamed and not, and then all at once."""
    cases = [(name, streams) for name in bodies for streams in (False, True)]

    async def run(client: httpx.AsyncClient, name: str, streams: bool) -> Any:
        return without_cache(await ask(client, bodies[name], streams=streams))

    async with serving(config, speculation=SpeculationSection(method="off"), **sections) as found:
        client, _ = found
        wanted = {case: await run(client, *case) for case in cases}
    for name in bodies:
        assert wanted[name, False] == wanted[name, True], name
    with monkeypatch.context() as patch:
        speculating(patch, drafter)
        section = SpeculationSection(method="suffix", num_speculative_tokens=6)
        async with serving(config, speculation=section, **sections) as found:
            client, engine = found
            for case in cases:
                assert await run(client, *case) == wanted[case], case
            together = await asyncio.gather(*(run(client, *case) for case in cases))
            assert dict(zip(cases, together, strict=True)) == wanted
            await until_idle(engine)
            counts = engine._loop._worker.draft_counts
            assert counts is not None
            of_grammars = counts.by_source.get(FORCED, (0, 0))[1]
            assert of_grammars > 0
            # Somebody else has guessed as well, unless he never has an idea.
            assert (counts.accepted > of_grammars) == isinstance(drafter, Hearing)


@pytest.mark.parametrize("drafter", [Hearing(seed=1), Silent()], ids=["hostile", "forced text"])
async def test_calls_of_tools_are_those_of_a_server_without(
    drafter: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streamed answer is drafted by what the whole one has said, rightly and wrongly."""
    model = ModelSection(path=str(DEMO), served_model_name=("demo",), deterministic=True)
    bodies = {name: {"tools": [WEATHER, ADD], **body} for name, body in TOOLS.items()}
    await compare(config, bodies, drafter, monkeypatch, model=model)


async def test_budgets_of_thinking_are_those_of_a_server_without(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = msgspec.structs.replace(config.model, deterministic=True, dtype="float32")
    chat = ChatSection(reasoning_parser="deepseek_r1")
    await compare(config, THINKING, Hearing(seed=2), monkeypatch, model=model, chat=chat)
