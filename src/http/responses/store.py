"""Past responses, in memory and within bounds, so that a next one may go on from them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from src.core.errors import InvalidRequestError
from src.http.errors import RouteNotFoundError
from src.http.protocol.chat import ChatMessage
from src.http.protocol.responses import OutputItem, ResponseBody


class StoredResponse(msgspec.Struct, kw_only=True):
    """One response.

    Attributes
    ----------
    body
        As it is shown; replaced as it goes on.
    owner
        Whose it is: nobody else gets to see it.
    messages
        All that was said up to its end; ``None`` while it is being generated.
    size
        Bytes of memory, roughly.
    abort
        Ends it, while it is being generated.
    """

    body: ResponseBody
    owner: bytes
    messages: list[ChatMessage] | None = None
    size: int = 0
    abort: Callable[[], object] | None = None


class ResponseStore:
    """The newest responses; the oldest ones go first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        # Id of an item -> name of the response that it is in
        self._items: dict[str, str] = {}
        self._size = 0
        # What goes on after its request has been answered; the event loop keeps no task alive.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Responses that are being generated in the background."""
        return len(self._tasks)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all entries, roughly."""
        return self._size

    def put(self, entry: StoredResponse, *, max_entries: int, max_bytes: int) -> None:
        """Keep an entry, or keep it with its new size, and forget the oldest over the bounds."""
        self._drop(entry.body.id)
        self._entries[entry.body.id] = entry
        self._items.update((item.id, entry.body.id) for item in entry.body.output)
        self._size += entry.size
        while self._entries and (len(self._entries) > max_entries or self._size > max_bytes):
            self._drop(next(iter(self._entries)))

    def has(self, response_id: str) -> bool:
        """Whether there is an entry of this name, whoever owns it."""
        return response_id in self._entries

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """The response of this name.

        Raises
        ------
        RouteNotFoundError
            There is none, it has been forgotten, or it is somebody else's.
        """
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise RouteNotFoundError(
                f"there is no response {response_id[:100]!r}", param="response_id"
            )
        return entry

    def history(self, response_id: str, owner: bytes) -> list[ChatMessage]:
        """All that was said up to the end of a response.

        Raises
        ------
        InvalidRequestError
            There is no such response, or it is not complete.
        """
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise InvalidRequestError(
                f"previous_response_id: there is no response {response_id[:100]!r}; it may have "
                "been forgotten, or not stored",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if entry.messages is None:
            raise InvalidRequestError(
                f"previous_response_id: the response {response_id[:100]!r} is {entry.body.status}",
                param="previous_response_id",
            )
        return entry.messages

    def item(self, item_id: str, owner: bytes) -> OutputItem | None:
        """An item of a response that is complete; ``None`` if there is none that may be seen."""
        entry = self._entries.get(self._items.get(item_id, ""))
        if entry is None or entry.owner != owner or entry.messages is None:
            return None
        return next((item for item in entry.body.output if item.id == item_id), None)

    def delete(self, response_id: str, owner: bytes) -> None:
        """Forget a response, and end it if it is being generated. Raises what :meth:`get` does."""
        entry = self.get(response_id, owner)
        if entry.abort is not None:
            entry.abort()
        self._drop(response_id)

    def keep_running(self, task: asyncio.Task[None]) -> None:
        """Hold on to a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._size -= entry.size
            for item in entry.body.output:
                self._items.pop(item.id, None)
