"""The list of settings is a promise to users: change it here on purpose, and in the changelog."""

from src.core.settings import known_settings

FROZEN = [
    "cache.block_size",
    "cache.enable_prefix_caching",
    "cache.memory_bytes",
    "cache.memory_fraction",
    "cache.num_blocks",
    "compile.enforce_eager",
    "compile.startup",
    "device.num_threads",
    "device.type",
    "http.admin_key",
    "http.admin_key_file",
    "http.body_timeout",
    "http.max_body_bytes",
    "http.max_prompts_per_request",
    "http.ready_wait",
    "http.request_timeout",
    "http.shutdown_timeout",
    "model.dtype",
    "model.load_format",
    "model.max_model_len",
    "model.path",
    "model.revision",
    "model.seed",
    "model.served_model_name",
    "observability.legacy_metrics",
    "observability.log_format",
    "observability.log_level",
    "observability.log_requests",
    "observability.plan_log",
    "observability.stall_seconds",
    "observability.otlp_endpoint",
    "observability.stats_interval",
    "observability.timeline_requests",
    "observability.timeline_steps",
    "scheduler.max_bypasses",
    "scheduler.max_num_batched_tokens",
    "observability.trace_content_chars",
    "observability.trace_steps",
    "observability.trace_token_events",
    "scheduler.max_num_seqs",
    "scheduler.max_waiting_requests",
    "scheduler.max_waiting_tokens",
    "scheduler.pipeline_depth",
    "scheduler.policy",
]


def test_the_settings_are_exactly_these() -> None:
    assert sorted(known_settings()) == FROZEN
