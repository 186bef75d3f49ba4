"""Prices and records that tests make up."""

from __future__ import annotations

from src.bench.simulate.step_cost import Price, StepCost, Work
from src.core.steps import StepRecord
from src.engine.scheduling.scheduler import SchedulerLimits

LIMITS = SchedulerLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=96,
    max_model_len=256,
)


def cost_of(device: Price, **changes: object) -> StepCost:
    """Prices of a device alone: the host costs nothing unless told otherwise."""
    free = Price()
    fields: dict[str, object] = {
        "plan": free,
        "commit": free,
        "publish": free,
        "handover": free,
        "dispatch": 0.0,
        "submit": 0.0,
        "spread": [0.0],
        "num_steps": 100,
        "error": 0.0,
        **changes,
    }
    return StepCost(device=device, **fields)  # type: ignore[arg-type]


def record(
    number: int,
    work: Work,
    begin: float,
    seconds: float,
    host: float = 0.001,
    accepted: int = 0,
) -> StepRecord:
    """A step that did this work in so many seconds, with a host that is never late."""
    end = begin + seconds
    return StepRecord(
        step_id=number,
        planned=begin - 2 * host,
        plan_ended=begin - host,
        launched=begin - host,
        launch_ended=begin,
        device_start=begin,
        device_end=end,
        arrived=end,
        commit_started=end,
        committed=end + host,
        publish_started=end + host,
        published=end + 2 * host,
        idle_before=0.0,
        num_rows=work.decode_rows + work.prefill_rows,
        num_tokens=work.decode_rows + work.prefill_tokens + work.drafted_tokens,
        decode_rows=work.decode_rows,
        prefill_tokens=work.prefill_tokens,
        drafted_tokens=work.drafted_tokens,
        accepted_tokens=accepted,
        sampled_rows=work.sampled_rows,
        installed_rows=work.prefill_rows,
        cached_tokens=0,
        preemptions=0,
        running=work.decode_rows + work.prefill_rows,
        waiting=0,
        kv_usage=0.5,
        context_tokens=work.context_tokens,
        attended_pairs=work.context_tokens + work.attended_pairs,
    )
