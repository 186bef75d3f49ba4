"""Logs one line per finished completion: its cost and how it ended, never its content."""

from __future__ import annotations

import logging
from typing import Final

from src.core.records import RequestRecord
from src.core.task import Task
from src.observability.durations import Durations

logger: Final = logging.getLogger("src.requests")


def log_request(
    record: RequestRecord,
    *,
    request_id: str,
    index: int,
    prompt_tokens: int,
    task: Task = "generate",
) -> None:
    """Log the line of a completion that has ended, at level ``info``.

    As text it is one sentence; as JSON every figure is a field, in milliseconds.

    Parameters
    ----------
    request_id
        The caller's id of the request; over HTTP its ``X-Request-Id``.
    index
        Index of the completion within the request.
    task
        What it asked for; a sentence names it unless it is text.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    times = Durations.of(record)
    reason = "unknown" if record.finish_reason is None else record.finish_reason.value
    figures: dict[str, object] = {
        "request_id": request_id,
        "index": index,
        "task": task,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.num_tokens,
        "drafted_tokens": record.drafted,
        "accepted_tokens": record.accepted,
        "preemptions": len(record.preempted),
        "queue_ms": _milliseconds(times.queue),
        "ttft_ms": _milliseconds(times.first_token),
        "tpot_ms": _milliseconds(times.per_token),
        "e2e_ms": _milliseconds(times.whole),
    }
    if record.lora:
        figures["lora"] = record.lora
    if record.trace_id:
        figures["trace_id"] = record.trace_id
    logger.info(_sentence(figures), extra=figures)


def _sentence(figures: dict[str, object]) -> str:
    # The caller's id may contain anything; the log line must stay one line.
    name = str(figures["request_id"])
    name = name if name.isprintable() else ascii(name)
    parts = [
        f"{name}[{figures['index']}] {figures['finish_reason']}",
        f"in {figures['prompt_tokens']} (cached {figures['cached_tokens']})",
        # Nothing else than text has a length.
        f"out {figures['output_tokens']}"
        if figures["task"] == "generate"
        else f"task {figures['task']}",
    ]
    parts += [
        f"{field} {value} ms"
        for field in ("queue", "ttft", "tpot", "e2e")
        if (value := figures[f"{field}_ms"]) is not None
    ]
    if figures["drafted_tokens"]:
        parts.append(f"drafted {figures['drafted_tokens']} (accepted {figures['accepted_tokens']})")
    if figures["preemptions"]:
        parts.append(f"preempted {figures['preemptions']} times")
    if "lora" in figures:
        parts.append(f"adapter {figures['lora']}")
    if "trace_id" in figures:
        parts.append(f"trace {figures['trace_id']}")
    return ", ".join(parts)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
