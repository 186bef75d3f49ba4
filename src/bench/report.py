"""A run's metrics, printed like vLLM and named as in its result files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from src.bench.answers import Answer
from src.bench.metrics import Metrics

# Metric -> its printed name, and the heading above it
METRICS: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
DEFAULT_METRICS: Final = ("ttft", "tpot", "itl", "e2el")
# Result fields with one entry per request; like vLLM, they are only saved on request.
DETAILS: Final = (
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
)
_WIDTH: Final = 50
_MAX_ERRORS: Final = 10
_MS: Final = 1000.0


def report_lines(
    metrics: Metrics,
    *,
    names: Sequence[str] = DEFAULT_METRICS,
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    title: str = "Serving Benchmark Result",
) -> list[str]:
    """The report of a run, with a section for each metric in ``names`` (keys of ``METRICS``)."""
    lines = [f" {title} ".center(_WIDTH, "=")]
    lines += [
        _count("Successful requests:", metrics.completed),
        _count("Failed requests:", metrics.failed),
    ]
    if max_concurrency is not None:
        lines.append(_count("Maximum request concurrency:", max_concurrency))
    if request_rate is not None:
        lines.append(_figure("Request rate configured (RPS):", request_rate))
    lines += [
        _figure("Benchmark duration (s):", metrics.duration),
        _count("Total input tokens:", metrics.total_input_tokens),
        _count("Total generated tokens:", metrics.total_output_tokens),
        _figure("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        lines.append(_figure("Request goodput (req/s):", metrics.request_goodput))
    lines += [
        _figure("Output token throughput (tok/s):", metrics.output_throughput),
        _figure("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        _figure("Peak concurrent requests:", metrics.max_concurrent_requests),
        _figure("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    # Without answers there are no latencies, and zeros would look like real ones.
    for name in names if metrics.completed else ():
        short, heading = METRICS[name]
        summary = getattr(metrics, name).scaled(_MS)
        lines += [
            heading.center(_WIDTH, "-"),
            _figure(f"Mean {short} (ms):", summary.mean),
            _figure(f"Median {short} (ms):", summary.median),
        ]
        lines += [
            _figure(f"P{_word(percent)} {short} (ms):", value)
            for percent, value in summary.percentiles.items()
        ]
    return [*lines, "=" * _WIDTH]


def result_fields(
    metrics: Metrics, answers: Sequence[Answer], names: Sequence[str] = DEFAULT_METRICS
) -> dict[str, Any]:
    """The result under the names of vLLM's result files, with the per-request ``DETAILS``."""
    fields: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "total_cached_tokens": metrics.total_cached_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itl for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start for answer in answers],
        "queue_times": [answer.queued for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name in names:
        summary = getattr(metrics, name).scaled(_MS)
        fields[f"mean_{name}_ms"] = summary.mean
        fields[f"median_{name}_ms"] = summary.median
        fields[f"std_{name}_ms"] = summary.std
        for percent, value in summary.percentiles.items():
            fields[f"p{_word(percent)}_{name}_ms"] = value
    return fields


def error_lines(answers: Sequence[Answer]) -> list[str]:
    """Error messages with their counts, the most frequent first."""
    errors = Counter(answer.error for answer in answers if not answer.success)
    if not errors:
        return []
    lines = [f"{errors.total()} of {len(answers)} requests failed:"]
    lines += [f"  {count} x {error}" for error, count in errors.most_common(_MAX_ERRORS)]
    if len(errors) > _MAX_ERRORS:
        lines.append(f"  and {len(errors) - _MAX_ERRORS} other reasons")
    return lines


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _figure(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"


def _word(percent: float) -> str:
    return f"{percent:g}"
