"""A run's figures, against computations of another kind: from the moments of tokens, by NumPy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.bench.answers import Answer, Deliveries
from src.bench.metrics import measure, parse_objectives, peak_concurrency
from src.bench.report import DETAILS, METRICS, error_lines, report_lines, result_fields
from src.core.errors import ConfigError

# When a request is sent, and how long after the token before each of its tokens comes. Multiples
# of 1/64 s, whose sums are exact.
GAPS = st.lists(st.integers(1, 256), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(st.integers(0, 1000), GAPS), min_size=1, max_size=12)
Request = tuple[int, list[int]]


def answer_of(request: Request) -> Answer:
    start, gaps = request[0] / 64, [gap / 64 for gap in request[1]]
    answer = Answer(start=start, itl=[], prompt_tokens=7, output_tokens=len(gaps))
    deliveries = Deliveries(answer)
    moment = start
    for gap in gaps:
        moment += gap
        deliveries.tokens(moment)
    return answer


def moments_of(request: Request) -> list[float]:
    return [(request[0] + total) / 64 for total in np.cumsum(request[1])]


@given(REQUESTS)
def test_latencies_are_those_of_the_moments(requests: list[Request]) -> None:
    answers = [answer_of(request) for request in requests]
    found = measure(answers, 2.0, percents=[50, 90])
    moments = [np.array(moments_of(request)) for request in requests]
    sent = [request[0] / 64 for request in requests]
    ttfts = [times[0] - start for times, start in zip(moments, sent, strict=True)]
    e2els = [times[-1] - start for times, start in zip(moments, sent, strict=True)]
    gaps = np.concatenate([np.diff(times) for times in moments])
    tpots = [np.diff(times).mean() for times in moments if len(times) > 1]
    for summary, values in (
        (found.ttft, ttfts),
        (found.e2el, e2els),
        (found.itl, gaps),
        (found.tpot, tpots),
    ):
        expected = values if len(values) else [0.0]
        assert summary.mean == pytest.approx(np.mean(expected))
        assert summary.median == pytest.approx(np.median(expected))
        assert summary.percentiles[90] == pytest.approx(np.percentile(expected, 90))
    tokens = sum(len(times) for times in moments)
    assert found.total_output_tokens == tokens
    assert found.output_throughput == tokens / 2
    assert found.total_token_throughput == (tokens + 7 * len(requests)) / 2
    assert found.request_throughput == len(requests) / 2


@given(REQUESTS)
def test_peaks_are_those_of_every_moment(requests: list[Request]) -> None:
    answers = [answer_of(request) for request in requests]
    begins = [request[0] for request in requests]
    ends = [request[0] + sum(request[1]) for request in requests]
    under_way = [
        sum(begin <= tick < end for begin, end in zip(begins, ends, strict=True)) for tick in begins
    ]
    assert peak_concurrency(answers) == max(under_way)
    seconds = Counter(
        int(moment - min(begins) / 64) for request in requests for moment in moments_of(request)
    )
    found = measure(answers, 1.0)
    assert found.max_output_tokens_per_s == max(seconds.values())
    assert found.max_concurrent_requests == max(under_way)


@given(REQUESTS, st.integers(1, 300), st.integers(1, 300), st.integers(1, 2000))
def test_goodput_counts_those_within_every_objective(
    requests: list[Request], ttft: int, tpot: int, e2el: int
) -> None:
    answers = [answer_of(request) for request in requests]
    objectives = {"ttft": ttft / 64, "tpot": tpot / 64, "e2el": e2el / 64}
    good = [
        gaps[0] <= ttft
        and sum(gaps) <= e2el
        and (len(gaps) < 2 or sum(gaps[1:]) <= tpot * (len(gaps) - 1))
        for _, gaps in requests
    ]
    assert measure(answers, 4.0, objectives=objectives).request_goodput == sum(good) / 4
    assert measure(answers, 4.0).request_goodput is None


def test_failures_are_counted_and_nothing_else() -> None:
    good = answer_of((0, [10, 10]))
    bad = Answer(start=0.0, latency=99.0, prompt_tokens=5, output_tokens=3, error="no")
    found = measure([good, bad], 1.0)
    assert (found.completed, found.failed) == (1, 1)
    assert found.e2el.mean == good.latency
    assert (found.total_input_tokens, found.total_output_tokens) == (7, 2)
    assert found.max_concurrent_requests == 1


def test_a_run_of_failures_has_counts_and_no_latencies() -> None:
    answers = [Answer(error="HTTP 500: x")] * 12 + [Answer(error=f"e{i}") for i in range(11)]
    metrics = measure(answers, 0.0)
    lines = report_lines(metrics)
    assert any(line.split() == ["Failed", "requests:", "23"] for line in lines)
    assert not [line for line in lines if "TTFT" in line]
    told = error_lines(answers)
    assert told[0] == "23 of 23 requests failed:"
    assert told[1] == "  12 x HTTP 500: x"
    assert told[-1] == "  and 2 other reasons"
    assert error_lines([answer_of((0, [1]))]) == []


def test_the_report_has_vllms_lines() -> None:
    metrics = measure(
        [answer_of((0, [64, 32, 32]))], 2.0, percents=[90, 99.9], objectives={"ttft": 1}
    )
    lines = report_lines(metrics, max_concurrency=4, request_rate=2.5, names=list(METRICS))
    text = "\n".join(lines)
    for label, value in (
        ("Successful requests:", "1"),
        ("Failed requests:", "0"),
        ("Maximum request concurrency:", "4"),
        ("Request rate configured (RPS):", "2.50"),
        ("Benchmark duration (s):", "2.00"),
        ("Total input tokens:", "7"),
        ("Total generated tokens:", "3"),
        ("Request throughput (req/s):", "0.50"),
        ("Request goodput (req/s):", "0.50"),
        ("Output token throughput (tok/s):", "1.50"),
        ("Peak output token throughput (tok/s):", "2.00"),
        ("Peak concurrent requests:", "1.00"),
        ("Total token throughput (tok/s):", "5.00"),
        ("Mean TTFT (ms):", "1000.00"),
        ("Median TPOT (ms):", "500.00"),
        ("P90 ITL (ms):", "500.00"),
        ("P99.9 E2EL (ms):", "2000.00"),
    ):
        assert f"{label:<40} {value:<10}" in lines, label
    for heading in ("Serving Benchmark Result", "Time to First Token", "Client-side Queueing"):
        assert heading in text


def test_the_result_has_vllms_fields() -> None:
    metrics = measure([answer_of((0, [64, 32]))], 2.0, percents=[90, 99])
    fields = result_fields(metrics, [answer_of((0, [64, 32]))])
    assert set(DETAILS) <= set(fields)
    assert fields["ttfts"] == [1.0]
    assert fields["itls"] == [[0.5]]
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p90", "p99"):
            assert isinstance(fields[f"{figure}_{name}_ms"], float)
    assert fields["mean_e2el_ms"] == 1500.0
    assert {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"} <= set(
        fields
    )


def test_objectives_are_milliseconds() -> None:
    assert parse_objectives(["ttft:200", "e2el:5e3"]) == {"ttft": 0.2, "e2el": 5.0}
    for wrong in ("itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="NAME:MILLISECONDS"):
            parse_objectives([wrong])
