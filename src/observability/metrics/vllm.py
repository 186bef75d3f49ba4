"""Metrics that vLLM has too, with its names, labels and bucket bounds.

Its dashboards, routers and autoscalers read them unchanged. ``docs/observability.md`` lists vLLM's
names that have no meaning here.
"""

from __future__ import annotations

import time

from src.core.outputs import FinishReason
from src.observability.metrics import buckets
from src.observability.metrics.instruments import Counter, Families, Family, Gauge, Histogram
from src.observability.metrics.readings import ModelFacts, Readings

# vLLM numbers the engines of a server; here a server has one.
ENGINE = "0"


class VllmMetrics:
    """Instruments, named like their metric without ``vllm:``.

    Parameters
    ----------
    legacy_names
        Also show metrics that vLLM renamed under their old names.
    """

    def __init__(self, model_name: str, *, legacy_names: bool) -> None:
        self.families = Families("vllm:", {"model_name": model_name, "engine": ENGINE})
        self._model_name = model_name
        self._state()
        self._tokens()
        self._latencies()
        self._requests()
        self._info()
        self._lengths_known = False
        self._legacy_hit_rate = self._legacy() if legacy_names else None

    def loaded(self, facts: ModelFacts) -> None:
        """Extend the token histograms up to the loaded model's context length."""
        bounds = buckets.token_buckets(facts.max_model_len)
        self.request_prompt_tokens = self._put(self._prompt_lengths, bounds)
        self.request_generation_tokens = self._put(self._generation_lengths, bounds)
        self.request_max_num_generation_tokens = self._put(self._longest_lengths, bounds)
        self.request_params_max_tokens = self._put(self._asked_lengths, bounds)
        self.request_prefill_kv_computed_tokens = self._put(self._computed_lengths, bounds)
        self._cache_config.clear()
        self._cache_config.child(
            str(facts.block_size),
            facts.cache_dtype,
            str(facts.enable_prefix_caching),
            str(facts.kv_bytes),
            str(facts.block_size * (facts.num_blocks // facts.num_groups)),
            str(facts.num_blocks),
        ).set(1)

    def refresh(self, readings: Readings) -> None:
        """Update the gauges that are read from the engine."""
        self.num_requests_running.value = readings.running
        self.num_requests_waiting.value = readings.waiting
        self.kv_cache_usage_perc.value = readings.kv_usage
        self.num_preemptions.value = readings.preemptions
        self.prefix_cache_queries.value = readings.prefix_queries
        self.prefix_cache_hits.value = readings.prefix_hits
        self.spec_decode_num_drafts.value = readings.drafts
        self.spec_decode_num_draft_tokens.value = readings.draft_tokens
        self.spec_decode_num_accepted_tokens.value = readings.accepted_tokens
        for position, count in readings.accepted_tokens_at.items():
            self._accepted_at.child(position).value = count
        # The metric's value is a time; its readers use the sample with the largest one.
        self._lora.clear()
        self._lora.child(
            str(readings.max_adapters),
            ",".join(readings.running_adapters),
            ",".join(readings.waiting_adapters),
        ).set(time.time())
        if self._legacy_hit_rate is not None:
            queries = readings.prefix_queries
            self._legacy_hit_rate.value = readings.prefix_hits / queries if queries else 0.0

    def _state(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self.num_requests_running = gauge(
            "num_requests_running", "Requests in running batches."
        ).child()
        self.num_requests_waiting = gauge(
            "num_requests_waiting", "Requests in the waiting queue."
        ).child()
        self.kv_cache_usage_perc = gauge(
            "kv_cache_usage_perc", "KV blocks in use; 1 is all of them."
        ).child()
        self.num_preemptions = counter(
            "num_preemptions", "Preemptions of running requests."
        ).child()
        self.prefix_cache_queries = counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        ).child()
        self.prefix_cache_hits = counter(
            "prefix_cache_hits", "Tokens found in the prefix cache."
        ).child()
        self.spec_decode_num_drafts = counter(
            "spec_decode_num_drafts", "Rows of steps that verified drafts."
        ).child()
        self.spec_decode_num_draft_tokens = counter(
            "spec_decode_num_draft_tokens", "Drafts that were verified."
        ).child()
        self.spec_decode_num_accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Drafts that were accepted."
        ).child()
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place among a row's drafts.",
            "position",
        )

    def _tokens(self) -> None:
        counter, histogram = self.families.counter, self.families.histogram
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled.").child()
        by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self.prompt_tokens_computed = by_source.child("local_compute")
        self.prompt_tokens_hit = by_source.child("local_cache_hit")
        cached = counter("prompt_tokens_cached", "Prompt tokens whose KV was cached.")
        cached.put(self.prompt_tokens_hit)
        self.scheduled_prefill_tokens = counter(
            "scheduled_prefill_tokens", "Prompt tokens computed, step by step."
        ).child()
        self.generation_tokens = counter("generation_tokens", "Output tokens committed.").child()
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens computed in one step.", buckets.STEP_TOKENS
        ).child()

    def _latencies(self) -> None:
        self.time_to_first_token = self._times(
            "time_to_first_token_seconds", "From arrival to the first token.", buckets.TTFT
        )
        self.inter_token_latency = self._times(
            "inter_token_latency_seconds",
            "Between two tokens of a completion.",
            buckets.TOKEN_TIME,
        )
        self.request_time_per_output_token = self._times(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a completion.",
            buckets.TOKEN_TIME,
        )
        self.e2e_request_latency = self._times(
            "e2e_request_latency_seconds", "From arrival to the end.", buckets.REQUEST_TIME
        )
        self.request_queue_time = self._times(
            "request_queue_time_seconds", "In the waiting queue.", buckets.REQUEST_TIME
        )
        self.request_inference_time = self._times(
            "request_inference_time_seconds",
            "From the first admission to the last token.",
            buckets.REQUEST_TIME,
        )
        self.request_prefill_time = self._times(
            "request_prefill_time_seconds",
            "From the first admission to the first token.",
            buckets.REQUEST_TIME,
        )
        self.request_decode_time = self._times(
            "request_decode_time_seconds",
            "From the first token to the last one.",
            buckets.REQUEST_TIME,
        )

    def _requests(self) -> None:
        success = self.families.counter(
            "request_success", "Completions ended, by reason.", "finished_reason"
        )
        self.request_success = {reason: success.child(reason.value) for reason in FinishReason}
        self.request_params_n = self._times(
            "request_params_n", "Completions asked for by a request.", buckets.CHOICES
        )
        self.request_num_preemptions = self._times(
            "request_num_preemptions", "Preemptions of a completion.", buckets.PREEMPTIONS
        )
        self._prompt_lengths = self._lengths("request_prompt_tokens", "Prompt tokens of a request.")
        self._generation_lengths = self._lengths(
            "request_generation_tokens", "Output tokens of a completion."
        )
        self._longest_lengths = self._lengths(
            "request_max_num_generation_tokens", "Output tokens of a request's longest completion."
        )
        self._asked_lengths = self._lengths(
            "request_params_max_tokens", "Output tokens asked for at most."
        )
        self._computed_lengths = self._lengths(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached."
        )

    def _info(self) -> None:
        self._cache_config = self.families.gauge(
            "cache_config_info",
            "The KV memory; always 1.",
            *("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_memory_bytes"),
            *("kv_cache_size_tokens", "num_gpu_blocks"),
            without=["model_name"],
        )
        self._lora = self.families.gauge(
            "lora_requests_info",
            "Slots for adapters, and the adapters of requests; the value is the time.",
            *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            without=["model_name", "engine"],
        )
        self._lora.child("0", "", "")

    def _legacy(self) -> Gauge:
        gauge, counter, renamed = self.families.gauge, self.families.counter, "Renamed: see vllm:"
        gauge("gpu_cache_usage_perc", f"{renamed}kv_cache_usage_perc.").put(
            self.kv_cache_usage_perc
        )
        counter("gpu_prefix_cache_queries", f"{renamed}prefix_cache_queries.").put(
            self.prefix_cache_queries
        )
        counter("gpu_prefix_cache_hits", f"{renamed}prefix_cache_hits.").put(self.prefix_cache_hits)
        self.families.histogram(
            "time_per_output_token_seconds",
            f"{renamed}inter_token_latency_seconds.",
            buckets.TOKEN_TIME,
        ).put(self.inter_token_latency)
        return gauge(
            "gpu_prefix_cache_hit_rate", "Tokens found in the prefix cache over tokens looked up."
        ).child()

    def _times(self, name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
        return self.families.histogram(name, about, bounds).child()

    def _lengths(self, name: str, about: str) -> Family[Histogram]:
        return self.families.histogram(name, about, ())

    def _put(self, family: Family[Histogram], bounds: list[int]) -> Histogram:
        family.put(histogram := Histogram(bounds))
        return histogram


__all__ = ["Counter", "VllmMetrics"]
