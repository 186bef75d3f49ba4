"""The figures that metrics read from an engine when they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from src.core.config import Config
from src.core.draft_counts import DraftCounts
from src.observability.metrics import KVBytes, ModelFacts, Readings
from src.ops.build.kernels import kernel_builds, kernel_status

if TYPE_CHECKING:
    from src.engine.scheduling.scheduler import Scheduler
    from src.engine.startup import EngineParts

# One pool serves all groups of layers.
_GROUP = "0"
# As many as there may be API keys; more can only be told apart by a program that embeds the engine.
_MAX_TENANTS = 1024


def model_facts(config: Config, parts: EngineParts) -> ModelFacts:
    """Facts that are fixed once the model is loaded."""
    plan = parts.kv_plan
    return ModelFacts(
        max_model_len=parts.info.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        num_groups=len(plan.windows),
        cache_dtype=parts.info.dtype if parts.memory.kv is None else parts.memory.kv.dtype,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        kv_bytes=plan.total_bytes,
    )


def read_engine(parts: EngineParts, stalled_seconds: float) -> Readings:
    """The current figures. Cheap; any thread may call it."""
    scheduler, worker = parts.scheduler, parts.worker
    stats, size = scheduler.stats, parts.kv_plan.bytes_per_block
    held, cached, free = scheduler.block_counts
    graphs = worker.code.graph_stats
    drafts = worker.draft_counts or DraftCounts()
    return Readings(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        kv_usage=scheduler.kv_usage,
        kv={_GROUP: KVBytes(held * size, cached * size, free * size)},
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        prefix_queries=stats.prefix_cache_queries,
        prefix_hits=stats.prefix_cache_hits,
        discarded_tokens=stats.discarded_tokens,
        bypasses=stats.bypasses,
        shortages=stats.shortages,
        yields=stats.yields,
        drafts=drafts.rows,
        draft_tokens=drafts.drafted,
        accepted_tokens=drafts.accepted,
        accepted_tokens_at={str(at): count for at, count in enumerate(drafts.accepted_at)},
        # A copy, because the device thread adds to it.
        drafts_by_source=dict(drafts.by_source),
        tenants=scheduler.tenants(_MAX_TENANTS),
        compiled_graphs=worker.code.num_graphs,
        compile_seconds=worker.code.compile_seconds,
        graph_steps=dict(graphs.steps),
        graph_tokens=graphs.tokens,
        graph_padding_tokens=graphs.padding_tokens,
        captured_graphs=dict(graphs.captured),
        graph_capture_seconds=graphs.capture_seconds,
        graph_bytes=graphs.bytes,
        kernels=kernel_status() if worker.is_on_cpu else "",
        kernel_builds=kernel_builds(),
        max_adapters=scheduler.limits.num_adapter_slots,
        running_adapters=_adapters(scheduler, runs=True),
        waiting_adapters=_adapters(scheduler, runs=False),
        stalled_seconds=stalled_seconds,
    )


def _adapters(scheduler: Scheduler, *, runs: bool) -> list[str]:
    """Names of the adapters of requests that have a row, or of those that have none."""
    if not scheduler.limits.num_adapter_slots:
        return []
    # A copy, since other threads may ask.
    return sorted(
        {
            state.request.adapter.name
            for state in list(scheduler.states)
            if state.request.adapter is not None and (state.row >= 0) is runs
        }
    )
