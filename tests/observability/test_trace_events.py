"""The timeline as a Chrome trace: well formed, nested, and with everything that happened."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.outputs import FinishReason
from src.core.records import ChunkRecord
from src.core.steps import StepRecord
from src.core.views import RequestTrack, TimelineView
from src.observability.trace_events import DEVICE, HOST, REQUESTS, trace_events
from tests.observability.chrome_trace import check_trace, slices_of

MS = 1e-3


def make_step(step_id: int, start: float, **changes: Any) -> StepRecord:
    """A step whose planning begins at ``start``, 0.1 ms a phase, 1 ms on the device."""
    at = [start + i * 0.1 * MS for i in range(4)]
    end = at[3] + 1 * MS
    values: dict[str, Any] = {
        "step_id": step_id,
        "planned": at[0],
        "plan_ended": at[1],
        "launched": at[1],
        "launch_ended": at[2],
        "device_start": at[3],
        "device_end": end,
        "arrived": end + 0.05 * MS,
        "commit_started": end + 0.1 * MS,
        "committed": end + 0.2 * MS,
        "publish_started": end + 0.3 * MS,
        "published": end + 0.4 * MS,
        "idle_before": 0.0,
        "num_rows": 2,
        "num_tokens": 9,
        "decode_rows": 1,
        "prefill_tokens": 8,
        "sampled_rows": 1,
        "installed_rows": 1,
        "cached_tokens": 16,
        "preemptions": 0,
        "running": 2,
        "waiting": 3,
        "kv_usage": 0.25,
    }
    return StepRecord(**(values | changes))


def make_track(key: int = 1, **changes: Any) -> RequestTrack:
    values: dict[str, Any] = {
        "key": key,
        "request_id": f"r{key}",
        "index": 0,
        "prompt_tokens": 24,
        "max_tokens": 5,
        "arrival": 100.0,
        "queued": 100.0 + 1 * MS,
        "admitted": [100.0 + 2 * MS],
        "preempted": [],
        "chunks": [],
        "cached_tokens": 0,
        "first_token": None,
        "last_token": None,
        "num_tokens": 0,
        "drafted": 0,
        "accepted": 0,
        "ended": None,
        "finish_reason": None,
        "trace_id": "",
    }
    return RequestTrack(**(values | changes))


def make_view(
    steps: list[StepRecord], requests: list[RequestTrack], **changes: Any
) -> TimelineView:
    values: dict[str, Any] = {
        "now": 101.0,
        "unix_time": 1_700_000_000.0,
        "bubble": 0.125,
        "last_step": steps[-1].step_id if steps else 0,
        "steps": steps,
        "requests": requests,
    }
    return TimelineView(**(values | changes))


def exported(view: TimelineView) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(trace_events(view))
    check_trace(document)
    return document


def names(document: dict[str, Any], process: int, thread: int = 1) -> list[str]:
    return [name for _, _, name in slices_of(document)[process, thread]]


def test_a_step_is_on_the_host_s_track_and_on_the_device_s() -> None:
    document = exported(make_view([make_step(7, 100.0)], []))
    assert names(document, HOST) == ["plan 7", "launch 7", "commit 7", "publish 7"]
    assert names(document, DEVICE) == ["step 7"]
    device = next(e for e in document["traceEvents"] if e["name"] == "step 7")
    assert (device["ts"], device["dur"]) == (300.0, 1000.0)
    assert device["args"]["rows"] == 2
    assert device["args"]["cached_tokens"] == 16
    counters = {e["name"]: e["args"] for e in document["traceEvents"] if e["ph"] == "C"}
    assert counters == {
        "requests": {"running": 2, "waiting": 3},
        "KV memory in use, %": {"held": 25.0},
        "tokens of a step": {"decode": 1, "prefill": 8},
    }
    # Time 0 of the trace on everybody's clock.
    assert document["otherData"]["unix_time"] == pytest.approx(1_700_000_000.0 - 1.0)


def test_steps_that_are_published_together_share_a_slice() -> None:
    first = make_step(1, 100.0)
    second = make_step(
        2,
        100.0005,
        device_start=first.device_end,
        device_end=first.device_end + 0.05 * MS,
        arrived=first.arrived,
        commit_started=first.committed,
        committed=first.committed + 0.05 * MS,
        publish_started=first.publish_started,
        published=first.published,
    )
    document = exported(make_view([first, second], []))
    assert [n for n in names(document, HOST) if n.startswith("publish")] == ["publish 1"]


def test_a_bubble_is_seen_between_two_steps_and_nothing_after_idleness() -> None:
    first = make_step(1, 100.0)
    late = make_step(2, 100.01, idle_before=0.009)
    fresh = make_step(3, 100.02)
    document = exported(make_view([first, late, fresh], []))
    assert names(document, DEVICE) == ["step 1", "bubble", "step 2", "step 3"]


def test_a_request_has_its_waits_chunks_and_decoding_inside() -> None:
    steps = [make_step(i, 100.0 + 2 * i * MS) for i in range(1, 5)]
    chunks = [
        ChunkRecord(step.step_id, 8 * i, 8, step.device_start, step.device_end)
        for i, step in enumerate(steps[:3])
    ]
    track = make_track(
        chunks=chunks,
        first_token=steps[2].published,
        last_token=steps[3].published,
        num_tokens=2,
        ended=steps[3].published,
        finish_reason=FinishReason.LENGTH,
    )
    document = exported(make_view(steps, [track]))
    inside = ["tokenize", "wait", "prefill", "prefill", "prefill", "decode"]
    assert names(document, REQUESTS) == ["request 1", *inside]
    arrow = [e["ph"] for e in document["traceEvents"] if e["ph"] in "stf"]
    assert arrow == ["s", "t", "t", "t", "f"]
    request = next(e for e in document["traceEvents"] if e["name"] == "request 1")
    assert request["args"]["finish_reason"] == "length"
    assert request["args"]["request_id"] == "r1"


def test_a_preemption_is_a_second_wait() -> None:
    steps = [make_step(i, 100.0 + 2 * i * MS) for i in range(1, 6)]
    again = [
        ChunkRecord(steps[0].step_id, 0, 24, steps[0].device_start, steps[0].device_end),
        ChunkRecord(steps[3].step_id, 0, 26, steps[3].device_start, steps[3].device_end),
    ]
    track = make_track(
        admitted=[steps[0].launch_ended, steps[3].launch_ended],
        preempted=[steps[2].published],
        chunks=again,
        first_token=steps[0].published,
        last_token=steps[4].published,
        ended=steps[4].published,
        num_tokens=4,
        finish_reason=FinishReason.STOP,
    )
    document = exported(make_view(steps, [track]))
    assert names(document, REQUESTS) == [
        *("request 1", "tokenize", "wait", "prefill", "decode"),
        *("wait again", "prefill", "decode"),
    ]


def test_what_is_alive_ends_now_and_what_waits_waits() -> None:
    document = exported(make_view([], [make_track(admitted=[])], now=100.5))
    assert names(document, REQUESTS) == ["request 1", "tokenize", "wait"]
    assert slices_of(document)[REQUESTS, 1][-1][1] == 500_000_000
    refused = make_track(admitted=[], ended=100.2, finish_reason=FinishReason.ABORT)
    assert names(exported(make_view([], [refused])), REQUESTS) == ["request 1", "tokenize", "wait"]


def test_completions_at_once_have_tracks_of_their_own() -> None:
    tracks = [
        make_track(key, arrival=100.0 + start, queued=100.0 + start, admitted=[], ended=100.0 + end)
        for key, (start, end) in enumerate([(0.0, 0.2), (0.1, 0.3), (0.2, 0.4), (0.35, 0.5)], 1)
    ]
    found = slices_of(exported(make_view([], tracks)))
    lanes = {
        name: lane for (process, lane), pieces in found.items() if process == REQUESTS
        for _, _, name in pieces if name.startswith("request")
    }  # fmt: skip
    assert lanes == {"request 1": 1, "request 2": 2, "request 3": 1, "request 4": 2}


def test_an_empty_timeline_is_a_trace_too() -> None:
    assert exported(make_view([], []))["otherData"]["last_step"] == 0


moments = st.floats(100.0, 101.0, allow_nan=False)


@given(
    st.lists(moments, min_size=12, max_size=12),
    st.lists(st.lists(moments, min_size=2, max_size=12), max_size=4),
    st.integers(0, 3),
)
def test_clocks_that_disagree_do_not_break_the_nesting(
    times: list[float], lives: list[list[float]], stays: int
) -> None:
    """Host and device see one moment differently, and a record may be read half-written."""
    order = sorted(times)
    steps = [
        make_step(
            1, order[0], plan_ended=order[1], launched=order[1], launch_ended=order[2],
            device_start=times[3], device_end=times[4], arrived=order[5], commit_started=order[6],
            committed=order[7], publish_started=order[8], published=order[9], idle_before=0.1,
        )
    ]  # fmt: skip
    tracks = []
    for key, life in enumerate(lives):
        life_order = sorted(life)
        tracks.append(
            make_track(
                key, arrival=life_order[0], queued=life[0] if stays else life_order[0],
                admitted=life[:stays], preempted=life[1:stays],
                chunks=[ChunkRecord(1, 0, 4, a, b) for a, b in pairwise(life)],
                first_token=life[-1] if stays else None, ended=life_order[-1],
            )
        )  # fmt: skip
    exported(make_view(steps, tracks))


def test_the_checker_sees_what_is_wrong() -> None:
    good = exported(make_view([make_step(1, 100.0)], []))
    crossing = [
        {"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 50.0, "dur": 100.0},
    ]
    with pytest.raises(AssertionError, match="leaves"):
        check_trace({"traceEvents": good["traceEvents"] + crossing})
    dangling = [{"ph": "s", "pid": 1, "tid": 1, "name": "x", "cat": "c", "id": 1, "ts": 10.0}]
    with pytest.raises(AssertionError, match="no end"):
        check_trace({"traceEvents": good["traceEvents"] + dangling})
