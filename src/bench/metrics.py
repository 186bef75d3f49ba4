"""The metrics of a run, as vLLM defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from src.bench.answers import Answer
from src.bench.figures import Summary, summarize
from src.core.errors import ConfigError

# Metrics for which an objective can be set.
OBJECTIVES: Final = ("ttft", "tpot", "e2el")
_MS: Final = 1000.0


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one run; latencies only include successful requests.

    Attributes
    ----------
    duration
        Seconds.
    request_throughput, request_goodput
        Requests per second: all successful ones, and those that meet every objective (``None``
        without objectives).
    output_throughput, total_token_throughput
        Tokens per second: of outputs, and of prompts and outputs.
    max_output_tokens_per_s
        Deliveries of tokens in the best second, counted from the first request.
    max_concurrent_requests
        Largest number of requests in progress at one moment.
    ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue
        Seconds.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    client_queue_time: Summary
    e2el_including_client_queue: Summary


def measure(
    answers: Sequence[Answer],
    duration: float,
    *,
    percents: Sequence[float] = (90, 99),
    objectives: Mapping[str, float] | None = None,
) -> Metrics:
    """The metrics of ``answers`` from a run of ``duration`` seconds.

    Parameters
    ----------
    percents
        Percentiles to compute, 0 to 100.
    objectives
        Metric (one of ``OBJECTIVES``) -> maximal seconds of a good request.
    """
    good = [answer for answer in answers if answer.success]
    outputs = sum(answer.output_tokens for answer in good)
    inputs = sum(answer.prompt_tokens for answer in good)
    within = sum(_is_within(answer, objectives or {}) for answer in good)
    seconds = max(duration, 1e-9)
    tpots = [answer.tpot for answer in good if answer.output_tokens > 1]
    return Metrics(
        duration=duration,
        completed=len(good),
        failed=len(answers) - len(good),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_cached_tokens=sum(answer.cached_tokens for answer in good),
        request_throughput=len(good) / seconds,
        request_goodput=within / seconds if objectives else None,
        output_throughput=outputs / seconds,
        total_token_throughput=(inputs + outputs) / seconds,
        max_output_tokens_per_s=_peak_rate(good),
        max_concurrent_requests=peak_concurrency(good),
        ttft=summarize([answer.ttft for answer in good], percents),
        tpot=summarize(tpots, percents),
        itl=summarize([gap for answer in good for gap in answer.itl], percents),
        e2el=summarize([answer.latency for answer in good], percents),
        client_queue_time=summarize([answer.queued for answer in good], percents),
        e2el_including_client_queue=summarize(
            [answer.queued + answer.latency for answer in good], percents
        ),
    )


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """The largest number of requests in progress; one that ends as another begins has ended."""
    events = [(answer.start, 1) for answer in answers]
    events += [(answer.start + answer.latency, -1) for answer in answers]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


def _peak_rate(answers: Sequence[Answer]) -> float:
    start = min((answer.start for answer in answers), default=0.0)
    seconds: dict[int, int] = {}
    for answer in answers:
        # Vectors and scores are no tokens.
        if not answer.ttft:
            continue
        moment = answer.start + answer.ttft
        for gap in (0.0, *answer.itl):
            moment += gap
            second = math.floor(moment - start)
            seconds[second] = seconds.get(second, 0) + 1
    return float(max(seconds.values(), default=0))


def _is_within(answer: Answer, objectives: Mapping[str, float]) -> bool:
    found = {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.latency}
    return all(found[name] <= most for name, most in objectives.items())


def parse_objectives(pairs: Sequence[str]) -> dict[str, float]:
    """Objectives in seconds, from ``NAME:MILLISECONDS``.

    Raises
    ------
    ConfigError
        A name is not in ``OBJECTIVES``, or a value is not a number of milliseconds.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in OBJECTIVES or not milliseconds >= 0:
            raise ConfigError(
                f"--goodput: expected NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}, "
                f"got {pair!r}"
            )
        objectives[name] = milliseconds / _MS
    return objectives
