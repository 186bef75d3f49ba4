"""Requests that were let in: those that are not queued yet, and all by their names.

An engine that drains finishes the first too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Self

from src.engine.requests.preparation import Preparation
from src.engine.requests.submission import Submission


class Admission:
    """One request's right to be queued, also when the engine has begun to drain meanwhile.

    Attributes
    ----------
    revoked
        Whether draining took too long for it: it is not queued any more.
    """

    __slots__ = ("_open", "revoked")

    def __init__(self, open_ones: Admissions) -> None:
        self._open = open_ones
        self.revoked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """It is queued, or gives up. Harmless when done twice."""
        self._open.discard(self)


class Admissions:
    """The admissions that are not released, and the requests that have not ended."""

    def __init__(self) -> None:
        # By name: on their way into the queue, and behind that.
        self.unfinished: dict[str, list[Preparation | Submission]] = {}
        self._open: set[Admission] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Admission:
        """Let a request in."""
        admission = Admission(self)
        self._open.add(admission)
        self._none_open.clear()
        return admission

    def discard(self, admission: Admission) -> None:
        """It is open no more."""
        self._open.discard(admission)
        if not self._open:
            self._none_open.set()

    def revoke(self) -> None:
        """Take back those that are open, and end what is on its way into the queue."""
        for admission in list(self._open):
            admission.revoked = True
            self.discard(admission)
        for namesakes in self.unfinished.values():
            for each in namesakes:
                if isinstance(each, Preparation):
                    each.abort()

    async def wait_none(self) -> None:
        """Wait until none is open."""
        await self._none_open.wait()

    @contextlib.contextmanager
    def named(self, name: str, request: Preparation | Submission) -> Iterator[None]:
        """Within it :meth:`abort` finds the request by its name."""
        namesakes = self.unfinished.setdefault(name, [])
        namesakes.append(request)
        try:
            yield
        finally:
            namesakes.remove(request)
            if not namesakes:
                del self.unfinished[name]

    def abort(self, name: str) -> bool:
        """End the requests of this name; whether there are any."""
        found = self.unfinished.get(name, [])
        for each in found:
            each.abort()
        return bool(found)
