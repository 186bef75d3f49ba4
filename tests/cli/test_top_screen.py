"""The screen of `top`: a function of one reading."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from src.cli.top_screen import ASCII, UNICODE, Reading, screen
from src.core.outputs import FinishReason
from src.core.views import PoolView, RequestsView, RequestView
from tests.observability.test_trace_events import make_step, make_track

POOL = PoolView(
    block_size=16,
    windows=[None],
    num_blocks=40,
    free=10,
    cached=10,
    held=20,
    references={1: 15, 2: 5},
    map=[(10, 0, 0), (0, 10, 0), (5, 0, 5), (0, 0, 10)],
)


def make_request(key: int, **changes: Any) -> RequestView:
    values: dict[str, Any] = {
        "key": key,
        "request_id": f"id-{key}",
        "index": 0,
        "phase": "running",
        "tenant": "",
        "age": 1.5,
        "waited": 0.25,
        "prompt_tokens": 100,
        "cached_tokens": 16,
        "computed_tokens": 110,
        "output_tokens": 10,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "max_tokens": 40,
        "row": key,
        "blocks": 7,
        "preemptions": 0,
        "expires_in": None,
        "trace_id": "",
    }
    return RequestView(**(values | changes))


def test_what_else_than_text_is_asked_for_is_shown_with_its_own_progress() -> None:
    text = make_request(1)
    vector = make_request(2, task="embed", output_tokens=0, computed_tokens=30, max_tokens=1)
    track = make_track(task="embed", ended=102.0, finish_reason=FinishReason.STOP)
    reading = make_reading([text, vector])
    lines = screen(msgspec.structs.replace(reading, requests=[track]), 200, 60, ASCII)
    assert lines[-2].endswith(" 10/40")
    assert lines[-1].endswith(" 30/100 to embed")
    (line,) = [line for line in lines if line.startswith("tasks")]
    assert line == "tasks     embed 0.1/s p50 2000 ms p99 2000 ms"
    # Their times are not those of text.
    assert any("whole -" in line for line in lines)
    assert not [line for line in screen(reading, 200, 60, ASCII) if line.startswith("tasks")]


def make_reading(alive_requests: list[RequestView], **changes: Any) -> Reading:
    # Forty steps of one row, a quarter of a second apart, all in the last ten seconds.
    steps = [
        make_step(i, 100.0 + i / 4, idle_before=0.25e-3, decode_rows=1, prefill_tokens=0)
        for i in range(40)
    ]
    track = make_track(
        first_token=100.25, ended=102.0, num_tokens=5, finish_reason=FinishReason.STOP
    )
    alive = RequestsView(
        running=len(alive_requests), waiting=0, waiting_tokens=0, requests=alive_requests, omitted=0
    )
    values: dict[str, Any] = {
        "url": "http://server",
        "window": 10.0,
        "now": 110.0,
        "steps": steps,
        "requests": [track],
        "alive": alive,
        "pool": POOL,
        "totals": {"vllm:request_success_total": 12.0, "vllm:num_preemptions_total": 3.0},
    }
    return Reading(**(values | changes))


def test_the_figures_are_those_of_the_window() -> None:
    text = "\n".join(screen(make_reading([]), 200, 40, UNICODE))
    assert "4.0 steps/s" in text
    assert "output 4.0, prompt 0.0" in text
    assert "ended 12, refused 0, preempted 3" in text
    assert "between tokens p50 250 ms p99 250 ms" in text
    assert "first token p50 250 ms" in text
    assert "whole p50 2000 ms" in text
    # 0.25 ms of waiting beside 1 ms of work.
    assert "bubble 20.0 %" in text
    assert "plan 0.1 ms" in text
    assert "device 1 ms" in text


def test_the_memory_is_drawn_cell_by_cell() -> None:
    text = "\n".join(screen(make_reading([]), 200, 40, ASCII))
    assert "held 50.0 % (5 blocks shared), cached 25.0 %, free 25.0 %" in text
    assert "\n          .-+#\n" in text


def test_a_request_shows_how_far_it_is() -> None:
    prefilling = make_request(2, output_tokens=0, computed_tokens=50)
    waiting = make_request(3, output_tokens=0, computed_tokens=0, phase="waiting", row=-1, blocks=0)
    lines = screen(make_reading([make_request(1), prefilling, waiting]), 200, 40, ASCII)
    rows = {line.split()[0]: line for line in lines if line.strip()[:1].isdigit()}
    assert "###--------- 10/40" in rows["1"]
    assert "######------ 50/100 of the prompt" in rows["2"]
    assert "------------ 0/100 of the prompt" in rows["3"]
    assert "1500 ms" in rows["1"]
    assert "id-3/0" in rows["3"]


@pytest.mark.parametrize("size", [(1, 1), (20, 5), (80, 24), (300, 100)])
def test_it_fits_the_terminal(size: tuple[int, int]) -> None:
    width, height = size
    lines = screen(make_reading([make_request(key) for key in range(90)]), width, height, UNICODE)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_a_client_s_name_cannot_write_to_the_terminal() -> None:
    evil = make_request(1, request_id="\x1b[2J\nx")
    assert "\x1b" not in "".join(screen(make_reading([evil]), 200, 40, UNICODE))


def test_nothing_yet_is_said_as_nothing() -> None:
    empty = make_reading([], steps=[], requests=[], totals={})
    text = "\n".join(screen(empty, 120, 40, UNICODE))
    assert "0.0 steps/s" in text
    assert "first token -" in text
    assert "none yet" in text
    assert "nothing to do" in text
