"""Of what the engine tells about its requests."""

from tests.mutants.mutation import mutations_of

_SPANS = ("tests/observability/test_request_spans.py",)
_WORKLOAD = ("tests/observability/test_metrics_workload.py",)

MUTATIONS = (
    *mutations_of(
        "src/observability/tracing/spans.py",
        _SPANS,
        (
            "who ends while it waits has waited until its request ended",
            "end = record.admitted[index] if resumed else _end_of(record, trace)",
            "end = record.admitted[index] if resumed else trace.ended",
        ),
        (
            "who ends while it waits has not waited",
            "            end = record.admitted[index] if resumed else _end_of(record, trace)\n",
            "            if not resumed:\n                return\n"
            "            end = record.admitted[index]\n",
        ),
        (
            "a wait after a preemption is left out",
            "waits = [record.queued, *record.preempted]",
            "waits = [record.queued]",
        ),
        (
            "of a preempted completion everything was computed again",
            "lost is not None and chunk.device_end > lost",
            "lost is not None",
        ),
        (
            "what is computed again found as much as the first time",
            "0 if index else record.cached_tokens",
            "record.cached_tokens",
        ),
        (
            "a preemption before the first token is part of decoding",
            "turns = [turn for turn in _turns(record) if turn[0] >= first]",
            "turns = _turns(record)",
        ),
        (
            "a preemption before the first token is left out",
            "        if first is None or moment < first\n",
            "        if first is None\n",
        ),
        (
            "decoding ends before its last event",
            "last = max(record.last_token, *(moment for moment, _ in turns), 0.0)",
            "last = record.last_token",
        ),
        (
            "a completion that failed looks as one that did not",
            "            error=record.error,\n        )\n        self._phases",
            "        )\n        self._phases",
        ),
    ),
    *mutations_of(
        "src/engine/telemetry/observer.py",
        _WORKLOAD,
        (
            "the time in the queue is observed again after a preemption",
            "        for request in admitted:\n            record =",
            "        for request in (self._choices[i.request_key].request\n"
            "                        for i in plan.installs):\n"
            "            record =",
        ),
        (
            "a request counts once for each of its completions",
            "        if choice.index == 0:\n            self._metrics.on_submitted",
            "        if True:\n            self._metrics.on_submitted",
        ),
        (
            "a first token has a gap before it",
            "            self._metrics.on_tokens(len(event.token_ids), None)\n",
            "            self._metrics.on_tokens(len(event.token_ids), now - record.queued)\n",
        ),
        (
            "preemptions are not written down",
            "                    choice.record.preempted.append(now)\n",
            "                    pass\n",
        ),
    ),
    *mutations_of(
        "src/engine/telemetry/observer.py",
        (f"{_WORKLOAD[0]}::test_what_is_computed_again_is_prefill_to_its_last_chunk",),
        (
            "what is computed again is decoding",
            "            self._rows[install.row] = (choice, len(install.token_ids))\n",
            "            self._rows[install.row] = (choice, install.prompt_len)\n",
        ),
    ),
    *mutations_of(
        "src/engine/telemetry/health.py",
        _WORKLOAD,
        (
            "the loop's lag is measured once",
            "        self._on_lag(max(0.0, loop.time() - self._due))\n"
            "        self._schedule(loop)\n",
            "        self._on_lag(max(0.0, loop.time() - self._due))\n",
        ),
    ),
)
