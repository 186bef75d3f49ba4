"""All metrics of one engine and its server, in a registry of their own.

Engines in one process do not collide. ``docs/observability.md`` lists every name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from src.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
    ShuttingDownError,
)
from src.core.outputs import FinishReason
from src.core.records import RequestRecord
from src.core.steps import StepRecord
from src.observability.durations import Durations
from src.observability.metrics import exposition
from src.observability.metrics.instruments import OTHER
from src.observability.metrics.own import OwnMetrics
from src.observability.metrics.readings import ModelFacts, Readings
from src.observability.metrics.vllm import ENGINE, VllmMetrics

# Label values of refusals, by error. Finish reasons and phases are bounded label values already.
REFUSALS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (QueueFullError, "queue_full"),
    (PromptTooLongError, "prompt_too_long"),
    (InvalidRequestError, "invalid_request"),
    (NotReadyError, "not_ready"),
    (ShuttingDownError, "shutting_down"),
    (EngineDeadError, "engine_dead"),
)
ROW_FAILURES: Final = ("grammar", "refused", "logits", "vector")
STAGES: Final = ("queue", "prefill", "decode")


class EngineMetrics(Collector):
    """The metrics of one engine; its observer and its server call the ``on_...`` methods.

    These methods belong to the event loop's thread, take a fraction of a microsecond per number and
    never raise. Any thread may read.

    Parameters
    ----------
    model_name
        Value of the label ``model_name`` of the ``vllm:`` metrics.
    legacy_names
        Also show metrics that vLLM renamed under their old names.

    Attributes
    ----------
    registry
        For an embedding program that exposes metrics itself.
    """

    def __init__(self, model_name: str, *, legacy_names: bool = False) -> None:
        self.model_name = model_name
        self._vllm = VllmMetrics(model_name, legacy_names=legacy_names)
        self._own = OwnMetrics()
        self._source: Callable[[], Readings] | None = None
        self._facts: ModelFacts | None = None
        self._process = ProcessCollector(registry=None)
        for _, reason in REFUSALS:
            self._own.queue_rejections.child(reason)
        for reason in ROW_FAILURES:
            self._own.row_failures.child(reason)
        for stage in STAGES:
            self._own.deadline_misses.child(stage)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    # Called by the engine

    def on_loaded(self, facts: ModelFacts, source: Callable[[], Readings]) -> None:
        """A model was loaded; ``source`` provides current readings whenever metrics are read."""
        self._facts, self._source = facts, source
        self._vllm.loaded(facts)

    def on_stopped(self) -> None:
        """The engine has stopped serving: counters keep their values, gauges return to zero."""
        self._refresh()
        if self._source is not None:
            last, self._source = self._source(), None
            self._take(Readings(**{name: getattr(last, name) for name in _COUNTED}))

    def on_startup_phase(self, phase: str, began: float, seconds: float | None) -> None:
        """A phase of the start began ``began`` seconds into it; ``seconds`` if it has ended."""
        self._own.startup_began.child(phase).set(began)
        if seconds is not None:
            self._own.startup_seconds.child(phase).set(seconds)

    def on_submitted(self, n: int) -> None:
        """A request for ``n`` completions was queued."""
        self._vllm.request_params_n.observe(n)

    def on_refused(self, error: BaseException) -> None:
        """A request was not admitted."""
        reason = next((name for kind, name in REFUSALS if isinstance(error, kind)), OTHER)
        self._own.queue_rejections.child(reason).inc()

    def on_admitted(self, queue_seconds: float, trace_id: str = "") -> None:
        """A completion left the waiting queue for the first time."""
        self._vllm.request_queue_time.observe(queue_seconds, trace_id)

    def on_first_token(self, record: RequestRecord, prompt_tokens: int) -> None:
        """A completion's first token was committed: its prefill is done."""
        assert record.first_token is not None
        metrics, cached = self._vllm, record.cached_tokens
        metrics.time_to_first_token.observe(record.first_token - record.arrival, record.trace_id)
        self._count_prompt(prompt_tokens, cached)

    def on_vector(self, record: RequestRecord, prompt_tokens: int) -> None:
        """A text's vector was committed: all of its tokens are computed, and none is generated."""
        self._count_prompt(prompt_tokens, record.cached_tokens)
        computed = prompt_tokens - record.cached_tokens
        self._vllm.request_prefill_kv_computed_tokens.observe(computed)

    def _count_prompt(self, num_tokens: int, cached: int) -> None:
        metrics = self._vllm
        metrics.prompt_tokens.value += num_tokens
        metrics.prompt_tokens_hit.value += cached
        metrics.prompt_tokens_computed.value += num_tokens - cached

    def on_tokens(self, n: int, itl_seconds: float | None, trace_id: str = "") -> None:
        """``n`` output tokens of one completion were committed.

        ``itl_seconds`` is the time since its previous token; ``None`` for a first token.
        """
        self._vllm.generation_tokens.value += n
        if itl_seconds is not None:
            self._vllm.inter_token_latency.observe(itl_seconds, trace_id)

    def on_finished(
        self, record: RequestRecord, *, prompt_tokens: int, max_tokens: int | None
    ) -> None:
        """A completion ended; its record says how.

        ``max_tokens`` is ``None`` for a text that becomes a vector: its output has no length.
        """
        reason = record.finish_reason
        assert reason is not None
        metrics, trace, times = self._vllm, record.trace_id, Durations.of(record)
        metrics.request_success[reason].inc()
        metrics.e2e_request_latency.observe(times.whole, trace)
        metrics.request_prompt_tokens.observe(prompt_tokens)
        if max_tokens is not None:
            metrics.request_generation_tokens.observe(record.num_tokens)
            metrics.request_params_max_tokens.observe(max_tokens)
        metrics.request_num_preemptions.observe(len(record.preempted))
        for histogram, seconds in (
            (metrics.request_prefill_time, times.prefill),
            (metrics.request_decode_time, times.decode),
            (metrics.request_inference_time, times.inference),
            (metrics.request_time_per_output_token, times.per_token),
        ):
            if seconds is not None:
                histogram.observe(seconds, trace)
        if record.first_token is not None:
            computed = prompt_tokens - record.cached_tokens
            metrics.request_prefill_kv_computed_tokens.observe(computed)
        if reason is FinishReason.DEADLINE:
            self._own.deadline_misses.child(_stage(record)).inc()

    def on_request_finished(self, longest: int) -> None:
        """All completions of a request ended; ``longest`` is the most output tokens of one."""
        self._vllm.request_max_num_generation_tokens.observe(longest)

    def on_step(self, step: StepRecord) -> None:
        """A step was committed, and its tokens were delivered."""
        self._vllm.iteration_tokens.observe(step.num_tokens)
        self._vllm.scheduled_prefill_tokens.value += step.prefill_tokens
        own, phases = self._own, self._own.step_phases
        busy, idle = max(step.device_end - step.device_start, 0.0), max(step.idle_before, 0.0)
        own.device_busy.value += busy
        own.device_idle.value += idle
        own.bubble.add(step.device_end, busy, idle)
        phases["plan"].observe(step.plan_ended - step.planned)
        phases["launch"].observe(step.launch_ended - step.launched)
        phases["queue"].observe(max(step.device_start - step.launched, 0.0))
        phases["device"].observe(busy)
        phases["return"].observe(max(step.commit_started - step.device_end, 0.0))
        phases["commit"].observe(step.committed - step.commit_started)
        phases["publish"].observe(step.published - step.publish_started)

    def on_step_failed(self) -> None:
        """A step failed on the device, but the device can go on."""
        self._own.step_failures.inc()

    def on_row_failed(self, reason: str) -> None:
        """One request of a step failed, for one of `ROW_FAILURES`."""
        self._own.row_failures.child(reason).inc()

    def on_observer_error(self) -> None:
        """An observer failed, which affects no request."""
        self._own.observer_errors.inc()

    def on_loop_lag(self, seconds: float) -> None:
        """A timer was called ``seconds`` late."""
        self._own.loop_lag.observe(seconds)

    # Called by the server

    def on_rejection(self, reason: str) -> None:
        """A request got a status of 400 or more; ``reason`` is the error's code."""
        self._own.http_rejections.child(reason).inc()

    def on_unknown_field(self, name: str) -> None:
        """An unknown field of a request was ignored."""
        self._own.unknown_fields.child(name if _FIELD.fullmatch(name) else OTHER).inc()

    def on_disconnect(self) -> None:
        """A client disconnected before its answer was complete."""
        self._own.client_disconnects.inc()

    # Reading

    def collect(self) -> Iterator[Metric]:
        """All metrics with their current values."""
        self._refresh()
        yield from self._vllm.families.collect()
        yield from self._own.families.collect()
        yield from self._process.collect()

    @property
    def token_counts(self) -> tuple[float, float]:
        """Prompt tokens and output tokens since the start."""
        return self._vllm.prompt_tokens.value, self._vllm.generation_tokens.value

    @property
    def draft_counts(self) -> tuple[float, float]:
        """Drafts that were verified since the start, and those of them that were right."""
        self._refresh()
        vllm = self._vllm
        return vllm.spec_decode_num_draft_tokens.value, vllm.spec_decode_num_accepted_tokens.value

    @property
    def bubble(self) -> float:
        """Share of the last minute's time with work in which the device waited, 0 to 1."""
        return self._own.bubble.value(time.monotonic())

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of ``/metrics``: OpenMetrics if ``accept`` asks for it."""
        parts, content_type = self.render_parts(accept)
        return b"".join(parts), content_type

    def render_parts(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """The body in pieces, so that the event loop can do other work in between.

        The whole body takes milliseconds, which would delay every stream.
        """
        encode, content_type = exposition.negotiate(accept)

        def parts() -> Iterator[bytes]:
            for metric in self.collect():
                yield encode(metric)
            if encode is exposition.openmetrics:
                yield exposition.END_OF_OPENMETRICS

        return parts(), content_type

    def value(self, name: str, **labels: str) -> float:
        """The current value of one sample; 0.0 if it has none yet.

        ``name`` is the sample's name, e.g. ``vllm:generation_tokens_total``. The common labels of
        ``vllm:`` metrics are added automatically.
        """
        if name.startswith("vllm:"):
            labels = {"model_name": self.model_name, "engine": ENGINE, **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    def _refresh(self) -> None:
        if self._source is not None:
            self._take(self._source())

    def _take(self, readings: Readings) -> None:
        self._vllm.refresh(readings)
        self._own.refresh(readings)


# Clients choose field names freely; only plain words are used as label values.
_FIELD: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# Fields of `Readings` that count since the start; the others are momentary.
_COUNTED: Final = (
    *("preemptions", "recomputed_tokens", "prefix_queries", "prefix_hits", "discarded_tokens"),
    *(
        "bypasses",
        "shortages",
        "yields",
        "compiled_graphs",
        "compile_seconds",
        "kernels",
        "kernel_builds",
    ),
    *("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_at", "drafts_by_source"),
    *("graph_steps", "graph_tokens", "graph_padding_tokens", "graph_capture_seconds"),
)


def _stage(record: RequestRecord) -> str:
    if not record.admitted:
        return "queue"
    return "prefill" if record.first_token is None else "decode"
