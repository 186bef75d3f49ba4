"""The events of a response that goes on without its reader, for whoever comes to read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
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
        self.size = 0
        self.is_over = False

    def add(self, events: Iterable[bytes]) -> None:
        """The next events."""
        known = len(self._events)
        self._events += events
        self.size += sum(map(len, self._events[known:]))
        self._tell()

    def close(self) -> None:
        """No more will come."""
        self.is_over = True
        self._tell()

    async def read(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events behind the one of number ``after``, up to the last, in portions."""
        index = after + 1
        while True:
            portion, size = index, 0
            while index < len(self._events) and size < _PORTION:
                size += len(self._events[index])
                index += 1
            if index > portion:
                yield b"".join(self._events[portion:index])
            elif self.is_over:
                return
            else:
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
