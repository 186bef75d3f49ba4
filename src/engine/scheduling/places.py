"""The order in which requests of one tenant and priority wait: by turns of calls.

A call for vectors may have thousands of texts, and another one a single text. In order of arrival
the second would wait for all that the first has queued. So requests wait in **flows**, each in
order of arrival: one flow for all requests that are alone, and one for each call of several texts.
Flows get their turns by start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing",
1996): the flow whose next request starts earliest in virtual time is first. In that time

- a request starts where the one before it in its flow ends, or now if that is later;
- a request that is alone takes one unit for each token, a text of a call `WEIGHT_ALONE` units;
- now is the latest start of those that were admitted.

So where both want more than there is, requests that are alone get at most `WEIGHT_ALONE` times the
tokens of each call, and calls get equal parts. New calls start one behind the other, as if their
first texts were alone. Otherwise time could stand still, and no second text would ever start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from src.engine.kv.block_pool import InvariantError
from src.engine.scheduling.request_state import Phase, RequestState

WEIGHT_ALONE: Final = 16
"""Tokens of requests that are alone, for each token of a call."""
# A flow is swept when more than this number and more than half of its entries are dead.
_MIN_DEAD: Final = 64


class _Flow:
    """Requests that wait for their turns one after the other.

    Attributes
    ----------
    head
        The last request that has its place, while it is in its lane's heap; those in ``behind``
        have none until it leaves. ``None`` only if nothing is behind.
    placed
        Key -> request, of those that wait with a place and never had a row, in order. Others that
        have not ended may be among them.
    finish
        Where the next one starts in virtual time, if that is not before now.
    num_unfinished
        Its unfinished requests, wherever they are.
    since
        When a request last started because it was that late, and not behind the one before. What
        started earlier is no part of ``finish``.
    """

    __slots__ = ("behind", "finish", "head", "num_dead", "num_unfinished", "placed", "since")

    def __init__(self, start: int) -> None:
        self.behind: deque[RequestState] = deque()
        self.head: RequestState | None = None
        self.placed: dict[int, RequestState] = {}
        self.finish = self.since = start
        self.num_dead = 0
        self.num_unfinished = 0

    def next(self) -> RequestState | None:
        """Take out the first one without a place; ``None`` if there is none."""
        while self.behind:
            state = self.behind.popleft()
            if state.phase is Phase.WAITING:
                return state
            self.num_dead -= 1
        return None

    def last_start(self) -> int:
        """Where the last of `placed` starts: nobody goes before one that came earlier."""
        while self.placed:
            state = self.placed[next(reversed(self.placed))]
            if _is_new(state) and state.place is not None:
                return state.place[1]
            del self.placed[state.key]
        return 0

    def forget(self) -> None:
        """One without a place has ended: it is swept with others, or passed over by `next`."""
        self.num_dead += 1
        dead, size = self.num_dead, len(self.behind)
        if dead > max(_MIN_DEAD, size // 2) or dead == size:
            waiting = (state for state in self.behind if state.phase is Phase.WAITING)
            self.behind = deque(waiting)
            self.num_dead = 0


class Places:
    """Gives the requests of one lane and one priority their places; O(1) amortized each.

    A request gets its place when the one before it in its flow is about to be looked at, so those
    that end before that take no time of anybody's.

    Attributes
    ----------
    num_unfinished
        Unfinished requests, wherever they are. Without any, these places are forgotten.
    """

    __slots__ = ("_alone", "_calls", "_entry", "_entry_since", "_now", "num_unfinished")

    def __init__(self) -> None:
        self.num_unfinished = 0
        self._now = 0
        # Where the next new call starts, if that is not before now; see `_Flow.since`.
        self._entry = self._entry_since = 0
        self._alone = _Flow(0)
        # Key of the first text of a call -> its texts.
        self._calls: dict[int, _Flow] = {}

    def _flow(self, state: RequestState) -> _Flow:
        call = state.request.call
        if call is None:
            return self._alone
        flow = self._calls.get(call)
        if flow is None:
            # All texts of a call may end before it queues more: its last one is paid for again.
            is_first = call == state.key
            start = max(self._now, self._entry) if is_first else self._now + _units(state)
            flow = self._calls[call] = _Flow(start)
            if is_first:
                if self._now > self._entry:
                    self._entry_since = self._now
                self._entry = start + state.prompt_len
        return flow

    def enter(self, state: RequestState) -> None:
        """Count a new request until `leave`."""
        self.num_unfinished += 1
        self._flow(state).num_unfinished += 1

    def leave(self, state: RequestState) -> None:
        """A request has ended; a call of which all have ended is forgotten."""
        self.num_unfinished -= 1
        flow = self._flow(state)
        flow.num_unfinished -= 1
        # Nothing is kept of a request that has ended.
        flow.placed.pop(state.key, None)
        if not flow.num_unfinished and flow is not self._alone:
            del self._calls[state.request.call]  # type: ignore[arg-type]

    def assign(self, state: RequestState) -> bool:
        """Give a new request its place; false if it waits for that behind others of its flow."""
        flow = self._flow(state)
        if flow.head is not None:
            flow.behind.append(state)
            return False
        self._assign(flow, state)
        return True

    def _assign(self, flow: _Flow, state: RequestState) -> None:
        if self._now > flow.finish:
            flow.since = self._now
        start = max(self._now, flow.finish, flow.last_start())
        flow.finish = start + _units(state)
        is_of_call = flow is not self._alone
        state.place = (state.rank[0], start, is_of_call, state.rank[1])
        flow.placed[state.key] = state

    def hold(self, state: RequestState) -> None:
        """The last one that got a place is in the heap: later ones of its flow wait behind it."""
        self._flow(state).head = state

    def follow(self, state: RequestState) -> RequestState | None:
        """A request leaves the heap: the next of its flow, now with a place, if that waits."""
        flow = self._flow(state)
        if flow.head is not state:
            return None
        flow.head = None
        return self.next(state)

    def next(self, state: RequestState) -> RequestState | None:
        """The next of a request's flow, now with a place, if that waits."""
        flow = self._flow(state)
        follower = flow.next()
        if follower is not None:
            self._assign(flow, follower)
        return follower

    def check(self, heap: Collection[RequestState]) -> int:
        """Check that whoever waits without a place has one before it; returns how many do.

        ``heap``: the waiting requests in the lane's heap.

        Raises
        ------
        InvariantError
            Nobody is before it, so that its turn would never come.
        """
        keys, count = {state.key for state in heap}, 0
        for flow in (self._alone, *self._calls.values()):
            waiting = sum(state.phase is Phase.WAITING for state in flow.behind)
            if waiting and (flow.head is None or flow.head.key not in keys):
                raise InvariantError(f"{waiting} requests wait behind nobody")
            count += waiting
        return count

    def admit(self, state: RequestState) -> None:
        """A request is admitted: what starts from now on starts no earlier."""
        assert state.place is not None
        self._flow(state).placed.pop(state.key, None)
        self._now = max(self._now, state.place[1])

    def discard(self, state: RequestState) -> None:
        """A request has ended while it waited. One that never ran took none of the time."""
        flow = self._flow(state)
        if state.place is None:
            flow.forget()
        elif state.cached_tokens is None:
            start = state.place[1]
            if start >= flow.since:
                flow.finish -= _units(state)
            if state.request.call == state.key and start >= self._entry_since:
                self._entry -= state.prompt_len


def _is_new(state: RequestState) -> bool:
    """Whether a request waits and never had a row."""
    return state.phase is Phase.WAITING and state.cached_tokens is None


def _units(state: RequestState) -> int:
    """How long a request takes in virtual time."""
    return state.prompt_len * (1 if state.request.call is None else WEIGHT_ALONE)
