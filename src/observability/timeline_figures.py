"""Summarises the timeline in a few figures, for ``inspect`` and ``top``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from src.core.steps import StepRecord
from src.core.task import Task
from src.core.views import RequestTrack, TimelineView

# The parts of a step in order: name, and the function that gives the duration.
PHASES: Final = (
    ("plan", lambda step: step.plan_ended - step.planned),
    ("launch", lambda step: step.launch_ended - step.plan_ended),
    ("queue", lambda step: step.device_start - step.launched),
    ("device", lambda step: step.device_end - step.device_start),
    ("return", lambda step: step.arrived - step.device_end),
    ("wait for loop", lambda step: step.commit_started - step.arrived),
    ("commit", lambda step: step.committed - step.commit_started),
    ("publish", lambda step: step.published - step.publish_started),
)


class Quantiles(msgspec.Struct, frozen=True):
    """Median, 99th percentile and maximum in seconds, and the number of values."""

    p50: float
    p99: float
    most: float
    count: int


class TimelineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of some steps and of the completions during that time.

    Attributes
    ----------
    seconds
        From the first step's planning to the last one's publication.
    bubble
        Share of the time with work in which the device waited for the host, 0 to 1.
    phases
        Keyed by the names in ``PHASES``.
    drafted_tokens, accepted_tokens
        Drafts that were verified, and those of them that were right.
    ttft, whole, between_tokens
        From arrival to the first token, from arrival to the end, between two tokens, of text.
    tasks
        What else was asked for -> from arrival to the end.
    """

    num_steps: int
    seconds: float
    output_tokens: int
    prompt_tokens: int
    rows_per_step: float
    bubble: float
    preemptions: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    phases: dict[str, Quantiles]
    ttft: Quantiles | None
    whole: Quantiles | None
    between_tokens: Quantiles | None
    tasks: dict[Task, Quantiles] = {}


def quantiles(values: Iterable[float], weights: Iterable[int] | None = None) -> Quantiles | None:
    """Nearest-rank quantiles of values with optional ``weights``; ``None`` without values."""
    pairs = sorted((value, 1) for value in values) if weights is None else _pairs(values, weights)
    total = sum(weight for _, weight in pairs)
    if not total:
        return None

    def at(fraction: float) -> float:
        seen = 0
        for value, weight in pairs:
            seen += weight
            if seen >= fraction * total:
                return value
        return pairs[-1][0]

    return Quantiles(at(0.5), at(0.99), pairs[-1][0], total)


def _pairs(values: Iterable[float], weights: Iterable[int]) -> list[tuple[float, int]]:
    return sorted((v, w) for v, w in zip(values, weights, strict=True) if w)


def figures(steps: Sequence[StepRecord], requests: Sequence[RequestTrack]) -> TimelineFigures:
    """The figures of ``steps``, oldest first, and of ``requests`` during that time."""
    begin = steps[0].planned if steps else 0.0
    end = steps[-1].published if steps else 0.0
    idle = sum(step.idle_before for step in steps)
    busy = sum(step.device_end - step.device_start for step in steps)
    first_tokens = [
        track.first_token - track.arrival
        for track in requests
        if track.first_token is not None and begin <= track.first_token
    ]
    ends: dict[Task, list[float]] = {}
    for track in requests:
        if track.ended is not None and begin <= track.ended:
            ends.setdefault(track.task, []).append(track.ended - track.arrival)
    texts = ends.pop("generate", [])
    gaps = [(b.published - a.published, b.decode_rows) for a, b in pairwise(steps)]
    phases = {name: quantiles(map(length, steps)) for name, length in PHASES}
    return TimelineFigures(
        num_steps=len(steps),
        seconds=end - begin,
        output_tokens=sum(step.sampled_rows + step.accepted_tokens for step in steps),
        prompt_tokens=sum(step.prefill_tokens for step in steps),
        rows_per_step=sum(step.num_rows for step in steps) / max(1, len(steps)),
        bubble=idle / (idle + busy) if idle + busy else 0.0,
        preemptions=sum(step.preemptions for step in steps),
        cached_tokens=sum(step.cached_tokens for step in steps),
        drafted_tokens=sum(step.drafted_tokens for step in steps),
        accepted_tokens=sum(step.accepted_tokens for step in steps),
        phases={name: found for name, found in phases.items() if found is not None},
        ttft=quantiles(first_tokens),
        whole=quantiles(texts),
        # A decoding row nearly always had its last token in the step before.
        between_tokens=quantiles([gap for gap, _ in gaps], [rows for _, rows in gaps]),
        tasks={task: found for task in sorted(ends) if (found := quantiles(ends[task]))},
    )


def _draft_line(found: TimelineFigures) -> list[str]:
    if not found.drafted_tokens:
        return []
    share = 100 * found.accepted_tokens / found.drafted_tokens
    return [
        f"{found.drafted_tokens} drafts verified, {found.accepted_tokens} ({share:.1f} %) accepted"
    ]


def milliseconds(seconds: float) -> str:
    """A duration with three digits: ``0.012 ms``, ``3.45 ms``, ``12.3 s``."""
    if seconds >= 10:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def summary(view: TimelineView, slowest: int = 5) -> list[str]:
    """A few lines of text."""
    if not view.steps:
        return ["no step was recorded yet"]
    found = figures(view.steps, view.requests)
    span = max(found.seconds, 1e-9)
    lines = [
        f"{found.num_steps} steps in {milliseconds(found.seconds)}: "
        f"{found.output_tokens / span:.1f} output and {found.prompt_tokens / span:.1f} prompt "
        f"tokens/s, {found.rows_per_step:.1f} rows per step",
        f"bubble {100 * found.bubble:.1f} % of the time with work "
        f"({100 * view.bubble:.1f} % since the start), {found.preemptions} preemptions, "
        f"{found.cached_tokens} tokens from the prefix cache",
        *_draft_line(found),
        "",
        f"{'':<16}{'p50':>12}{'p99':>12}{'most':>12}{'of':>8}",
    ]
    rows = [*found.phases.items(), ("first token", found.ttft), ("whole request", found.whole)]
    rows += [(f"to {task}", times) for task, times in found.tasks.items()]
    for name, values in [*rows, ("between tokens", found.between_tokens)]:
        if values is not None:
            times = "".join(f"{milliseconds(t):>12}" for t in (values.p50, values.p99, values.most))
            lines.append(f"{name:<16}{times}{values.count:>8}")
    lines += ["", "slowest steps on the device"]
    by_time = sorted(view.steps, key=lambda step: step.device_start - step.device_end)
    for step in by_time[:slowest]:
        lines.append(
            f"  step {step.step_id}: {milliseconds(step.device_end - step.device_start)}, "
            f"{step.decode_rows} decode rows, {step.prefill_tokens} prefill tokens, bubble before "
            f"{milliseconds(step.idle_before)}"
        )
    return lines
