"""What an engine and its server count, under vLLM's names so that its dashboards work unmodified.

Every :class:`EngineMetrics` has a registry of its own: two engines in one process do not collide.
Names that begin with ``slipstream_`` are ours, where vLLM has none. ``docs/api.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from src.core.outputs import FinishReason

# vLLM's bucket bounds, in seconds, so that quantiles of both can be compared.
TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def token_buckets(max_value: int) -> list[int]:
    """Bounds 1, 2, 5, 10, 20, 50, ... up to ``max_value``, as vLLM draws them."""
    bounds: list[int] = []
    magnitude = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * magnitude > max_value:
                return bounds or [1]
            bounds.append(mantissa * magnitude)
        magnitude *= 10


class EngineMetrics:
    """The metrics of one engine; its loop and its server call the ``on_...`` methods.

    All methods are cheap (a few microseconds), thread-safe and never raise.

    Parameters
    ----------
    model_name
        Value of the label ``model_name`` on every ``vllm:`` metric.
    max_model_len
        Tokens; bounds the buckets of the token histograms.
    """

    def __init__(self, model_name: str, max_model_len: int = 131_072) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._make_gauges()
        self._make_counters()
        self._make_histograms(token_buckets(max_model_len))

    # What the engine reports

    def set_gauges(self, running: int, waiting: int, kv_usage: float) -> None:
        """Requests that run and wait now, and the fraction (0 to 1) of KV blocks in use."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)

    def on_first_token(self, seconds: float) -> None:
        """A request's first token, ``seconds`` after its arrival."""
        self._ttft.observe(seconds)

    def on_tokens(self, n: int, itl_seconds: float | None) -> None:
        """``n`` output tokens of one completion were committed.

        ``itl_seconds`` is the time since its previous token; ``None`` for a first token.
        """
        self._generation_tokens.inc(n)
        if itl_seconds is not None:
            self._itl.observe(itl_seconds)

    def on_finished(
        self, reason: FinishReason, e2e_seconds: float, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A completion ended. Prompt tokens are counted with :meth:`on_prompt_tokens`."""
        self._success[reason].inc()
        self._e2e.observe(e2e_seconds)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(output_tokens)

    def on_prompt_tokens(self, n: int) -> None:
        """A request of ``n`` prompt tokens finished its prefill."""
        self._prompt_tokens.inc(n)

    def on_admitted(self, queue_seconds: float) -> None:
        """A request left the waiting queue for the first time."""
        self._queue_time.observe(queue_seconds)

    def on_preemption(self, n: int = 1) -> None:
        """``n`` running requests lost their KV and will be recomputed."""
        self._preemptions.inc(n)

    def on_prefix_cache(self, queries: int, hits: int) -> None:
        """A prompt of ``queries`` tokens was looked up; ``hits`` of them were cached."""
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(hits)

    def on_step(self, num_tokens: int, busy_seconds: float, idle_seconds: float) -> None:
        """One step: its tokens, the device's time in it, and its idle time before it."""
        self._step_tokens.observe(num_tokens)
        self._device_busy.inc(max(busy_seconds, 0.0))
        self._device_idle.inc(max(idle_seconds, 0.0))

    # What the server reports

    def on_rejection(self, reason: str) -> None:
        """A request was refused with a status of 400 or more; ``reason`` is from a small set."""
        self._rejections.labels(reason).inc()

    def on_disconnect(self) -> None:
        """A client went away before its answer was complete."""
        self._disconnects.inc()

    # What is read

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of ``/metrics``: OpenMetrics where ``accept`` asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def value(self, name: str, **labels: str) -> float:
        """The present value of one sample, 0.0 where it has none yet.

        ``name`` is the sample's, e.g. ``vllm:generation_tokens_total``; the label ``model_name``
        is filled in for those that have it.
        """
        if name.startswith("vllm:"):
            labels = {"model_name": self.model_name, **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    # Declarations

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in running batches.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the waiting queue.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.")

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens committed.")
        self._preemptions = self._counter("num_preemptions", "Preemptions of running requests.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found cached.")
        success = self._counter_of(
            "vllm:request_success", "Completions ended, by reason.", "finished_reason"
        )
        # Resolved once: looking a label up costs more than counting.
        self._success = {
            reason: success.labels(self.model_name, reason.value) for reason in FinishReason
        }
        self._rejections = Counter(
            "slipstream_http_rejections",
            "Requests refused with a status of 400 or more, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._disconnects = Counter(
            "slipstream_client_disconnects",
            "Clients that went away before their answer was complete.",
            registry=self.registry,
        )
        self._device_busy = Counter(
            "slipstream_device_busy_seconds",
            "Time that the device spent in steps.",
            registry=self.registry,
        )
        self._device_idle = Counter(
            "slipstream_device_idle_seconds",
            "Time that the device waited for the host between two steps.",
            registry=self.registry,
        )

    def _make_histograms(self, lengths: Iterable[int]) -> None:
        lengths = tuple(lengths)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a completion.", ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to admission.", REQUEST_BUCKETS
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", lengths
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a completion.", lengths
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in one step.", STEP_TOKEN_BUCKETS
        )

    def _gauge(self, name: str, about: str) -> Any:
        return Gauge(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(
            self.model_name
        )

    def _counter(self, name: str, about: str) -> Any:
        return self._counter_of(f"vllm:{name}", about).labels(self.model_name)

    def _counter_of(self, name: str, about: str, *labels: str) -> Any:
        return Counter(name, about, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Any:
        return Histogram(
            f"vllm:{name}",
            about,
            ["model_name"],
            buckets=tuple(buckets),
            registry=self.registry,
        ).labels(self.model_name)
