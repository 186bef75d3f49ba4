"""One line per completion, with its figures and without its text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from src import AsyncEngine, SamplingParams
from src.core.outputs import FinishReason
from src.core.records import RequestRecord
from src.observability.logs import JsonFormatter
from src.observability.request_log import log_request
from tests.support.engines import small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "src.requests")
    return caplog


def finished(trace_id: str = "") -> RequestRecord:
    return RequestRecord(
        arrival=10.0,
        queued=10.25,
        admitted=[10.75],
        first_token=11.75,
        last_token=13.75,
        num_tokens=3,
        cached_tokens=4,
        ended=14.0,
        finish_reason=FinishReason.LENGTH,
        trace_id=trace_id,
    )


def test_a_line_as_text(lines: pytest.LogCaptureFixture) -> None:
    log_request(finished(TRACE), request_id="abc", index=1, prompt_tokens=7)
    assert lines.records[0].getMessage() == (
        "abc[1] length, in 7 (cached 4), out 3, queue 500.0 ms, ttft 1750.0 ms, tpot 1000.0 ms, "
        f"e2e 4000.0 ms, trace {TRACE}"
    )


def test_drafts_are_told_where_there_were_some(lines: pytest.LogCaptureFixture) -> None:
    record = finished()
    record.drafted, record.accepted = 12, 7
    log_request(record, request_id="abc", index=0, prompt_tokens=7)
    assert lines.records[0].getMessage().endswith(", drafted 12 (accepted 7)")
    entry = json.loads(JsonFormatter().format(lines.records[0]))
    assert (entry["drafted_tokens"], entry["accepted_tokens"]) == (12, 7)


def test_a_line_as_json_has_every_figure_as_a_field(lines: pytest.LogCaptureFixture) -> None:
    log_request(finished(TRACE), request_id="abc", index=0, prompt_tokens=7)
    entry = json.loads(JsonFormatter().format(lines.records[0]))
    figures = {
        "request_id": "abc",
        "index": 0,
        "task": "generate",
        "finish_reason": "length",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 3,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "queue_ms": 500.0,
        "ttft_ms": 1750.0,
        "tpot_ms": 1000.0,
        "e2e_ms": 4000.0,
        "trace_id": TRACE,
    }
    assert {key: entry[key] for key in figures} == figures


def test_what_a_completion_never_reached_is_left_out(lines: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(
        arrival=10.0, queued=10.5, ended=11.0, finish_reason=FinishReason.ABORT, preempted=[1.0]
    )
    log_request(record, request_id="abc", index=0, prompt_tokens=7)
    expected = "abc[0] abort, in 7 (cached 0), out 0, e2e 1000.0 ms, preempted 1 times"
    assert lines.records[0].getMessage() == expected


def test_a_text_that_asked_for_a_vector_has_no_output(lines: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(
        arrival=10.0, queued=10.5, ended=11.0, finish_reason=FinishReason.STOP, admitted=[10.75]
    )
    log_request(record, request_id="abc", index=0, prompt_tokens=7, task="embed")
    expected = "abc[0] stop, in 7 (cached 0), task embed, queue 250.0 ms, e2e 1000.0 ms"
    assert lines.records[0].getMessage() == expected
    assert json.loads(JsonFormatter().format(lines.records[0]))["task"] == "embed"


def test_a_name_cannot_write_lines_of_its_own(lines: pytest.LogCaptureFixture) -> None:
    log_request(finished(), request_id="a\nERROR forged", index=0, prompt_tokens=7)
    assert "\n" not in lines.records[0].getMessage()


async def test_an_engine_writes_them_when_asked(lines: pytest.LogCaptureFixture) -> None:
    prompt = "a secret that nobody else may read"
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=2)
    for wanted in (False, True):
        config = small_config(Path("configs/demo"), observability__log_requests=wanted)
        async with AsyncEngine.open(config) as engine:
            result = await engine.generate(prompt, params, request_id="mine")
        found = [record for record in lines.records if record.name == "src.requests"]
        assert len(found) == (2 if wanted else 0)
    assert {record.__dict__["index"] for record in found} == {0, 1}
    for record in found:
        assert record.__dict__["request_id"] == "mine"
        assert record.__dict__["output_tokens"] == 4
        assert record.__dict__["prompt_tokens"] == len(result.prompt_token_ids)
        shown = JsonFormatter().format(record) + record.getMessage()
        assert "secret" not in shown
