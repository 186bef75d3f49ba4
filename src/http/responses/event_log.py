"""The events of a response that goes on without its reader, for whoever comes to read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Final

# Bytes that a reader is given at a time.
_PORTION: Final = 64 * 1024


class EventLog:
    """Events in their order: the index of each is its sequence number.

    Attributes
    ----------
    size
        Bytes of all events.
    is_over
        Whether no more will come.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._waiting: set[asyncio.Future[None]] = set()
        # Of each reader, the number of the next event.
        self._readers: dict[object, int] = {}
        # Events before this one are kept no longer; None while all are.
        self._first: int | None = None
        self.size = 0
        self.is_over = False

    def add(self, events: Iterable[bytes]) -> None:
        """The next events."""
        known = len(self._events)
        self._events += events
        self.size += sum(map(len, self._events[known:]))
        self._tell()
        if self._first is not None:
            self.let_go()

    def let_go(self) -> None:
        """Drop events that all current readers have read. No new reader may attach."""
        # A reader may wait for events that are yet to come.
        first = min((len(self._events), *self._readers.values()))
        for index in range(self._first or 0, first):
            self._events[index] = b""
        self._first = first

    def close(self) -> None:
        """No more will come."""
        self.is_over = True
        self._tell()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind the one of number ``after``, up to the last, in portions."""
        reader = object()
        index = self._readers[reader] = after + 1
        try:
            while True:
                portion, size = index, 0
                while index < len(self._events) and size < _PORTION:
                    size += len(self._events[index])
                    index += 1
                if index > portion:
                    events = b"".join(self._events[portion:index])
                    self._readers[reader] = index
                    yield events
                elif self.is_over:
                    return
                else:
                    await self._news()
        finally:
            del self._readers[reader]

    async def _news(self) -> None:
        news = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        try:
            await news
        finally:
            self._waiting.discard(news)

    def _tell(self) -> None:
        for news in self._waiting:
            if not news.done():
                news.set_result(None)
