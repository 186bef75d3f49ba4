"""Admitted requests: admissions of those that are not queued yet, and all requests by id.

A draining engine also finishes requests that are admitted but not queued yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Self

from src.engine.requests.embedding_run import EmbeddingRun
from src.engine.requests.preparation import Preparation
from src.engine.requests.submission import Submission


class Admission:
    """One request's right to be queued, even if the engine has begun to drain meanwhile.

    Attributes
    ----------
    revoked
        Whether draining timed out before the request was queued. It may not be queued any more.
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
        """Say that the request is queued, or was given up. May be called twice."""
        self._open.discard(self)


class Admissions:
    """The open admissions, and the requests that have not ended."""

    def __init__(self) -> None:
        # By request id, which need not be unique. A Preparation is not queued yet.
        self.unfinished: dict[str, list[Preparation | Submission | EmbeddingRun]] = {}
        self._open: set[Admission] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Admission:
        """Admit a request."""
        admission = Admission(self)
        self._open.add(admission)
        self._none_open.clear()
        return admission

    def discard(self, admission: Admission) -> None:
        """Remove a released or revoked admission."""
        self._open.discard(admission)
        if not self._open:
            self._none_open.set()

    def revoke(self) -> None:
        """Revoke all open admissions, and end the requests that are not queued yet."""
        for admission in list(self._open):
            admission.revoked = True
            self.discard(admission)
        for namesakes in self.unfinished.values():
            for each in namesakes:
                if isinstance(each, Preparation | EmbeddingRun):
                    each.abort()

    async def wait_none(self) -> None:
        """Wait until no admission is open."""
        await self._none_open.wait()

    @contextlib.contextmanager
    def named(self, name: str, request: Preparation | Submission | EmbeddingRun) -> Iterator[None]:
        """Register a request under its id for `abort`, within the context."""
        namesakes = self.unfinished.setdefault(name, [])
        namesakes.append(request)
        try:
            yield
        finally:
            namesakes.remove(request)
            if not namesakes:
                del self.unfinished[name]

    def abort(self, name: str) -> bool:
        """Abort the requests with this id; returns whether there are any."""
        found = self.unfinished.get(name, [])
        for each in found:
            each.abort()
        return bool(found)
