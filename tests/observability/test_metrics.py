"""The numbers themselves: who counts what, under which name, label and bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from src.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from src.core.outputs import FinishReason
from src.core.records import RequestRecord
from src.core.steps import StepRecord
from src.observability.metrics import (
    EngineMetrics,
    KVBytes,
    ModelFacts,
    Readings,
    instruments,
    own,
    token_buckets,
)
from src.observability.metrics.instruments import Families, Histogram

FACTS = ModelFacts(
    max_model_len=1000,
    block_size=16,
    num_blocks=64,
    num_groups=1,
    cache_dtype="bfloat16",
    enable_prefix_caching=True,
    kv_bytes=65_536,
)
READINGS = Readings(
    running=2,
    waiting=5,
    kv_usage=0.25,
    kv={"0": KVBytes(held=100, cached=20, free=3)},
    preemptions=3,
    recomputed_tokens=40,
    prefix_queries=80,
    prefix_hits=60,
    drafts=11,
    draft_tokens=50,
    accepted_tokens=30,
    accepted_tokens_at={"0": 20, "1": 10},
    discarded_tokens=7,
    bypasses=1,
    shortages=2,
    yields=6,
    tenants={"alice": (2, 4), "key-2": (0, 1)},
    compiled_graphs=4,
    compile_seconds=1.5,
    graph_steps={"decode": 9, "none": 1},
    graph_tokens=50,
    graph_padding_tokens=6,
    captured_graphs={"decode": 4, "mixed": 2},
    graph_capture_seconds=0.25,
    graph_bytes=4096,
    kernels="cpp-avx2",
    kernel_builds=1,
    stalled_seconds=0.5,
)
TRACE = "0af7651916cd43dd8448eb211c80319c"


def loaded(readings: Readings = READINGS, *, legacy_names: bool = False) -> EngineMetrics:
    metrics = EngineMetrics("demo", legacy_names=legacy_names)
    metrics.on_loaded(FACTS, lambda: readings)
    return metrics


def record(**changes: object) -> RequestRecord:
    """A completion of 3 tokens: 0.5 s in the queue, 1 s of prefill, 2 s of decode."""
    values = {
        "arrival": 10.0,
        "queued": 10.25,
        "admitted": [10.75],
        "preempted": [],
        "chunks": [],
        "cached_tokens": 4,
        "first_token": 11.75,
        "last_token": 13.75,
        "num_tokens": 3,
        "ended": 14.0,
        "finish_reason": FinishReason.LENGTH,
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def step(**changes: float) -> StepRecord:
    """A step whose parts take 1, 2, 3, ... milliseconds; 90 ms of the device, 10 ms of waiting."""
    values = {
        "planned": 100.0,
        "plan_ended": 100.001,
        "launched": 100.001,
        "launch_ended": 100.003,
        "device_start": 100.004,
        "device_end": 100.094,
        "arrived": 100.095,
        "commit_started": 100.098,
        "committed": 100.103,
        "publish_started": 100.103,
        "published": 100.109,
        "idle_before": 0.01,
        "kv_usage": 0.5,
        "prefill_tokens": 30,
        "num_tokens": 32,
    }
    counts = (
        *("step_id", "num_rows", "decode_rows", "sampled_rows", "installed_rows"),
        *("cached_tokens", "preemptions", "running", "waiting"),
    )
    return StepRecord(**{**dict.fromkeys(counts, 1), **values, **changes})  # type: ignore[arg-type]


def test_two_engines_in_one_process_do_not_share_a_number() -> None:
    first, second = EngineMetrics("a"), EngineMetrics("a")
    first.on_tokens(3, 0.01)
    assert first.value("vllm:generation_tokens_total") == 3
    assert second.value("vllm:generation_tokens_total") == 0


def test_a_finished_completion_is_in_every_histogram_of_requests() -> None:
    metrics = loaded()
    metrics.on_submitted(2)
    metrics.on_admitted(0.5)
    metrics.on_first_token(record(), 7)
    metrics.on_tokens(1, None)
    metrics.on_tokens(2, 2.0)
    metrics.on_finished(record(preempted=[1.0, 2.0]), prompt_tokens=7, max_tokens=3)
    metrics.on_request_finished(3)
    sums = {
        "vllm:request_params_n": 2,
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:time_to_first_token_seconds": 1.75,
        "vllm:inter_token_latency_seconds": 2,
        "vllm:request_time_per_output_token_seconds": 1,
        "vllm:e2e_request_latency_seconds": 4,
        "vllm:request_prefill_time_seconds": 1,
        "vllm:request_decode_time_seconds": 2,
        "vllm:request_inference_time_seconds": 3,
        "vllm:request_prompt_tokens": 7,
        "vllm:request_generation_tokens": 3,
        "vllm:request_max_num_generation_tokens": 3,
        "vllm:request_params_max_tokens": 3,
        "vllm:request_num_preemptions": 2,
        "vllm:request_prefill_kv_computed_tokens": 3,
    }
    for name, expected in sums.items():
        assert metrics.value(f"{name}_sum") == pytest.approx(expected), name
        assert metrics.value(f"{name}_count") == 1, name
    counters = {
        "vllm:prompt_tokens_total": 7,
        "vllm:prompt_tokens_cached_total": 4,
        "vllm:generation_tokens_total": 3,
    }
    for name, expected in counters.items():
        assert metrics.value(name) == expected, name
    by_source = "vllm:prompt_tokens_by_source_total"
    assert metrics.value(by_source, source="local_compute") == 3
    assert metrics.value(by_source, source="local_cache_hit") == 4
    assert metrics.value("vllm:request_success_total", finished_reason="length") == 1
    assert metrics.value("vllm:request_success_total", finished_reason="stop") == 0


def test_what_a_completion_never_reached_is_not_observed_as_zero() -> None:
    metrics = loaded()
    metrics.on_finished(
        record(admitted=[], first_token=None, last_token=None, num_tokens=0),
        prompt_tokens=7,
        max_tokens=3,
    )
    metrics.on_finished(record(num_tokens=1, last_token=11.75), prompt_tokens=7, max_tokens=3)
    assert metrics.value("vllm:e2e_request_latency_seconds_count") == 2
    assert metrics.value("vllm:request_prefill_time_seconds_count") == 1
    assert metrics.value("vllm:request_time_per_output_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"admitted": [], "first_token": None, "last_token": None}, "queue"),
        ({"first_token": None, "last_token": None}, "prefill"),
        ({}, "decode"),
    ],
)
def test_a_missed_deadline_says_how_far_it_was(changes: dict[str, object], stage: str) -> None:
    metrics = loaded()
    metrics.on_finished(
        record(**changes, finish_reason=FinishReason.DEADLINE), prompt_tokens=7, max_tokens=3
    )
    missed = {
        name: metrics.value("slipstream_deadline_misses_total", stage=name)
        for name in ("queue", "prefill", "decode")
    }
    assert missed == dict.fromkeys(missed, 0) | {stage: 1}


def test_the_parts_of_a_step_are_apart() -> None:
    metrics = loaded()
    metrics.on_step(step())
    expected = {"plan": 1, "launch": 2, "queue": 3, "device": 90, "return": 4, "commit": 5}
    for phase, milliseconds in {**expected, "publish": 6}.items():
        value = metrics.value("slipstream_step_phase_seconds_sum", phase=phase)
        assert value == pytest.approx(milliseconds / 1000), phase
    assert metrics.value("slipstream_device_busy_seconds_total") == pytest.approx(0.09)
    assert metrics.value("slipstream_device_idle_seconds_total") == pytest.approx(0.01)
    assert metrics.value("vllm:iteration_tokens_total_sum") == 32
    assert metrics.value("vllm:scheduled_prefill_tokens_total") == 30


def test_the_bubble_looks_back_one_minute() -> None:
    bubble = own.RecentBubble()
    assert bubble.value(0.0) == 0.0
    bubble.add(100.2, busy=3.0, idle=1.0)
    bubble.add(130.9, busy=1.0, idle=3.0)
    assert bubble.value(131.0) == 0.5
    assert bubble.value(170.5) == 0.75
    assert bubble.value(200.0) == 0.0
    # The ring comes round to the slot of second 100.
    bubble.add(160.0, busy=1.0, idle=0.0)
    assert bubble.value(161.0) == pytest.approx(3 / 5)


def test_what_the_engine_is_asked_for_is_of_the_moment_of_the_scrape() -> None:
    metrics = loaded()
    expected = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 3,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 60,
        "vllm:spec_decode_num_drafts_total": 11,
        "vllm:spec_decode_num_draft_tokens_total": 50,
        "vllm:spec_decode_num_accepted_tokens_total": 30,
        "slipstream_recomputed_tokens_total": 40,
        "slipstream_discarded_tokens_total": 7,
        "slipstream_admission_bypasses_total": 1,
        "slipstream_memory_shortages_total": 2,
        "slipstream_yields_total": 6,
        "slipstream_compiled_graphs": 4,
        "slipstream_compile_seconds": 1.5,
        "slipstream_graph_capture_seconds": 0.25,
        "slipstream_graph_bytes": 4096,
        "slipstream_kernel_builds_total": 1,
        "slipstream_stalled_seconds": 0.5,
    }
    for name, value in expected.items():
        assert metrics.value(name) == value, name
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [metrics.value(per_place, position=place) for place in "01"] == [20, 10]
    assert metrics.value("slipstream_kv_bytes", group="0", state="cached") == 20
    assert metrics.value("slipstream_tenant_requests", tenant="alice", state="waiting") == 4
    assert metrics.value("slipstream_tenant_requests", tenant="alice", state="running") == 2
    assert metrics.value("slipstream_cpu_kernels_info", kernels="cpp-avx2") == 1
    assert metrics.value("slipstream_graph_steps_total", kind="decode") == 9
    assert metrics.value("slipstream_graph_tokens_total", kind="padding") == 6
    assert metrics.value("slipstream_captured_graphs", kind="mixed") == 2
    metrics.on_stopped()
    assert metrics.value("vllm:num_requests_running") == 0
    assert metrics.value("slipstream_stalled_seconds") == 0
    assert "slipstream_kv_bytes{" not in metrics.render()[0].decode()
    assert metrics.value("vllm:num_preemptions_total") == 3


def test_the_kubernetes_gateway_finds_its_labels() -> None:
    families = {family.name: family for family in parse_text(loaded().render()[0].decode())}
    (cache,) = families["vllm:cache_config_info"].samples
    assert cache.value == 1
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "64")
    assert "model_name" not in cache.labels
    (lora,) = families["vllm:lora_requests_info"].samples
    assert lora.value > 1.7e9
    assert lora.labels == {
        "max_lora": "0",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    (running,) = families["vllm:num_requests_running"].samples
    assert running.labels == {"model_name": "demo", "engine": "0"}


def test_renamed_metrics_are_there_when_asked_for() -> None:
    old = {
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:gpu_prefix_cache_hit_rate": 0.75,
        "vllm:gpu_prefix_cache_hits_total": 60,
        "vllm:gpu_prefix_cache_queries_total": 80,
        "vllm:time_per_output_token_seconds_count": 1,
    }
    metrics = loaded(legacy_names=True)
    metrics.on_tokens(1, 0.02)
    for name, value in old.items():
        assert metrics.value(name) == value, name
    modern = loaded().render()[0].decode()
    assert "vllm:gpu_" not in modern
    assert "vllm:time_per_output_token_seconds" not in modern


def test_what_dashboards_routers_and_autoscalers_of_vllm_ask_for_is_there() -> None:
    """Sample names in vLLM's own Grafana dashboards, the production-stack and the gateway."""
    asked = [
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
        *("inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
        *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
        *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
        *("cache_config_info", "lora_requests_info"),
    ]
    renamed = [
        *("gpu_cache_usage_perc", "gpu_prefix_cache_hit_rate", "gpu_prefix_cache_hits_total"),
        *("gpu_prefix_cache_queries_total", "time_per_output_token_seconds_bucket"),
    ]
    modern = {name for name, _ in series(loaded())}
    both = {name for name, _ in series(loaded(legacy_names=True))}
    assert {f"vllm:{name}" for name in asked} <= modern
    assert {f"vllm:{name}" for name in asked + renamed} <= both


def test_refusals_are_counted_by_their_most_special_kind() -> None:
    metrics = loaded()
    for error in (
        QueueFullError("x"),
        PromptTooLongError("x"),
        InvalidRequestError("x"),
        OSError(),
    ):
        metrics.on_refused(error)
    for reason in ("queue_full", "prompt_too_long", "invalid_request", "other"):
        assert metrics.value("slipstream_queue_rejections_total", reason=reason) == 1, reason


def test_the_servers_own_counters() -> None:
    metrics = EngineMetrics("demo")
    metrics.on_rejection("queue_full")
    metrics.on_disconnect()
    metrics.on_loop_lag(0.003)
    metrics.on_startup_phase("weights", 1.5, 2.5)
    metrics.on_startup_phase("compile", 1.0, None)
    metrics.on_step_failed()
    metrics.on_row_failed("logits")
    metrics.on_observer_error()
    assert metrics.value("slipstream_http_rejections_total", reason="queue_full") == 1
    assert metrics.value("slipstream_client_disconnects_total") == 1
    assert metrics.value("slipstream_event_loop_lag_seconds_sum") == 0.003
    took, began = "slipstream_startup_phase_seconds", "slipstream_startup_phase_began_seconds"
    assert metrics.value(took, phase="weights") == 2.5
    assert metrics.value(began, phase="weights") == 1.5
    assert metrics.value(began, phase="compile") == 1.0
    # It goes on.
    assert metrics.registry.get_sample_value(took, {"phase": "compile"}) is None
    assert metrics.value("slipstream_step_failures_total") == 1
    assert metrics.value("slipstream_row_failures_total", reason="logits") == 1
    assert (
        metrics.registry.get_sample_value("slipstream_row_failures_total", {"reason": "refused"})
        == 0
    )
    assert metrics.value("slipstream_observer_errors_total") == 1


def test_a_label_has_a_bounded_number_of_values() -> None:
    families = Families("x_", {})
    family = families.counter("refusals", "About.", "reason")
    for index in range(3 * instruments.MAX_CHILDREN):
        family.child(f"reason {index}").inc()
    (metric,) = families.collect()
    assert len(metric.samples) == instruments.MAX_CHILDREN + 1
    counts = {sample.labels["reason"]: sample.value for sample in metric.samples}
    assert counts["other"] == 2 * instruments.MAX_CHILDREN


def bounds_of(metrics: EngineMetrics, name: str) -> list[str]:
    return re.findall(
        rf'^vllm:{name}_bucket{{.*le="([^"]+)"', metrics.render()[0].decode(), re.MULTILINE
    )


def test_buckets_are_vllms() -> None:
    metrics = loaded()
    assert [float(bound) for bound in bounds_of(metrics, "time_to_first_token_seconds")[:-1]] == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        *(20, 40, 80, 160, 640, 2560),
    ]
    token_times = [
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        *(20, 40, 80),
    ]
    for name in ("inter_token_latency_seconds", "request_time_per_output_token_seconds"):
        assert [float(bound) for bound in bounds_of(metrics, name)[:-1]] == token_times
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert [float(bound) for bound in bounds_of(metrics, f"{name}_seconds")[:-1]] == [
            *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
            *(1920, 7680),
        ]
    for name in ("request_prompt_tokens", "request_params_max_tokens"):
        assert bounds_of(metrics, name) == [
            *("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0"),
            "+Inf",
        ]


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.0001, 2.0, 7.0, float("inf")])
def test_a_bound_is_inclusive(value: float) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    cumulative = [count for suffix, _, count, _ in histogram.points() if suffix == "_bucket"]
    assert cumulative == [value <= 1.0, value <= 2.0, 1]


def test_observations_of_traces_are_exemplars_in_openmetrics_only() -> None:
    metrics = loaded()
    metrics.on_first_token(record(trace_id=TRACE), 7)
    metrics.on_tokens(1, 0.02, TRACE)
    metrics.on_tokens(1, 30.0)
    metrics.on_finished(record(trace_id=TRACE), prompt_tokens=7, max_tokens=3)
    body, content_type = metrics.render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    exemplars = {
        sample.name: (sample.labels["le"], sample.exemplar.labels, sample.exemplar.value)
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    trace = {"trace_id": TRACE}
    assert exemplars["vllm:time_to_first_token_seconds_bucket"] == ("2.5", trace, 1.75)
    assert exemplars["vllm:inter_token_latency_seconds_bucket"] == ("0.025", trace, 0.02)
    assert exemplars["vllm:e2e_request_latency_seconds_bucket"] == ("5.0", trace, 4.0)
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    assert TRACE.encode() not in text


def test_both_formats_are_what_prometheus_clients_parsers_read() -> None:
    metrics = loaded(legacy_names=True)
    metrics.on_startup_phase('quote " backslash \\ newline \n', 0.0, 1.0)
    plain = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(metrics.render()[0].decode())
        for sample in family.samples
    }
    body, _ = metrics.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    opened = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
    }
    # What is of the moment of a scrape differs between two of them.
    moment = ("process_", "vllm:lora_requests_info")
    assert {key: value for key, value in plain.items() if not key[0].startswith(moment)} == {
        key: value for key, value in opened.items() if not key[0].startswith(moment)
    }
    assert plain.keys() == opened.keys()
    expected = generate_latest(metrics.registry)
    assert {line for line in expected.decode().splitlines() if not line.startswith(moment)} == {
        line for line in metrics.render()[0].decode().splitlines() if not line.startswith(moment)
    }


def test_openmetrics_ends_once() -> None:
    body, _ = loaded().render("application/openmetrics-text;version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert body.count(b"# EOF") == 1


def test_the_pieces_are_those_of_the_registry() -> None:
    metrics = loaded()
    families = {family.name for family in parse_text(metrics.render()[0].decode())}
    assert families == {family.name for family in metrics.registry.collect()}
    assert any(name.startswith("process_") for name in families)


def series(metrics: EngineMetrics) -> Iterator[tuple[str, frozenset[tuple[str, str]]]]:
    for family in parse_text(metrics.render()[0].decode()):
        for sample in family.samples:
            yield sample.name, frozenset(sample.labels.items())


def test_no_series_is_there_twice() -> None:
    found = list(series(loaded(legacy_names=True)))
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, [1]), (5, [1, 2, 5]), (99, [1, 2, 5, 10, 20, 50]), (0, [1])]
)
def test_token_buckets(most: int, bounds: list[int]) -> None:
    assert token_buckets(most) == bounds
