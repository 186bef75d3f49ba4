"""A known workload through a real engine, and the numbers computed from its results alone."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from src import AsyncEngine, SamplingParams
from src.core.errors import PromptTooLongError, QueueFullError
from src.core.outputs import FinishReason, GenerationResult
from src.observability.metrics import token_buckets
from tests.engine.loop_harness import Harness, answered, read
from tests.support.engines import small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

DEMO = Path("configs/demo")
BLOCK = 16
# (prompt length, max_tokens, n)
WORKLOAD = ((5, 3, 1), (40, 12, 1), (17, 1, 1), (33, 8, 3), (200, 6, 2))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(engine: AsyncEngine) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(engine.metrics.render()[0].decode())
        for sample in family.samples
    }


def vllm(samples: Samples, name: str, **labels: str) -> float:
    common = {"model_name": "demo", "engine": "0"}
    return samples[f"vllm:{name}", frozenset({**common, **labels}.items())]


def own(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"slipstream_{name}", frozenset(labels.items())]


def buckets(values: Sequence[float], bounds: Sequence[float]) -> list[int]:
    """Cumulative counts, the bucket without a bound last."""
    indices = [bisect_left(bounds, value) for value in values]
    return [sum(index <= upper for index in indices) for upper in range(len(bounds) + 1)]


def shown_buckets(samples: Samples, name: str) -> list[float]:
    found = {
        dict(labels)["le"]: value
        for (sample, labels), value in samples.items()
        if sample == f"vllm:{name}_bucket"
    }
    return [found[bound] for bound in sorted(found, key=float)]


def prompt(length: int, seed: int) -> list[int]:
    return [5 + (seed * 31 + index * 7) % 200 for index in range(length)]


async def generate(engine: AsyncEngine) -> list[GenerationResult]:
    return await asyncio.gather(
        *(
            engine.generate(
                prompt(length, seed),
                SamplingParams(max_tokens=most, n=n, ignore_eos=True, seed=seed),
            )
            for seed, (length, most, n) in enumerate(WORKLOAD)
        )
    )


async def settled(engine: AsyncEngine) -> Samples:
    # The step behind the last one that somebody heard of is counted too.
    await Probe(engine).idle()
    return scrape(engine)


@pytest.fixture(scope="module")
async def served() -> Any:
    config = small_config(DEMO, cache__block_size=BLOCK, cache__num_blocks=256)
    async with AsyncEngine.open(config) as engine:
        results = await generate(engine)
        samples = await settled(engine)
        yield engine, results, samples


async def test_counters_and_sums_are_those_of_the_results(served: Any) -> None:
    _, results, samples = served
    completions = [completion for result in results for completion in result.completions]
    prompts = [length for length, _, n in WORKLOAD for _ in range(n)]
    outputs = [len(completion.token_ids) for completion in completions]
    assert outputs == [most for _, most, n in WORKLOAD for _ in range(n)]
    cached = vllm(samples, "prompt_tokens_cached_total")
    assert vllm(samples, "generation_tokens_total") == sum(outputs)
    assert vllm(samples, "prompt_tokens_total") == sum(prompts)
    # What is served together shares whole blocks only, and a hit never covers a whole prompt.
    assert cached % BLOCK == 0
    assert cached < sum(prompts)
    by_source = "prompt_tokens_by_source_total"
    assert vllm(samples, by_source, source="local_cache_hit") == cached
    assert vllm(samples, by_source, source="local_compute") == sum(prompts) - cached
    assert vllm(samples, "prefix_cache_queries_total") == sum(prompts)
    assert vllm(samples, "prefix_cache_hits_total") == cached
    assert vllm(samples, "scheduled_prefill_tokens_total") == sum(prompts) - cached
    for reason in FinishReason:
        expected = len(completions) if reason is FinishReason.LENGTH else 0
        assert vllm(samples, "request_success_total", finished_reason=reason.value) == expected
    # Every token but a completion's last one is computed once.
    computed = sum(prompts) - cached + sum(outputs) - len(completions)
    # Depth 2 may have launched one more step of a row that had just ended.
    discarded = own(samples, "discarded_tokens_total")
    assert vllm(samples, "iteration_tokens_total_sum") == computed + discarded


async def test_histograms_have_the_right_counts_in_the_right_buckets(served: Any) -> None:
    engine, results, samples = served
    completions = [completion for result in results for completion in result.completions]
    outputs = [len(completion.token_ids) for completion in completions]
    prompts = [length for length, _, n in WORKLOAD for _ in range(n)]
    bounds = token_buckets(engine.model_info.max_model_len)
    longest = [most for _, most, _ in WORKLOAD]
    for name, values in {
        "request_prompt_tokens": prompts,
        "request_generation_tokens": outputs,
        "request_params_max_tokens": outputs,
        "request_max_num_generation_tokens": longest,
    }.items():
        assert shown_buckets(samples, name) == buckets(values, bounds), name
        assert vllm(samples, f"{name}_sum") == sum(values), name
    choices = [n for _, _, n in WORKLOAD]
    assert shown_buckets(samples, "request_params_n") == buckets(choices, (1, 2, 5, 10, 20))
    for name in (
        *("time_to_first_token", "e2e_request_latency", "request_queue_time"),
        *("request_prefill_time", "request_decode_time", "request_inference_time"),
    ):
        assert vllm(samples, f"{name}_seconds_count") == len(completions), name
    assert vllm(samples, "request_num_preemptions_count") == len(completions)
    gaps = sum(outputs) - len(completions)
    assert vllm(samples, "inter_token_latency_seconds_count") == gaps
    several = sum(output > 1 for output in outputs)
    assert vllm(samples, "request_time_per_output_token_seconds_count") == several
    # A decode's time is the sum of its gaps, so both histograms have the same sum.
    decode = vllm(samples, "request_decode_time_seconds_sum")
    assert vllm(samples, "inter_token_latency_seconds_sum") == pytest.approx(decode)
    parts = [vllm(samples, f"request_{part}_time_seconds_sum") for part in ("prefill", "decode")]
    assert vllm(samples, "request_inference_time_seconds_sum") == pytest.approx(sum(parts))


async def test_steps_and_their_phases_are_those_of_the_timeline(served: Any) -> None:
    engine, _, samples = served
    steps = list(engine.timeline)
    assert vllm(samples, "iteration_tokens_total_count") == len(steps)
    assert vllm(samples, "iteration_tokens_total_sum") == sum(step.num_tokens for step in steps)
    expected = {
        "plan": [step.plan_ended - step.planned for step in steps],
        "device": [step.device_end - step.device_start for step in steps],
        "commit": [step.committed - step.commit_started for step in steps],
    }
    for phase, durations in expected.items():
        assert own(samples, "step_phase_seconds_count", phase=phase) == len(steps)
        assert own(samples, "step_phase_seconds_sum", phase=phase) == pytest.approx(sum(durations))
    busy = own(samples, "device_busy_seconds_total")
    idle = own(samples, "device_idle_seconds_total")
    assert busy == pytest.approx(sum(expected["device"]))
    assert idle == pytest.approx(sum(step.idle_before for step in steps))
    assert own(samples, "device_bubble_ratio") == pytest.approx(idle / (busy + idle))


async def test_gauges_say_what_the_engine_is(served: Any) -> None:
    engine, _, samples = served
    held = {
        state: own(samples, "kv_bytes", group="0", state=state)
        for state in ("held", "cached", "free")
    }
    plan = Probe(engine).parts.kv_plan
    assert held["held"] == 0
    assert held["cached"] > 0
    assert sum(held.values()) == plan.total_bytes
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert vllm(samples, name) == 0
    (config,) = [labels for name, labels in samples if name == "vllm:cache_config_info"]
    shown = dict(config)
    assert (shown["block_size"], shown["num_gpu_blocks"]) == (str(BLOCK), "256")
    phases = [
        dict(labels)["phase"]
        for name, labels in samples
        if name == "slipstream_startup_phase_seconds"
    ]
    # Compiled engines have one more.
    assert [phase for phase in phases if phase != "compile"] == [
        *("importing", "configuration", "weights", "kv_cache")
    ]
    async with asyncio.timeout(60):
        # A beat in four of a second.
        while own(scrape(engine), "event_loop_lag_seconds_count") < 2:
            await asyncio.sleep(0.05)
    assert own(samples, "stalled_seconds") == 0


async def test_preempted_requests_are_counted_where_they_were_preempted() -> None:
    """Four completions of 60 tokens in 8 blocks of 16: not all can stay."""
    config = small_config(
        DEMO,
        cache__block_size=BLOCK,
        cache__num_blocks=8,
        cache__enable_prefix_caching=False,
        model__max_model_len=128,
    )
    async with AsyncEngine.open(config) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
        await asyncio.gather(*(engine.generate(prompt(8, seed), params) for seed in range(4)))
        samples = await settled(engine)
        preemptions = engine.stats.preemptions
    assert preemptions > 0
    assert vllm(samples, "num_preemptions_total") == preemptions
    assert vllm(samples, "request_num_preemptions_sum") == preemptions
    # The wait of a newcomer; who waits once more has been counted.
    assert vllm(samples, "request_queue_time_seconds_count") == 4
    recomputed = own(samples, "recomputed_tokens_total")
    assert recomputed > 0
    assert vllm(samples, "generation_tokens_total") == 240
    # What is computed again is prefill of nobody's prompt.
    assert vllm(samples, "prompt_tokens_total") == 32
    # It is all that was given up, and the newest token of whoever gave it up.
    assert vllm(samples, "scheduled_prefill_tokens_total") == 32 + recomputed + preemptions


async def test_what_is_computed_again_is_prefill_to_its_last_chunk() -> None:
    """Two of 22 tokens in 12 blocks of 2; what the second one gave up takes several steps."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=4, enable_prefix_caching=False)
    reading = asyncio.gather(*(read(harness.submit(key, 20)) for key in (1, 2)))
    number = 0
    while not reading.done():
        if number < len(harness.worker.launched):
            await answered(harness, number, number + 1, 0.001)
            number += 1
        await asyncio.sleep(0)
    assert reading.result() == [(20, FinishReason.LENGTH)] * 2
    assert harness.scheduler.stats.preemptions > 0
    await harness.end()
    tracks = {track.key: track for track in harness.observer.requests.tracks(9)[0]}
    # Key -> the lengths that had to be computed, one for each row that it was given.
    lengths: dict[int, list[int]] = {key: [] for key in tracks}
    for step in harness.worker.launched:
        for install in step.plan.installs:
            lengths[install.request_key].append(len(install.token_ids))
    assert any(length > 4 for each in lengths.values() for length in each[1:])
    for key, track in tracks.items():
        ends = [0]
        for chunk in track.chunks:
            if chunk.start == 0:
                ends.append(0)
            assert chunk.start == ends[-1]
            ends[-1] += chunk.num_tokens
        assert ends[1:] == lengths[key]


async def test_who_is_refused_and_who_is_late_is_counted() -> None:
    config = small_config(
        DEMO, scheduler__max_num_seqs=1, scheduler__max_waiting_requests=1, cache__num_blocks=64
    )
    async with AsyncEngine.open(config) as engine:
        long = SamplingParams(max_tokens=150, ignore_eos=True)
        running = asyncio.create_task(engine.generate([5, 6], long))
        while not engine.stats.num_running:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(engine.generate([5, 6], long, timeout=0.001))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        while not engine.stats.num_waiting and not late.done():
            await asyncio.sleep(0)
        refused = await asyncio.gather(
            *(engine.generate([5, 6], long) for _ in range(3)), return_exceptions=True
        )
        with pytest.raises(PromptTooLongError):
            await engine.generate([5] * 100_000, long)
        assert (await late).finish_reason is FinishReason.DEADLINE
        await running
        full = sum(isinstance(result, QueueFullError) for result in refused)
        samples = await settled(engine)
    assert full >= 2
    assert own(samples, "queue_rejections_total", reason="queue_full") == full
    assert own(samples, "queue_rejections_total", reason="prompt_too_long") == 1
    assert own(samples, "deadline_misses_total", stage="queue") == 1
    assert vllm(samples, "request_success_total", finished_reason="deadline") == 1
