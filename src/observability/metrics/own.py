"""Metrics that only this engine has, under ``slipstream_``."""

from __future__ import annotations

import time
from typing import Final

from src.observability.metrics import buckets
from src.observability.metrics.instruments import Families
from src.observability.metrics.readings import Readings

# Seconds covered by the bubble gauge.
BUBBLE_WINDOW: Final = 60

STEP_PHASES: Final = ("plan", "launch", "queue", "device", "return", "commit", "publish")


class RecentBubble:
    """The share of the last minute's time with work in which the device waited for the host.

    A ring buffer of busy and idle seconds per second of the clock.
    """

    def __init__(self) -> None:
        # Second of the clock -> [second, busy, idle]
        self._slots: list[list[float]] = [[-1.0, 0.0, 0.0] for _ in range(BUBBLE_WINDOW)]

    def add(self, now: float, busy: float, idle: float) -> None:
        """Count one step that ended at ``now``, seconds of the monotonic clock."""
        second = int(now)
        slot = self._slots[second % BUBBLE_WINDOW]
        if slot[0] != second:
            slot[:] = second, 0.0, 0.0
        slot[1] += busy
        slot[2] += idle

    def value(self, now: float) -> float:
        """From 0 to 1; 0 when there was no work."""
        recent = [slot for slot in self._slots if slot[0] > now - BUBBLE_WINDOW]
        busy, idle = sum(slot[1] for slot in recent), sum(slot[2] for slot in recent)
        return idle / (busy + idle) if busy + idle else 0.0


class OwnMetrics:
    """Instruments, named like their metric without ``slipstream_``."""

    def __init__(self) -> None:
        self.families = Families("slipstream_", {})
        self.bubble = RecentBubble()
        self._device()
        self._scheduling()
        self._service()
        self._compilation()
        self._graphs()

    def refresh(self, readings: Readings) -> None:
        """Update the gauges that are read from the engine."""
        self._bubble_ratio.value = self.bubble.value(time.monotonic())
        self.discarded_tokens.value = readings.discarded_tokens
        self.recomputed_tokens.value = readings.recomputed_tokens
        self.bypasses.value = readings.bypasses
        self.shortages.value = readings.shortages
        self.yields.value = readings.yields
        for source, (drafted, accepted) in readings.drafts_by_source.items():
            self._drafted.child(source).value = drafted
            self._accepted.child(source).value = accepted
        self._of_tenants.clear()
        for tenant, (running, waiting) in readings.tenants.items():
            self._of_tenants.child(tenant, "running").value = running
            self._of_tenants.child(tenant, "waiting").value = waiting
        self._kv_bytes.clear()
        for group, kv in readings.kv.items():
            for state, amount in (("held", kv.held), ("cached", kv.cached), ("free", kv.free)):
                self._kv_bytes.child(group, state).value = amount
        self.compiled_graphs.value = readings.compiled_graphs
        self.compile_seconds.value = readings.compile_seconds
        for kind, count in readings.graph_steps.items():
            self._graph_steps.child(kind).value = count
        self._graph_tokens["needed"].value = readings.graph_tokens
        self._graph_tokens["padding"].value = readings.graph_padding_tokens
        self._captured_graphs.clear()
        for kind, count in readings.captured_graphs.items():
            self._captured_graphs.child(kind).value = count
        self.graph_capture_seconds.value = readings.graph_capture_seconds
        self.graph_bytes.value = readings.graph_bytes
        self.kernel_builds.value = readings.kernel_builds
        self._kernels.clear()
        if readings.kernels:
            self._kernels.child(readings.kernels).set(1)
        self.stalled_seconds.value = readings.stalled_seconds

    def _device(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self.device_busy = counter(
            "device_busy_seconds", "Time that the device spent in steps."
        ).child()
        self.device_idle = counter(
            "device_idle_seconds", "Time that the device waited for the host between two steps."
        ).child()
        self._bubble_ratio = gauge(
            "device_bubble_ratio",
            "Part of the last minute's time with work in which the device waited, 0 to 1.",
        ).child()
        phases = self.families.histogram(
            "step_phase_seconds", "Parts of a step's life.", buckets.PHASE_TIME, "phase"
        )
        self.step_phases = {phase: phases.child(phase) for phase in STEP_PHASES}
        self.step_failures = counter("step_failures", "Steps that failed on the device.").child()
        self.row_failures = counter(
            "row_failures", "Completions that ended alone while their step went on.", "reason"
        )

    def _scheduling(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self.discarded_tokens = counter(
            "discarded_tokens", "Tokens sampled for requests that had ended meanwhile."
        ).child()
        self.recomputed_tokens = counter(
            "recomputed_tokens", "Positions whose KV was given up by preemption."
        ).child()
        self.bypasses = counter(
            "admission_bypasses", "Admissions that overtook a request that did not fit."
        ).child()
        self.shortages = counter(
            "memory_shortages", "Times that a row waited a step for a KV block."
        ).child()
        self.yields = counter(
            "yields", "Preemptions for a waiting request of an owner of keys below its share."
        ).child()
        self._drafted = counter(
            "draft_tokens", "Drafts that were verified, by who has drafted.", "source"
        )
        self._accepted = counter(
            "accepted_draft_tokens", "Drafts that were accepted, by who has drafted.", "source"
        )
        self._of_tenants = gauge(
            "tenant_requests", "Completions by owner of API keys and state.", "tenant", "state"
        )
        self._kv_bytes = gauge("kv_bytes", "KV memory by cache group and state.", "group", "state")

    def _service(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self.http_rejections = counter(
            "http_rejections", "Requests refused with a status of 400 or more.", "reason"
        )
        self.unknown_fields = counter(
            "http_unknown_fields", "Fields of requests that nobody has heard of.", "field"
        )
        self.queue_rejections = counter(
            "queue_rejections", "Requests that the engine did not admit.", "reason"
        )
        self.client_disconnects = counter(
            "client_disconnects", "Clients that went away before their answer was complete."
        ).child()
        self.deadline_misses = counter(
            "deadline_misses", "Completions cut short by their deadline, by how far they were.",
            "stage",
        )  # fmt: skip
        self.observer_errors = counter(
            "observer_errors", "Faults in what watches the engine; they disturb no request."
        ).child()
        self.loop_lag = self.families.histogram(
            "event_loop_lag_seconds",
            "How much later than asked the event loop called a timer.",
            buckets.LOOP_LAG,
        ).child()
        self.stalled_seconds = gauge(
            "stalled_seconds", "How long work has waited without a step that completed."
        ).child()
        self.startup_began = gauge(
            "startup_phase_began_seconds", "How far into the start each phase began.", "phase"
        )
        self.startup_seconds = gauge(
            "startup_phase_seconds", "How long each phase of the start took.", "phase"
        )

    def _compilation(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self.compiled_graphs = gauge(
            "compiled_graphs", "Distinct compiled graphs that serve, whatever the number of layers."
        ).child()
        self.compile_seconds = gauge(
            "compile_seconds", "How long the compilation at the start took."
        ).child()
        self.kernel_builds = counter(
            "kernel_builds", "How often this process compiled the CPU kernels."
        ).child()
        self._kernels = gauge(
            "cpu_kernels_info", "What serves CPU operations; always 1.", "kernels"
        )

    def _graphs(self) -> None:
        gauge, counter = self.families.gauge, self.families.counter
        self._graph_steps = counter(
            "graph_steps", "Steps of a device that captures, by what they ran as.", "kind"
        )
        tokens = counter(
            "graph_tokens", "Tokens that captured steps computed: needed ones, and padding.", "kind"
        )
        self._graph_tokens = {kind: tokens.child(kind) for kind in ("needed", "padding")}
        self._captured_graphs = gauge("captured_graphs", "Captured shapes of steps.", "kind")
        self.graph_capture_seconds = gauge(
            "graph_capture_seconds", "How long captures took together."
        ).child()
        self.graph_bytes = gauge("graph_bytes", "Device memory that captures took.").child()
