"""The last steps, always recorded: what the host did when, and how long the device waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step; times in seconds of ``time.monotonic``.

    Attributes
    ----------
    planned, launched
        When planning began and when the step was handed to the device's queue.
    device_start, device_end
        When the device worked on it.
    committed
        When its tokens were committed.
    idle_before
        Seconds that the device waited for this step although there was work: the bubble.
    num_rows, num_tokens
        Rows and tokens computed.
    """

    step_id: int
    planned: float
    launched: float
    device_start: float
    device_end: float
    committed: float
    idle_before: float
    num_rows: int
    num_tokens: int


class Timeline:
    """A ring buffer of step records and the running sums of busy and idle time."""

    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0

    def add(self, record: StepRecord) -> None:
        """Append one record; the oldest falls out when the buffer is full."""
        self._records.append(record)
        self.busy_seconds += record.device_end - record.device_start
        self.idle_seconds += record.idle_before

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def last(self) -> StepRecord | None:
        """The newest record."""
        return self._records[-1] if self._records else None

    @property
    def bubble(self) -> float:
        """Fraction of the time with work in which the device waited for the host, 0 to 1."""
        total = self.busy_seconds + self.idle_seconds
        return self.idle_seconds / total if total else 0.0
