"""Past responses, in memory and within bounds, so that a next one may go on from them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from src.core.errors import InvalidRequestError
from src.http.protocol.chat import ChatMessage, ContentPart, ToolCall
from src.http.protocol.responses import OutputItem, ResponseBody
from src.http.responses.event_log import EventLog
from src.http.server.errors import RouteNotFoundError

# Names are the clients' to choose, so those of one owner tell nothing of another's.
Key: TypeAlias = tuple[bytes, str]


class StoredResponse(msgspec.Struct, kw_only=True):
    """One response.

    Attributes
    ----------
    body
        As it is shown; replaced as it goes on.
    owner
        Whose it is: nobody else gets to see it.
    messages
        All that was said up to its end, as `said` spells it; ``None`` while it is being
        generated.
    input
        The items that it was asked with, as JSON.
    events
        All of its events so far, where it is streamed in the background.
    abort
        Ends it, while it is being generated.
    """

    body: ResponseBody
    owner: bytes
    messages: bytes | None = None
    input: bytes = b"[]"
    events: EventLog | None = None
    abort: Callable[[], object] | None = None

    @property
    def key(self) -> Key:
        """Tells it from all others."""
        return self.owner, self.body.id

    @property
    def is_held(self) -> bool:
        """Whether it must not be forgotten: its answer is to be had from nowhere else."""
        return self.body.background and self.abort is not None


class _Said(ChatMessage, kw_only=True):
    """A message that has been let in: one may have more calls than a client can send at once."""

    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[_Said]).decode


def said(messages: Sequence[ChatMessage]) -> bytes:
    """Encode messages for the store.

    As objects they would take several times the memory that is counted, and the garbage collector
    would look at each of them again and again.
    """
    return _encode(messages)


def said_more(before: bytes, message: ChatMessage) -> bytes:
    """Append a message to an encoded, non-empty list of messages."""
    return before[:-1] + b"," + _encode(message) + b"]"


class _Share:
    """What one owner has there: the oldest first, with the bytes of each."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        # Not a field of an entry: what is taken off must be what was added.
        self.sizes: dict[str, int] = {}
        self.size = 0

    def oldest(self) -> StoredResponse | None:
        """The oldest that may be forgotten."""
        return next((entry for entry in self.entries.values() if not entry.is_held), None)


class ResponseStore:
    """The newest responses. Whoever has most there makes room for the next: their oldest goes.

    So nobody loses anything to an owner who has more, however much that one stores.
    """

    def __init__(self) -> None:
        # Who put something last is last.
        self._shares: OrderedDict[bytes, _Share] = OrderedDict()
        self._count = 0
        # Id of an item -> the response that it is in
        self._items: dict[str, Key] = {}
        self._size = 0
        # What goes on after its request has been answered; the event loop keeps no task alive.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Responses that are being generated in the background."""
        return len(self._tasks)

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes of all entries, roughly."""
        return self._size

    def put(self, entry: StoredResponse, size: int, *, max_entries: int, max_bytes: int) -> None:
        """Keep an entry of ``size`` bytes, roughly, or keep it with its new size.

        What is over the bounds is forgotten; this may be the entry itself.

        Raises
        ------
        InvalidRequestError
            Its owner has another one of the same name.
        """
        key = owner, name = entry.key
        if self._find(key) is not None and not self.has(entry):
            raise InvalidRequestError(
                "request_id names a response that there is already", param="request_id"
            )
        self._drop(key)
        share = self._shares.setdefault(owner, _Share())
        self._shares.move_to_end(owner)
        share.entries[name] = entry
        share.sizes[name] = size
        share.size += size
        self._count += 1
        self._size += size
        self._items.update((item.id, key) for item in entry.body.output)
        while self._count > max_entries or self._size > max_bytes:
            superfluous = self._superfluous(by_count=self._count > max_entries)
            if superfluous is None:
                break
            self._drop(superfluous.key)

    def _superfluous(self, *, by_count: bool) -> StoredResponse | None:
        """What is forgotten next, if anything may be."""

        def taken(share: _Share) -> int:
            return len(share.entries) if by_count else share.size

        # Of equals, whoever put nothing for longest comes first.
        for share in sorted(self._shares.values(), key=taken, reverse=True):
            oldest = share.oldest()
            if oldest is not None:
                return oldest
        return None

    def has_room(self, size: int, *, max_entries: int, max_bytes: int) -> bool:
        """Whether ``size`` bytes more can be held beside what must not be forgotten."""
        held = [size for owner in self._shares for size in self._held(owner)]
        return len(held) < max_entries and sum(held) + size <= max_bytes

    def num_held(self, owner: bytes) -> int:
        """Responses of an owner that are being generated in the background."""
        return len(self._held(owner))

    def leaves_room(self, owner: bytes, size: int, *, max_entries: int, max_bytes: int) -> bool:
        """Whether an owner with one more held response leaves as much room as it takes.

        One response is let in whatever the room. See ``WaitingQueue.check_room`` for the rule.
        """
        own = self._held(owner)
        others = [held for name in self._shares if name != owner for held in self._held(name)]
        return not own or (
            2 * (len(own) + 1) + len(others) <= max_entries
            and 2 * (sum(own) + size) + sum(others) <= max_bytes
        )

    def _held(self, owner: bytes) -> list[int]:
        """Bytes of each of an owner's responses that must not be forgotten."""
        share = self._shares.get(owner)
        if share is None:
            return []
        return [share.sizes[name] for name, entry in share.entries.items() if entry.is_held]

    def has(self, entry: StoredResponse) -> bool:
        """Whether this entry has not been forgotten."""
        return self._find(entry.key) is entry

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """The response of this name.

        Raises
        ------
        RouteNotFoundError
            There is none, it has been forgotten, or it is somebody else's.
        """
        entry = self._find((owner, response_id))
        if entry is None:
            raise RouteNotFoundError(
                f"there is no response {response_id[:100]!r}", param="response_id"
            )
        return entry

    def history(self, response_id: str, owner: bytes) -> Sequence[ChatMessage]:
        """All that was said up to the end of a response.

        Raises
        ------
        InvalidRequestError
            There is no such response, or it is not complete.
        """
        entry = self._find((owner, response_id))
        if entry is None:
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
        return _decode(entry.messages)

    def item(self, item_id: str, owner: bytes) -> OutputItem | None:
        """An item of a response that is complete; ``None`` if there is none that may be seen."""
        key = self._items.get(item_id)
        if key is None or key[0] != owner:
            return None
        entry = self._find(key)
        if entry is None or entry.messages is None:
            return None
        return next((item for item in entry.body.output if item.id == item_id), None)

    def delete(self, response_id: str, owner: bytes) -> None:
        """Forget a response, and end it if it is being generated. Raises what `get` does."""
        entry = self.get(response_id, owner)
        if entry.abort is not None:
            entry.abort()
        self._drop(entry.key)

    def forget(self, entry: StoredResponse) -> None:
        """Forget this entry, where it is still known."""
        if self.has(entry):
            self._drop(entry.key)

    def keep_running(self, task: asyncio.Task[None]) -> None:
        """Hold on to a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what still goes on in the background, and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, key: Key) -> StoredResponse | None:
        owner, name = key
        share = self._shares.get(owner)
        return None if share is None else share.entries.get(name)

    def _drop(self, key: Key) -> None:
        entry = self._find(key)
        if entry is None:
            return
        owner, name = key
        share = self._shares[owner]
        del share.entries[name]
        size = share.sizes.pop(name)
        share.size -= size
        self._size -= size
        self._count -= 1
        if not share.entries:
            del self._shares[owner]
        for item in entry.body.output:
            self._items.pop(item.id, None)
