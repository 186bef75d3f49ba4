"""The step timeline: records of the last steps, and the device's busy and idle time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice

from src.core.steps import StepRecord


class Timeline:
    """A ring buffer of step records and the running sums of busy and idle time.

    Parameters
    ----------
    capacity
        Number of steps to keep.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        # (step that is waited for, future of the waiter)
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0

    def add(self, record: StepRecord) -> None:
        """Append one record; the oldest falls out when the buffer is full."""
        self._records.append(record)
        self.busy_seconds += record.device_end - record.device_start
        self.idle_seconds += record.idle_before
        if self._waiters:
            self._wake(record.step_id)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def tail(self, count: int) -> list[StepRecord]:
        """The newest ``count`` records, or fewer if there are fewer; oldest first."""
        records = list(islice(reversed(self._records), count))
        records.reverse()
        return records

    @property
    def last(self) -> StepRecord | None:
        """The newest record."""
        return self._records[-1] if self._records else None

    @property
    def bubble(self) -> float:
        """Fraction of the time with work in which the device waited for the host, 0 to 1."""
        total = self.busy_seconds + self.idle_seconds
        return self.idle_seconds / total if total else 0.0

    async def wait_for(self, step_id: int) -> None:
        """Wait until step ``step_id`` or a later one is recorded."""
        if self._records and self._records[-1].step_id >= step_id:
            return
        waiter = (step_id, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self, step_id: int) -> None:
        for awaited, waiter in self._waiters:
            if awaited <= step_id and not waiter.done():
                waiter.set_result(None)
