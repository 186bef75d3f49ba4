"""Decides whether a request is traced, before any span object is built for it.

The SDK's own path to an unsampled span costs more time than such a request may. Here, a ratio of
trace ids is one comparison of integers, and a caller's decision is one bit of its header.
"""

from __future__ import annotations

import random
import re
import threading
from typing import Final

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from src.observability.tracing.settings import SamplerSettings

# https://www.w3.org/TR/trace-context/#traceparent-header; later versions may append fields.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]([0-9a-f])(?:-.*)?"
)
_LENGTH: Final = 55  # of version 00
_TRACE_ID_BITS: Final = 128


class PresetIds(RandomIdGenerator):
    """Uses the trace id that was drawn for the sampling decision for the spans as well.

    A preset belongs to the thread that set it, which must start the root span right afterwards.
    """

    def __init__(self) -> None:
        self._preset = threading.local()

    def preset(self, trace_id: int) -> None:
        """Set the trace id of this thread's next root span."""
        self._preset.trace_id = trace_id

    def generate_trace_id(self) -> int:
        """The preset trace id, if any, or a random one."""
        trace_id: int | None = self._preset.__dict__.pop("trace_id", None)
        return super().generate_trace_id() if trace_id is None else trace_id


class FastSampling:
    """Makes the same decisions as `sampler`, for requests from outside."""

    def __init__(self, settings: SamplerSettings) -> None:
        root = TraceIdRatioBased(settings.ratio)
        self.sampler: Sampler = ParentBased(root) if settings.parent_based else root
        self.ids = PresetIds()
        self._parent_based = settings.parent_based
        self._bound = TraceIdRatioBased.get_bound_for_rate(settings.ratio)

    def samples(self, traceparent: bytes) -> bool:
        """Whether a request with this ``traceparent`` header is sampled; empty for no header.

        If a new trace is sampled, its trace id is preset.
        """
        # Fast path for the most common header. A malformed header of this shape is not traced,
        # although it should begin a trace of its own.
        if self._parent_based and len(traceparent) == _LENGTH and traceparent.endswith(b"-00"):
            return False
        if traceparent and (parent := _TRACEPARENT.fullmatch(traceparent)) is not None:
            if self._parent_based:
                return parent[1] in b"13579bdf"
            return self._is_within(int(traceparent[3:35], 16))
        trace_id = self.new_trace()
        if trace_id is None:
            return False
        self.ids.preset(trace_id)
        return True

    def new_trace(self) -> int | None:
        """The id of a trace that begins here; ``None`` if it is not sampled."""
        trace_id = random.getrandbits(_TRACE_ID_BITS)
        return trace_id if trace_id and self._is_within(trace_id) else None

    def _is_within(self, trace_id: int) -> bool:
        return (trace_id & TraceIdRatioBased.TRACE_ID_LIMIT) < self._bound
