"""The step timeline as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

Three processes, so that each can be folded::

    host        one track: what the event loop did for each step: plan, launch, commit, publish
                counters: requests, KV memory, tokens of a step
    device      one track: steps, and the bubbles between them
    requests    as many tracks as there were completions at once: each is one slice with its waits,
                its prefill chunks and its decoding inside

An arrow leads from a completion's arrival over the device steps that computed its prompt to its
first token. Format: "Trace Event Format", Google; times are microseconds with nanosecond digits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from src.core.steps import StepRecord
from src.core.views import RequestTrack, TimelineView

HOST: Final = 1
DEVICE: Final = 2
REQUESTS: Final = 3
_LOOP: Final = 1
_STEPS: Final = 1

Event = dict[str, Any]


def trace_events(view: TimelineView) -> bytes:
    """The JSON trace of these steps and completions."""
    clock = _Clock(view)
    spans = _spans(view.steps, clock)
    events = [*_names(), *_host(view.steps, clock), *_device(view.steps, spans, clock)]
    events.extend(_requests(view, spans, clock))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "first_step": view.steps[0].step_id if view.steps else 0,
            "last_step": view.steps[-1].step_id if view.steps else 0,
            "bubble": view.bubble,
            # Time 0 of the trace, in seconds since the epoch.
            "unix_time": view.unix_time - (view.now - clock.zero),
            "omitted_requests": view.omitted,
        },
    }
    return msgspec.json.encode(document)


class _Clock:
    """Converts seconds of the engine's clock to whole nanoseconds since the trace's beginning.

    Equal moments round to equal whole numbers, so nested slices stay nested.
    """

    def __init__(self, view: TimelineView) -> None:
        begins = [step.planned for step in view.steps[:1]]
        begins += [track.arrival for track in view.requests]
        self.zero = min(begins, default=view.now)
        self.end = self(view.now)

    def __call__(self, seconds: float) -> int:
        return max(0, round((seconds - self.zero) * 1e9))


def _slice(process: int, thread: int, name: str, start: int, end: int, **details: object) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "ts": start / 1000,
        "dur": max(0, end - start) / 1000,
        "args": details,
    }


def _names() -> Iterator[Event]:
    for order, (process, name) in enumerate(
        ((HOST, "host"), (DEVICE, "device"), (REQUESTS, "requests"))
    ):
        for kind, value in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": order}),
        ):
            yield {"ph": "M", "pid": process, "tid": 0, "name": kind, "args": value}
    for process, thread, name in ((HOST, _LOOP, "event loop"), (DEVICE, _STEPS, "steps")):
        yield {
            "ph": "M",
            "pid": process,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": name},
        }


def _host(steps: Sequence[StepRecord], clock: _Clock) -> Iterator[Event]:
    published = -1
    for step in steps:
        start, planned = clock(step.planned), clock(step.plan_ended)
        yield _slice(HOST, _LOOP, f"plan {step.step_id}", start, planned, rows=step.num_rows)
        yield _slice(HOST, _LOOP, f"launch {step.step_id}", planned, clock(step.launch_ended))
        yield _slice(
            HOST,
            _LOOP,
            f"commit {step.step_id}",
            clock(step.commit_started),
            clock(step.committed),
            arrived_us_before=(clock(step.commit_started) - clock(step.arrived)) / 1000,
        )
        # Steps that were committed in one turn of the loop are published together.
        begin = clock(step.publish_started)
        if begin != published:
            published = begin
            yield _slice(HOST, _LOOP, f"publish {step.step_id}", begin, clock(step.published))
        for name, values in (
            ("requests", {"running": step.running, "waiting": step.waiting}),
            ("KV memory in use, %", {"held": round(100 * step.kv_usage, 3)}),
            ("tokens of a step", {"decode": step.decode_rows, "prefill": step.prefill_tokens}),
        ):
            yield {"ph": "C", "pid": HOST, "name": name, "ts": planned / 1000, "args": values}


def _spans(steps: Sequence[StepRecord], clock: _Clock) -> dict[int, tuple[int, int]]:
    """Step -> its time on the device; the intervals do not overlap."""
    spans, before = {}, 0
    for step in steps:
        # By the device's own clock, a step may begin slightly before the host saw the last one end.
        start = max(before, clock(step.device_start))
        before = max(start, clock(step.device_end))
        spans[step.step_id] = (start, before)
    return spans


def _device(
    steps: Sequence[StepRecord], spans: dict[int, tuple[int, int]], clock: _Clock
) -> Iterator[Event]:
    before = 0
    for step in steps:
        start, end = spans[step.step_id]
        if step.idle_before and before and start > before:
            yield _slice(DEVICE, _STEPS, "bubble", before, start)
        before = end
        yield _slice(
            DEVICE,
            _STEPS,
            f"step {step.step_id}",
            start,
            end,
            rows=step.num_rows,
            tokens=step.num_tokens,
            decode_rows=step.decode_rows,
            prefill_tokens=step.prefill_tokens,
            sampled_rows=step.sampled_rows,
            pooled_rows=step.pooled_rows,
            drafted_tokens=step.drafted_tokens,
            accepted_tokens=step.accepted_tokens,
            installed_rows=step.installed_rows,
            cached_tokens=step.cached_tokens,
            preemptions=step.preemptions,
            queued_us=max(0, clock(step.device_start) - clock(step.launched)) / 1000,
            idle_before_us=round(step.idle_before * 1e6, 3),
        )


def _requests(
    view: TimelineView, spans: dict[int, tuple[int, int]], clock: _Clock
) -> Iterator[Event]:
    lanes = _Lanes()
    for track in sorted(view.requests, key=lambda track: track.arrival):
        start = clock(track.arrival)
        end = clock.end if track.ended is None else clock(track.ended)
        lane = lanes.take(start, end)
        yield _slice(
            REQUESTS,
            lane,
            f"request {track.key}",
            start,
            end,
            request_id=track.request_id,
            index=track.index,
            task=track.task,
            prompt_tokens=track.prompt_tokens,
            cached_tokens=track.cached_tokens,
            output_tokens=track.num_tokens,
            drafted_tokens=track.drafted,
            accepted_tokens=track.accepted,
            max_tokens=track.max_tokens,
            finish_reason=None if track.finish_reason is None else track.finish_reason.value,
            trace_id=track.trace_id,
        )
        yield from _phases(track, lane, start, end, clock)
        if track.first_token is not None:
            back = min(max(clock(track.first_token), start), end)
            yield from _arrows(track, lane, start, back, spans)
    for lane in range(1, lanes.count + 1):
        name = {"name": f"completions {lane}"}
        yield {"ph": "M", "pid": REQUESTS, "tid": lane, "name": "thread_name", "args": name}


def _phases(track: RequestTrack, lane: int, start: int, end: int, clock: _Clock) -> Iterator[Event]:
    """The parts inside a completion's slice, in order."""
    place = start

    def piece(name: str, begin: float, until: float, **details: object) -> Iterator[Event]:
        # Host and device clocks differ by a few microseconds; clip so that nothing overlaps.
        nonlocal place
        first = min(max(place, clock(begin)), end)
        last = min(max(first, clock(until)), end)
        place = last
        if last > first:
            yield _slice(REQUESTS, lane, name, first, last, **details)

    finished = track.ended if track.ended is not None else clock.zero + clock.end / 1e9
    yield from piece("tokenize", track.arrival, track.queued)
    waiting_since, chunks = track.queued, list(track.chunks)
    for stay, admitted in enumerate(track.admitted):
        yield from piece("wait" if stay == 0 else "wait again", waiting_since, admitted)
        left = track.preempted[stay] if stay < len(track.preempted) else finished
        while chunks and chunks[0].device_start < left:
            chunk = chunks.pop(0)
            yield from piece(
                "prefill",
                chunk.device_start,
                chunk.device_end,
                step=chunk.step_id,
                tokens=chunk.num_tokens,
                position=chunk.start,
            )
        decoding_since = clock.zero + place / 1e9
        if track.first_token is not None and left > track.first_token:
            yield from piece("decode", decoding_since, left)
        waiting_since = left
    if len(track.preempted) >= len(track.admitted):
        yield from piece("wait again" if track.admitted else "wait", waiting_since, finished)


def _arrows(
    track: RequestTrack, lane: int, start: int, back: int, spans: dict[int, tuple[int, int]]
) -> Iterator[Event]:
    """From a completion's arrival over the steps of its prefill to its first token."""
    middles = [sum(spans[c.step_id]) // 2 for c in track.chunks if c.step_id in spans]
    middles = sorted(middle for middle in middles if start <= middle <= back)
    if not middles:
        return
    common = {"cat": "request", "name": "prompt", "id": track.key}
    yield {"ph": "s", "pid": REQUESTS, "tid": lane, "ts": start / 1000, **common}
    for middle in middles:
        yield {"ph": "t", "pid": DEVICE, "tid": _STEPS, "ts": middle / 1000, **common}
    yield {"ph": "f", "bp": "e", "pid": REQUESTS, "tid": lane, "ts": back / 1000, **common}


class _Lanes:
    """Allocates tracks to slices that must not overlap: the lowest free one, from 1."""

    def __init__(self) -> None:
        self.count = 0
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []

    def take(self, start: int, end: int) -> int:
        """A track that is free from ``start`` to ``end``; starts must not decrease."""
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            self.count += 1
            lane = self.count
        heapq.heappush(self._busy, (end, lane))
        return lane
