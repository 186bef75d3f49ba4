import re

import pytest

from src.core.outputs import FinishReason
from src.observability.metrics import EngineMetrics, token_buckets


def test_two_engines_in_one_process_do_not_share_a_number() -> None:
    first, second = EngineMetrics("a"), EngineMetrics("a")
    first.on_tokens(3, 0.01)
    assert first.value("vllm:generation_tokens_total") == 3
    assert second.value("vllm:generation_tokens_total") == 0


def test_every_event_is_visible_under_vllms_name() -> None:
    metrics = EngineMetrics("demo", max_model_len=1000)
    metrics.set_gauges(2, 5, 0.25)
    metrics.on_admitted(0.1)
    metrics.on_prompt_tokens(7)
    metrics.on_prefix_cache(7, 4)
    metrics.on_first_token(0.03)
    metrics.on_tokens(1, None)
    metrics.on_tokens(2, 0.02)
    metrics.on_preemption()
    metrics.on_step(9, 0.5, 0.25)
    metrics.on_finished(FinishReason.LENGTH, 1.2, 7, 3)
    for name, expected in {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 7,
        "vllm:generation_tokens_total": 3,
        "vllm:prefix_cache_queries_total": 7,
        "vllm:prefix_cache_hits_total": 4,
        "vllm:num_preemptions_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_sum": 1.2,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 7,
        "vllm:request_generation_tokens_sum": 3,
        "vllm:iteration_tokens_total_sum": 9,
    }.items():
        assert metrics.value(name) == expected, name
    assert metrics.value("vllm:request_success_total", finished_reason="length") == 1
    assert metrics.value("vllm:request_success_total", finished_reason="stop") == 0
    assert metrics.value("slipstream_device_idle_seconds_total") == 0.25


def test_the_servers_own_counters() -> None:
    metrics = EngineMetrics("demo")
    metrics.on_rejection("queue_full")
    metrics.on_disconnect()
    assert metrics.value("slipstream_http_rejections_total", reason="queue_full") == 1
    assert metrics.value("slipstream_client_disconnects_total") == 1


def test_ttft_buckets_are_vllms() -> None:
    body, content_type = EngineMetrics("demo").render()
    assert content_type.startswith("text/plain")
    bounds = re.findall(r'vllm:time_to_first_token_seconds_bucket\{le="([^"]+)"', body.decode())
    assert [float(bound) for bound in bounds[:-1]] == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        *(20, 40, 80, 160, 640, 2560),
    ]
    assert bounds[-1] == "+Inf"


def test_openmetrics_is_spoken_to_those_who_ask() -> None:
    body, content_type = EngineMetrics("demo").render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, [1]), (5, [1, 2, 5]), (99, [1, 2, 5, 10, 20, 50]), (0, [1])]
)
def test_token_buckets(most: int, bounds: list[int]) -> None:
    assert token_buckets(most) == bounds
