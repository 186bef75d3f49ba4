"""A line in which owners take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class InTurns(Generic[T]):
    """What waits: one thing of each owner in turn, an owner's own as they came."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count(self, owner: str) -> int:
        """Return how many are of one owner."""
        return len(self._waiting.get(owner, ()))

    def push(self, owner: str, thing: T) -> None:
        """Put one behind all others of its owner."""
        self._waiting.setdefault(owner, deque()).append(thing)
        self._count += 1

    def pop(self) -> T:
        """Take out the next one; its owner is then behind all others. There must be one."""
        owner, things = self._waiting.popitem(last=False)
        thing = things.popleft()
        if things:
            self._waiting[owner] = things
        self._count -= 1
        return thing
