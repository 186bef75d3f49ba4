"""Drafts of a running engine, of which it is known how many are right, wherever they are told."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest

from src import AsyncEngine, SamplingParams
from src.cli.top_screen import ASCII, Reading, screen
from src.core.config import Config, HttpSection, Secret, SpeculationSection
from src.core.views import PoolView, RequestsView, TimelineView
from src.engine.speculation import Guess
from src.engine.telemetry.stats_line import StatsLine
from src.http import create_app
from src.observability.timeline_figures import summary
from tests.engine.speculation.test_exactness import speculating
from tests.http.waiting import until
from tests.observability.conftest import Spans, traced_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

KEY = "correct-horse-battery-staple"
PROMPT = [*range(40, 49)]
MOST = 30
# Tokens of the output at which there are drafts -> how many, and how many of them are right.
DRAFTS = {4: (4, 4), 12: (5, 2)}
DRAFTED, ACCEPTED = 9, 6
# And where the engine is looked at, with a step of the row in flight.
LOOKED_AT = 20


class Held:
    """Drafts as `DRAFTS` says, and waits at `LOOKED_AT` until somebody lets it go on."""

    def __init__(self, output: list[int]) -> None:
        self._output = output
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        known = len(tokens) - len(PROMPT)
        if known == LOOKED_AT:
            self.waits.set()
            assert self.goes_on.wait(60)
        if known not in DRAFTS:
            return None
        drafted, right = DRAFTS[known]
        guessed = self._output[known : known + drafted]
        return Guess([*guessed[:right], *(token_id ^ 1 for token_id in guessed[right:])], 7, "us")


class Seen(NamedTuple):
    """What was told of one request, in the middle of it and behind it."""

    body: dict[str, Any]
    requests: RequestsView
    timeline: TimelineView
    chrome: dict[str, Any]
    pool: PoolView
    metrics: str
    line: str
    logged: dict[str, Any]
    attributes: dict[str, Any]


@pytest.fixture(scope="module")
def settings(checkpoint: Path) -> Config:
    """One step at a time, so that nothing is drafted behind the end of a request."""
    config = traced_config(checkpoint, log_requests=True)
    return msgspec.structs.replace(
        config,
        http=HttpSection(admin_key=Secret(KEY), allowed_hosts=("*",)),
        model=msgspec.structs.replace(config.model, deterministic=True, dtype="float32"),
        scheduler=msgspec.structs.replace(config.scheduler, pipeline_depth=1),
        speculation=SpeculationSection(method="off"),
    )


@pytest.fixture(scope="module")
async def output(settings: Config, anyio_backend: str) -> list[int]:
    """What is said without drafts; untraced."""
    params = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True)
    async with AsyncEngine.open(settings) as engine:
        return (await engine.generate(PROMPT, params)).token_ids


@pytest.fixture(scope="module")
async def seen(
    output: list[int], settings: Config, spans: Spans, patch: pytest.MonkeyPatch, anyio_backend: str
) -> Seen:
    """Tracing begins with ``spans``, behind the run without drafts."""
    return await look(settings, Held(output), spans, patch)


async def look(config: Config, drafter: Held, spans: Spans, patch: pytest.MonkeyPatch) -> Seen:
    """Serve one request with this drafter."""
    speculating(patch, drafter)
    section = SpeculationSection(method="suffix", num_speculative_tokens=6)
    app = create_app(msgspec.structs.replace(config, speculation=section), owns_process=False)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("src.requests", StatsLine.__module__)]
    for logger in loggers:
        logger.addHandler(handler)
        patch.setattr(logger, "level", logging.INFO)
    transport = httpx.ASGITransport(app)
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://slipstream", headers=headers, timeout=60
        ) as client,
    ):
        engine: AsyncEngine = await app.state.server.ready_engine()
        line = StatsLine(engine.metrics)
        spans.clear()
        body = {"prompt": PROMPT, "max_tokens": MOST, "temperature": 0, "ignore_eos": True}
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(drafter.waits.is_set)
        requests = (await client.get("/debug/requests")).content
        drafter.goes_on.set()
        answer = await asked
        assert answer.status_code == 200, answer.text
        await until(lambda: any(record.name == "src.requests" for record in records))
        line.write(engine.stats)
        logged = next(each.__dict__ for each in records if each.name == "src.requests")
        root = await asyncio.to_thread(spans.root, "text_completion tiny")
        return Seen(
            answer.json(),
            msgspec.json.decode(requests, type=RequestsView),
            engine.inspector.timeline(),
            json.loads((await client.get("/debug/timeline")).content),
            await engine.inspector.pool(),
            (await client.get("/metrics")).text,
            next(each.getMessage() for each in records if each.name == StatsLine.__module__),
            logged,
            dict(root.attributes or {}),
        )


def test_a_running_request_says_what_was_drafted_so_far(seen: Seen) -> None:
    [view] = seen.requests.requests
    assert view.output_tokens == LOOKED_AT
    assert (view.drafted_tokens, view.accepted_tokens) == (DRAFTED, ACCEPTED)


def test_the_line_of_the_request_and_its_span_say_so(seen: Seen) -> None:
    assert seen.body["usage"]["completion_tokens"] == seen.logged["output_tokens"] == MOST
    assert (seen.logged["drafted_tokens"], seen.logged["accepted_tokens"]) == (DRAFTED, ACCEPTED)
    names = ("slipstream.usage.drafted_tokens", "slipstream.usage.accepted_tokens")
    assert [seen.attributes[name] for name in names] == [DRAFTED, ACCEPTED]


def test_the_timeline_has_them_by_step_and_by_request(seen: Seen) -> None:
    steps = [
        (step.drafted_tokens, step.accepted_tokens)
        for step in seen.timeline.steps
        if step.drafted_tokens
    ]
    assert steps == [*DRAFTS.values()]
    # A step's tokens have its drafts, whether they were right or not.
    assert [step.num_tokens for step in seen.timeline.steps if step.drafted_tokens] == [5, 6]
    [track] = seen.timeline.requests
    assert (track.drafted, track.accepted) == (DRAFTED, ACCEPTED)
    # One token of the prompt's step, and one of each step behind it.
    assert len(seen.timeline.steps) == MOST - ACCEPTED
    told = [
        (each["args"]["drafted_tokens"], each["args"]["accepted_tokens"])
        for each in seen.chrome["traceEvents"]
        if each.get("args", {}).get("drafted_tokens")
    ]
    assert sorted(set(told)) == sorted([*DRAFTS.values(), (DRAFTED, ACCEPTED)])


def test_the_programs_that_read_the_timeline_say_so(seen: Seen) -> None:
    assert "9 drafts verified, 6 (66.7 %) accepted" in summary(seen.timeline)
    reading = Reading(
        url="http://server",
        window=60.0,
        now=seen.timeline.now,
        steps=seen.timeline.steps,
        requests=seen.timeline.requests,
        alive=msgspec.structs.replace(seen.requests, requests=[]),
        pool=seen.pool,
        totals={},
    )
    lines = screen(reading, 120, 40, ASCII)
    assert "drafts    verified 9, accepted 66.7 %" in lines


def test_metrics_and_the_line_about_the_engine_count_them(seen: Seen) -> None:
    values = dict(
        line.rsplit(" ", 1) for line in seen.metrics.splitlines() if not line.startswith("#")
    )

    def value(start: str, *labels: str) -> float:
        return sum(
            float(number)
            for name, number in values.items()
            if name.startswith(start) and all(label in name for label in labels)
        )

    assert value("vllm:spec_decode_num_drafts_total") == len(DRAFTS)
    assert value("vllm:spec_decode_num_draft_tokens_total") == DRAFTED
    assert value("vllm:spec_decode_num_accepted_tokens_total") == ACCEPTED
    by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [value(by_place, f'position="{place}"') for place in range(5)]
    assert places == [2, 2, 1, 1, 0]
    assert value("slipstream_draft_tokens_total", 'source="us"') == DRAFTED
    assert value("slipstream_accepted_draft_tokens_total", 'source="us"') == ACCEPTED
    assert seen.line.endswith(", drafts accepted 66.7 %")
