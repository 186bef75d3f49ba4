"""Slots of adapters: which adapter has which, and who has to wait for one.

The device has memory for a few adapters at a time. An adapter keeps its slot while a row uses it,
and after that until another adapter needs the slot; the one whose last row left longest ago gives
way first. A row keeps the slot from its installation until its fence has passed, so no step in
flight reads a slot that is being rewritten.

A request whose adapter can have no slot waits aside (``WaitingQueue``) and holds up nobody. So that
busy adapters cannot keep the slots forever, an adapter that has waited for ``patience`` admissions
*closes* a busy one: that gets no more rows until it has lost its slot.
"""

from __future__ import annotations

from src.core.adapter import NO_SLOT, Adapter
from src.engine.kv.block_pool import InvariantError


class AdapterSlots:
    """Knows which adapter has which slot, and how many rows use it.

    Attributes
    ----------
    changed
        Whether more requests may have become admissible since this was last set to false.
    """

    def __init__(self, num_slots: int, patience: int) -> None:
        self.num_slots = num_slots
        self.changed = False
        self._patience = patience
        # Lowest last, so that it is taken first.
        self._free = list(reversed(range(num_slots)))
        # Adapter -> slot, and adapter -> rows that use it. Those without rows are in the order in
        # which their last row left.
        self._slots: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._closed: dict[int, None] = {}
        # Installations so far, and their number when an adapter began to wait.
        self._num_taken = 0
        self._waits_since: dict[int, int] = {}

    @property
    def num_openings(self) -> int:
        """How many adapters without a slot could get one now."""
        return len(self._free) + len(self._idle)

    def is_resident(self, key: int) -> bool:
        """Whether an adapter has a slot."""
        return key in self._slots

    def is_open(self, key: int) -> bool:
        """Whether rows of an adapter may use the slot that it has."""
        return key in self._slots and key not in self._closed

    def admits(self, adapter: Adapter | None) -> bool:
        """Whether a row with this adapter could be installed now."""
        return adapter is None or self.is_open(adapter.key) or self._may_enter(adapter.key)

    def _may_enter(self, key: int) -> bool:
        return key not in self._slots and self.num_openings > 0

    def take(self, adapter: Adapter | None) -> int:
        """The slot for one more row; `admits` was true."""
        if adapter is None:
            return NO_SLOT
        key = adapter.key
        if key not in self._slots:
            self._slots[key] = self._vacated()
            self._users[key] = 0
            self._waits_since.pop(key, None)
            self.changed = True
        self._idle.pop(key, None)
        self._users[key] += 1
        self._num_taken += 1
        return self._slots[key]

    def _vacated(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._idle:
            raise InvariantError(f"a slot is asked for, all {self.num_slots} are in use")
        # A closed one has to leave. Otherwise the one that was not used for longest.
        oldest = next((key for key in self._idle if key in self._closed), next(iter(self._idle)))
        del self._idle[oldest], self._users[oldest]
        self._closed.pop(oldest, None)
        return self._slots.pop(oldest)

    def release(self, adapter: Adapter | None) -> None:
        """Give back the slot of a row whose fence has passed."""
        if adapter is None:
            return
        key = adapter.key
        self._users[key] -= 1
        if self._users[key] == 0:
            self._idle[key] = None
            self.changed = True

    def wait(self, adapter: Adapter) -> None:
        """Note that a request of this adapter waits for a slot."""
        self._waits_since.setdefault(adapter.key, self._num_taken)

    def give_up(self, key: int) -> None:
        """Note that no request of this adapter waits any more."""
        self._waits_since.pop(key, None)

    def close_for_the_patient(self) -> None:
        """Close as many busy adapters as there are adapters that have waited for too long."""
        if not self._waits_since and not self._closed:
            return
        too_long = sum(
            self._num_taken - since >= self._patience
            for key, since in self._waits_since.items()
            if key not in self._slots
        )
        while len(self._closed) > too_long:
            self._closed.popitem()
            self.changed = True
        for key in self._slots:
            if len(self._closed) >= too_long:
                return
            if key not in self._closed and key not in self._idle:
                self._closed[key] = None

    @property
    def num_users(self) -> int:
        """Rows that use an adapter."""
        return sum(self._users.values())

    def check(self, users: list[int]) -> None:
        """Check the table against the adapters of all rows, by key.

        Raises
        ------
        InvariantError
            A slot is lost, used twice or counted wrongly.
        """
        counted = {key: users.count(key) for key in users}
        if counted != {key: count for key, count in self._users.items() if count}:
            raise InvariantError(f"rows use adapters {counted}, counted are {self._users}")
        if set(self._idle) != {key for key, count in self._users.items() if not count}:
            raise InvariantError("an adapter without rows is not in line to leave")
        if sorted([*self._slots.values(), *self._free]) != list(range(self.num_slots)):
            raise InvariantError(f"slots {self._slots} and {self._free} of {self.num_slots}")
