"""Of what the engine tells about its requests."""

from tests.mutants.mutation import rewrites_of

_SPANS = ("tests/observability/test_request_spans.py",)
_WORKLOAD = ("tests/observability/test_metrics_workload.py",)

MUTATIONS = (
    *rewrites_of(
        "src/observability/tracing/spans.py",
        _SPANS,
        (
            "who ends while it waits has waited until its request ended",
            "SpanWriter._queue",
            "_end_of(A, B)",
            "B.ended",
        ),
        (
            "who ends while it waits has not waited",
            "SpanWriter._queue",
            "A = C.admitted[D] if B else _end_of(C, E)",
            "if not B:\n    return\nA = C.admitted[D]",
        ),
        (
            "a wait after a preemption is left out",
            "SpanWriter._queue",
            "[A.queued, *A.preempted]",
            "[A.queued]",
        ),
        (
            "of a preempted completion everything was computed again",
            "SpanWriter._phases",
            "A is not None and B.device_end > A",
            "A is not None",
        ),
        (
            "what is computed again found as much as the first time",
            "SpanWriter._phases",
            "0 if A else B.cached_tokens",
            "B.cached_tokens",
        ),
        (
            "a preemption before the first token is part of decoding",
            "SpanWriter._decode",
            "[A for A in _turns(B) if A[0] >= C]",
            "_turns(B)",
        ),
        (
            "a preemption before the first token is left out",
            "_turns_before_decode",
            "A is None or B < A",
            "A is None",
        ),
        (
            "decoding ends before its last event",
            "SpanWriter._decode",
            "max(A.last_token, *(B for B, C in D), 0.0)",
            "A.last_token",
        ),
        (
            "a completion that failed looks as one that did not",
            "SpanWriter._completion",
            "self._spans.write(*A, events=B, error=C)",
            "self._spans.write(*A, events=B)",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/observer.py",
        _WORKLOAD,
        (
            "the time in the queue is observed again after a preemption",
            "EngineObserver.launched",
            "for A in B:\n    C = self._choices[A.key].record\n    D",
            (
                "for A in (self._choices[i.request_key].request for i in plan.installs):\n"
                "    C = self._choices[A.key].record\n"
                "    D"
            ),
        ),
        (
            "a request counts once for each of its completions",
            "EngineObserver.submitted",
            "A.index == 0",
            "True",
        ),
        (
            "a first token has a gap before it",
            "EngineObserver.delivered",
            "self._metrics.on_tokens(len(A.token_ids), None)",
            "self._metrics.on_tokens(len(A.token_ids), now - record.queued)",
        ),
        (
            "preemptions are not written down",
            "EngineObserver.turned",
            "A.record.preempted.append(B)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/observer.py",
        (f"{_WORKLOAD[0]}::test_what_is_computed_again_is_prefill_to_its_last_chunk",),
        (
            "what is computed again is decoding",
            "EngineObserver.launched",
            "len(A.token_ids)",
            "A.prompt_len",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/health.py",
        _WORKLOAD,
        (
            "the loop's lag is measured once",
            "Heartbeat._beat",
            "self._schedule(A)",
            "",
        ),
    ),
)
