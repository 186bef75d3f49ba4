"""Requests that wait: the queue, with a lane for each tenant, and the deadlines."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from src.core.errors import InvalidRequestError, QueueFullError
from src.core.request import Request
from src.engine.kv.block_pool import InvariantError
from src.engine.scheduling.adapter_slots import AdapterSlots
from src.engine.scheduling.admission import (
    MAX_MISFITS_PER_STEP,
    MAX_PREFIX_WAITS_PER_STEP,
    URGENT,
)
from src.engine.scheduling.places import Places
from src.engine.scheduling.request_state import Phase, Place, RequestState

_by_place = attrgetter("place")

# A heap is rebuilt when more than this number and more than half of its entries are dead.
_MIN_DEAD: Final = 64
_FRONT_SIZE: Final = 2 * (MAX_MISFITS_PER_STEP + MAX_PREFIX_WAITS_PER_STEP)
# Texts of calls behind the first ones: how much they take of the queue, in requests and in tokens,
# for each one that they leave to requests that are alone.
_TAKEN_FOR_LEFT: Final = 3


class Lane:
    """The requests of one tenant, those that wait in order of their places.

    Admission looks at the first few requests only. These are kept in a sorted list. Behind it is a
    heap, with the next request of each flow; the others of the flow follow (`Places`). A request
    that ends in the heap stays there as a dead entry, until it reaches the top or until the heap is
    rebuilt because most entries are dead. Every operation is O(log n) amortized; looking at the
    first few is O(1).

    Attributes
    ----------
    weight
        Its weight in all shares.
    num_unfinished
        Unfinished requests, wherever they are. A lane without any is forgotten.
    num_waiting, num_tokens
        Waiting requests, those aside included, and their tokens. A prediction counts once, however
        many of them share it.
    num_pooled_tokens, num_predicted_tokens
        How many of these tokens are of pooled requests, and of predictions, which no step computes.
    num_further, num_further_tokens
        How many of these requests are texts behind the first of their call, and their tokens.
    credit
        Prompt tokens that it may still have computed before the next lane's turn; kept over steps
        that are too small for a turn.
    passed
        Admissions of other lanes while its first request did not fit and it had no row.
    """

    __slots__ = (
        "_aside",
        "_front",
        "_heap",
        "_num_dead",
        "_places",
        "_sharing",
        "credit",
        "name",
        "num_further",
        "num_further_tokens",
        "num_pooled_tokens",
        "num_predicted_tokens",
        "num_tokens",
        "num_unfinished",
        "num_waiting",
        "passed",
        "weight",
    )

    def __init__(self, name: str, weight: int = 1) -> None:
        self.name = name
        self.weight = weight
        self.num_unfinished = 0
        self.num_waiting = 0
        self.num_tokens = 0
        self.num_pooled_tokens = 0
        self.num_predicted_tokens = 0
        self.num_further = 0
        self.num_further_tokens = 0
        self.credit = 0
        self.passed = 0
        # Priority -> the places of its requests.
        self._places: dict[int, Places] = {}
        # Sorted by place. All of them are before everything in the heap, and none is dead.
        self._front: list[RequestState] = []
        # Pooled requests for which no step had room, sorted by place.
        self._aside: list[RequestState] = []
        self._heap: list[tuple[Place, RequestState]] = []
        self._num_dead = 0
        # Identity of a prediction -> its waiting requests, which keep it.
        self._sharing: dict[int, int] = {}

    def count(self, state: RequestState, sign: int) -> int:
        """Count a waiting request: 1 if it begins to wait, -1 if it ends; returns its tokens."""
        num_tokens = len(state.token_ids)
        if state.request.prediction:
            predicted = self._count_prediction(state.request, sign)
            self.num_predicted_tokens += sign * predicted
            num_tokens += predicted
        num_tokens *= sign
        self.num_waiting += sign
        self.num_tokens += num_tokens
        if state.request.pooling is not None:
            self.num_pooled_tokens += num_tokens
        if state.request.is_further:
            self.num_further += sign
            self.num_further_tokens += num_tokens
        return num_tokens

    def _count_prediction(self, request: Request, sign: int) -> int:
        """Its tokens if it is the first to wait with its prediction, or the last; 0 otherwise."""
        key = id(request.prediction)
        before = self._sharing.get(key, 0)
        after = before + sign
        if after:
            self._sharing[key] = after
        else:
            del self._sharing[key]
        return 0 if before and after else request.num_predicted

    def enter(self, state: RequestState) -> None:
        """Count a new request as unfinished until `leave`."""
        self.num_unfinished += 1
        self._places_of(state).enter(state)

    def leave(self, state: RequestState) -> None:
        """Note that a request has ended."""
        self.num_unfinished -= 1
        places = self._places_of(state)
        places.leave(state)
        if not places.num_unfinished:
            del self._places[state.rank[0]]

    def _places_of(self, state: RequestState) -> Places:
        places = self._places.get(state.rank[0])
        if places is None:
            places = self._places[state.rank[0]] = Places()
        return places

    def insert(self, state: RequestState) -> None:
        """Insert a request by its place; a new one gets that here, or behind those before it."""
        if state.place is not None:
            self._put(state)
        elif (places := self._places_of(state)).assign(state) and not self._put(state):
            places.hold(state)

    def _put(self, state: RequestState) -> bool:
        """Put a request that has a place where it belongs; returns whether that is the front."""
        assert state.place is not None
        if not self._front or _by_place(self._front[-1]) < state.place:
            heapq.heappush(self._heap, (state.place, state))
            return False
        insort(self._front, state, key=_by_place)
        if len(self._front) > _FRONT_SIZE:
            last = self._front.pop()
            heapq.heappush(self._heap, (_by_place(last), last))
        return True

    def _follow(self, state: RequestState) -> None:
        """Let the next one of its flow come where a request leaves the heap."""
        places = self._places_of(state)
        follower = places.follow(state)
        # Where others of its flow have ended, it may start before those that are in the front.
        while follower is not None and self._put(follower):
            follower = places.next(follower)
        if follower is not None:
            places.hold(follower)

    def peek(self, index: int) -> RequestState | None:
        """The waiting request at place ``index``, counted from 0; ``None`` if there is none."""
        while len(self._front) <= index and self._heap:
            _, state = heapq.heappop(self._heap)
            if state.phase is Phase.WAITING:
                self._front.append(state)
                self._follow(state)
            else:
                self._num_dead -= 1
        return self._front[index] if index < len(self._front) else None

    def take(self, index: int) -> RequestState:
        """Take out the request that ``peek(index)`` returned."""
        return self._front.pop(index)

    def admit(self, index: int) -> RequestState:
        """Take out the request that ``peek(index)`` returned, because it gets a row."""
        state = self.take(index)
        self._places_of(state).admit(state)
        self.forget_dead()
        return state

    def set_aside(self, index: int) -> None:
        """Let what ``peek(index)`` returned wait where nobody looks at it, until `bring_back`."""
        insort(self._aside, self._front.pop(index), key=_by_place)

    def bring_back(self, num_tokens: int) -> None:
        """Bring back the first requests that were set aside, of so many tokens or a little more."""
        while self._aside and num_tokens > 0:
            state = self._aside.pop(0)
            num_tokens -= len(state.token_ids)
            self.insert(state)

    def discard(self, state: RequestState, *, was_aside: bool = False) -> None:
        """Drop a request that has just ended while waiting, here or elsewhere (``was_aside``).

        What passed the first one does not count for the next.
        """
        self._places_of(state).discard(state)
        if was_aside or state.place is None or _remove(self._aside, state):
            return
        if self._front and state.place <= _by_place(self._front[-1]):
            index = bisect_left(self._front, state.place, key=_by_place)
            del self._front[index]
            if index == 0:
                self.passed = 0
        else:
            self._num_dead += 1
            self._follow(state)
        self.forget_dead()

    def check(self, num_elsewhere: int) -> None:
        """Check that each waiting request will have its turn; O(waiting requests), for tests.

        Raises
        ------
        InvariantError
            One is lost, or not in order.
        """
        heap = [state for _, state in self._heap if state.phase is Phase.WAITING]
        front = [_by_place(state) for state in self._front]
        if front != sorted(front) or (front and heap and min(map(_by_place, heap)) < front[-1]):
            raise InvariantError(f"lane {self.name!r}: the front is not in order of places")
        behind = sum(places.check(heap) for places in self._places.values())
        found = len(front) + len(heap) + behind + len(self._aside) + num_elsewhere
        if found != self.num_waiting:
            raise InvariantError(
                f"lane {self.name!r}: {found} wait, {self.num_waiting} are counted"
            )

    def forget_dead(self) -> None:
        """Rebuild the heap when most entries are dead, or empty it when all of them are."""
        dead, size = self._num_dead, len(self._heap)
        if dead > max(_MIN_DEAD, size // 2) or 0 < dead == size:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0


def _remove(states: list[RequestState], state: RequestState) -> bool:
    """Remove a request from those sorted by place; returns whether it was there."""
    if state.place is None:
        return False
    index = bisect_left(states, state.place, key=_by_place)
    if index == len(states) or states[index] is not state:
        return False
    del states[index]
    return True


def _room(most: int, of_all: int, own: int, lane: str) -> int:
    """What one tenant may add to what waits ``of_all`` and its ``own``, see `check_room`."""
    return (most - of_all - own) // 2 if lane else most - of_all


class Reservation:
    """Tokens of one call's texts that follow those it has queued; they count as waiting.

    Parameters
    ----------
    lane
        Whose they are.
    """

    def __init__(self, queue: WaitingQueue, lane: str) -> None:
        self._queue = queue
        self._lane = lane
        self.num_tokens = 0
        # Whether the call has queued a text, and so takes part in `share`.
        self._has_begun = False
        self._takes_part = False

    @property
    def share(self) -> int:
        """Texts of the call that may wait or run at the same time, at least 1.

        What the tenant's texts have now, and may have besides (`WaitingQueue.check_further`), is
        divided by its calls that have queued some and have more to queue.
        """
        queue = self._queue
        return max(1, queue.most_further(self._lane) // max(1, queue.num_calls(self._lane)))

    def check_further(self) -> None:
        """Refuse a call of several texts where not even one token of them would be taken.

        Raises
        ------
        QueueFullError
            There is no room for any.
        """
        self._queue.check_further_tokens(1, self._lane)

    def add(self, num_tokens: int) -> None:
        """Count the tokens of one more text.

        Raises
        ------
        InvalidRequestError
            Even an empty queue could not hold all of the call's.
        QueueFullError
            The queue has no room for them now.
        """
        queue = self._queue
        if self.num_tokens:
            most = queue.most_tokens_of_call(self._lane)
            if self.num_tokens + num_tokens > most:
                raise InvalidRequestError(
                    f"more than {most} tokens together, but at most so many may wait for one "
                    "request: ask for fewer at once",
                    param="input",
                )
        queue.check_room(num_tokens, lane=self._lane)
        if self.num_tokens:
            queue.check_further_tokens(num_tokens, self._lane)
        self.restore(num_tokens)

    def restore(self, num_tokens: int) -> None:
        """Count tokens again that were taken off for a text that the queue did not take."""
        self.num_tokens += num_tokens
        took_part = self._takes_part
        # Whoever still reads its texts could use no share.
        self._takes_part = self._has_begun and self.num_tokens > 0
        self._queue.reserve(num_tokens, self._takes_part - took_part, self._lane)

    def take_off(self, num_tokens: int) -> None:
        """Count a text's tokens no more: it is queued, and they count there."""
        self._has_begun = True
        self.restore(-num_tokens)

    def close(self) -> None:
        """Count nothing more. Harmless when done twice."""
        self.restore(-self.num_tokens)


class WaitingQueue:
    """Waiting requests: a lane for each tenant with unfinished requests, and common bounds.

    Requests whose adapter can have no slot now wait aside, where nobody looks at them. They are
    brought back when a slot may be theirs.

    Attributes
    ----------
    lanes
        By name, in the order of their next turns.
    num_reserved
        Tokens of requests that are still to follow, see `Reservation`.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        slots: AdapterSlots | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        self._slots = slots or AdapterSlots(0, 0)
        self._weights = weights or {}
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_reserved = 0
        # Tokens and calls of each lane that are still to follow; none that has nothing.
        self._reserved: dict[str, tuple[int, int]] = {}
        self.lanes: dict[str, Lane] = {}
        self._count = 0
        # Key of an adapter -> its requests, sorted by place.
        self._aside: dict[int, list[RequestState]] = {}

    def __len__(self) -> int:
        return self._count

    def check_room(self, num_tokens: int, num_requests: int = 1, lane: str = "") -> None:
        """Refuse new requests, of ``num_tokens`` together, unless the queue has room for them all.

        A tenant may wait with as much as it leaves to all others (the rule of dynamic thresholds:
        Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
        1998), and with one request in any case. So nobody can fill the queue alone. Nothing is
        left for others where tenants are not told apart.

        Raises
        ------
        InvalidRequestError
            Even an empty queue could not hold them. An empty queue takes any single request.
        QueueFullError
            The queue is too full now; the message names the limit.
        """
        most_requests, most_tokens = self.max_requests, self.max_tokens
        if lane:
            most_requests, most_tokens = max(1, most_requests // 2), most_tokens // 2
        whose = " for one key" if lane else ""
        if num_requests > most_requests:
            raise InvalidRequestError(
                f"n is {num_requests}, but at most {most_requests} requests may wait{whose}",
                param="n",
            )
        if num_requests > 1 and num_tokens > most_tokens:
            raise InvalidRequestError(
                f"n is {num_requests}: {num_tokens} tokens together, but at most "
                f"{most_tokens} may wait{whose}",
                param="n",
            )
        if len(self) + num_requests > self.max_requests:
            asked = f", {num_requests} more are asked for" if num_requests > 1 else ""
            raise QueueFullError(
                f"{len(self)} requests are waiting{asked}, at most {self.max_requests} may",
                code="queue_full",
            )
        if (waiting := self.num_tokens + self.num_reserved) and (
            waiting + num_tokens > self.max_tokens
        ):
            raise QueueFullError(
                f"{waiting} tokens are waiting, with {num_tokens} more they would exceed "
                f"{self.max_tokens}",
                code="queue_full",
            )
        if lane:
            self._check_share(num_tokens, num_requests, lane)

    def _check_share(self, num_tokens: int, num_requests: int, name: str) -> None:
        lane = self.lanes.get(name)
        waiting, tokens = (0, 0) if lane is None else (lane.num_waiting, lane.num_tokens)
        tokens += self._tokens_to_follow(name)
        if num_requests == 1 and not tokens:
            return
        of_all = self.num_tokens + self.num_reserved
        if (
            waiting + num_requests > self.max_requests - len(self) - num_requests
            or tokens + num_tokens > self.max_tokens - of_all - num_tokens
        ):
            raise QueueFullError(
                f"{waiting} requests with {tokens} tokens of this key are waiting, and {len(self)} "
                f"with {of_all} of all keys: one key has to leave as much room to the "
                f"others as it takes, of {self.max_requests} requests and {self.max_tokens} tokens",
                code="queue_full",
            )

    def check_further(self, lane: str) -> None:
        """Refuse one more text behind the first of its call, unless such texts leave others room.

        For every `_TAKEN_FOR_LEFT` of them a tenant may add another request, which is alone or the
        first of its call. So whoever calls for many texts, and however many calls there are, nobody
        else's request is refused for them, whether or not callers are told apart.

        Raises
        ------
        QueueFullError
            There are as many as may be now.
        """
        own = self.lanes.get(lane)
        further, waiting = (0, 0) if own is None else (own.num_further, own.num_waiting)
        left = _room(self.max_requests, len(self) + 1, waiting + 1, lane)
        # An empty queue takes any request.
        if len(self) and further + 1 > _TAKEN_FOR_LEFT * left:
            raise QueueFullError(
                f"{further} texts are waiting behind the first of their calls, at most so many may "
                f"beside {waiting - further} other requests",
                code="queue_full",
            )

    def most_further(self, lane: str) -> int:
        """Running requests of a tenant, and texts behind the first of their calls that may wait.

        Those that wait, and as many more as `check_further` would take now.
        """
        own = self.lanes.get(lane)
        waiting, running, further = 0, 0, 0
        if own is not None:
            waiting, further = own.num_waiting, own.num_further
            running = own.num_unfinished - waiting
        # Each one more takes a place of those that are left, and two where others have as many.
        free = self.max_requests - len(self)
        left = _TAKEN_FOR_LEFT * (free - waiting) // 2 if lane else _TAKEN_FOR_LEFT * free
        return running + further + (left - further) // (_TAKEN_FOR_LEFT + 1)

    def check_further_tokens(self, num_tokens: int, lane: str) -> None:
        """Refuse tokens of a text behind the first of its call, unless such leave room to others.

        Those count that wait, and those that are to follow. See `check_further`.

        Raises
        ------
        QueueFullError
            There are as many as may be now.
        """
        own = self.lanes.get(lane)
        to_follow = self._tokens_to_follow(lane)
        further, waiting = (0, 0) if own is None else (own.num_further_tokens, own.num_tokens)
        further += to_follow
        of_all = self.num_tokens + self.num_reserved + num_tokens
        left = _room(self.max_tokens, of_all, waiting + to_follow + num_tokens, lane)
        if further + num_tokens > _TAKEN_FOR_LEFT * left:
            raise QueueFullError(
                f"{further} tokens are waiting that are of texts behind the first of their calls, "
                f"with {num_tokens} more they would leave too few of {self.max_tokens} to others",
                code="queue_full",
            )

    def most_tokens_of_call(self, lane: str) -> int:
        """How many tokens the texts of one call may have that is to fit an empty queue."""
        if not lane:
            # A caller leaves as much to others as it takes.
            return self.max_tokens // 2
        # What `check_further_tokens` takes, with a token's play for its rounding.
        return max(0, self.max_tokens * _TAKEN_FOR_LEFT // (2 * _TAKEN_FOR_LEFT + 2) - 1)

    def reserve(self, num_tokens: int, num_calls: int, lane: str) -> None:
        """Count so many more tokens, of calls, that are still to follow; see `Reservation`."""
        self.num_reserved += num_tokens
        tokens, calls = self._reserved.get(lane, (0, 0))
        if left := tokens + num_tokens:
            self._reserved[lane] = left, calls + num_calls
        else:
            self._reserved.pop(lane, None)

    def num_calls(self, lane: str) -> int:
        """Calls of a tenant that have queued a text, and have more that are to follow."""
        return self._reserved.get(lane, (0, 0))[1]

    def _tokens_to_follow(self, lane: str) -> int:
        return self._reserved.get(lane, (0, 0))[0]

    def enter(self, state: RequestState) -> None:
        """Insert a new request, which counts as its lane's until `leave`."""
        self._lane_of(state).enter(state)
        self.push(state)

    def leave(self, state: RequestState) -> None:
        """Note that a request has ended; a lane of which all have ended is forgotten."""
        lane = self.lanes[state.lane]
        lane.leave(state)
        if not lane.num_unfinished:
            del self.lanes[state.lane]

    def _lane_of(self, state: RequestState) -> Lane:
        lane = self.lanes.get(state.lane)
        if lane is None:
            lane = Lane(state.lane, self._weights.get(state.lane, 1))
            self.lanes[state.lane] = lane
        return lane

    def push(self, state: RequestState) -> None:
        """Insert a request by its place."""
        lane = self._lane_of(state)
        self.num_tokens += lane.count(state, 1)
        self._count += 1
        lane.insert(state)

    def _remove(self, state: RequestState) -> Lane:
        """Count a request no more."""
        lane = self.lanes[state.lane]
        self.num_tokens += lane.count(state, -1)
        self._count -= 1
        return lane

    def end_turn(self, lane: Lane) -> None:
        """Put a lane behind all others."""
        del self.lanes[lane.name]
        self.lanes[lane.name] = lane

    def pop(self, lane: Lane, index: int) -> RequestState:
        """Take out the request that ``lane.peek(index)`` returned, because it gets a row."""
        state = lane.admit(index)
        self._remove(state)
        return state

    def set_aside(self, lane: Lane, index: int) -> None:
        """Put aside what ``lane.peek(index)`` returned: its adapter can have no slot now."""
        state = lane.take(index)
        adapter = state.request.adapter
        assert adapter is not None
        insort(self._aside.setdefault(adapter.key, []), state, key=_by_place)
        self._slots.wait(adapter)

    def bring_back(self) -> None:
        """Bring back requests that may be admitted now, since slots have changed.

        These are all of adapters that have a slot, and the first one of as many other adapters as
        could get one, by their lanes' turns and then by place. The others of such an adapter follow
        once it has its slot.
        """
        slots = self._slots
        slots.close_for_the_patient()
        if not slots.changed:
            return
        slots.changed = False
        for key in [key for key in self._aside if slots.is_open(key)]:
            for state in self._aside[key][:]:
                self._take_back(state, key)
        lanes = sorted(self.lanes, key=lambda name: name != URGENT)
        turns = {name: turn for turn, name in enumerate(lanes)}

        def place(state: RequestState) -> tuple[int, Place]:
            return turns[state.lane], _by_place(state)

        # Not those of a closed one: it has a slot, and may not use it.
        heads = [
            (min(states, key=place) if len(lanes) > 1 else states[0], key)
            for key, states in self._aside.items()
            if not slots.is_resident(key)
        ]
        firsts = heapq.nsmallest(slots.num_openings, heads, key=lambda head: place(head[0]))
        for state, key in firsts:
            self._take_back(state, key)

    def _take_back(self, state: RequestState, key: int) -> None:
        self._remove_aside(state, key)
        self._lane_of(state).insert(state)

    def _remove_aside(self, state: RequestState, key: int) -> bool:
        """Remove a request from those aside; returns whether it was there."""
        states = self._aside.get(key, [])
        if not _remove(states, state):
            return False
        if not states:
            del self._aside[key]
        return True

    def check(self) -> None:
        """See `Lane.check`."""
        elsewhere = Counter(state.lane for states in self._aside.values() for state in states)
        for lane in self.lanes.values():
            lane.check(elsewhere[lane.name])

    def discard(self, state: RequestState) -> None:
        """Drop a request that has just ended while waiting."""
        lane = self._remove(state)
        adapter = state.request.adapter
        was_aside = False
        if adapter is not None:
            was_aside = self._remove_aside(state, adapter.key)
            if adapter.key not in self._aside:
                self._slots.give_up(adapter.key)
            # It may have been brought back for a slot, which another one can have now.
            self._slots.changed = True
        lane.discard(state, was_aside=was_aside)


class Deadlines:
    """Unfinished requests by deadline; O(log n) amortized, and no trace of finished ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._num_dead = 0

    def push(self, state: RequestState) -> None:
        """Watch a request, if it has a deadline."""
        if state.request.deadline is not None:
            heapq.heappush(self._heap, (state.request.deadline, state.key, state))

    def discard(self, state: RequestState) -> None:
        """Stop watching a request that has just ended for another reason."""
        if state.request.deadline is not None:
            self._num_dead += 1
            self._forget_dead()

    def pop_expired(self, now: float) -> RequestState | None:
        """Take out one unfinished request whose deadline is at or before ``now``, if any."""
        while self._heap and self._heap[0][0] <= now:
            state = heapq.heappop(self._heap)[2]
            if state.phase is not Phase.ENDED:
                self._forget_dead()
                return state
            self._num_dead -= 1
        return None

    def _forget_dead(self) -> None:
        """See `Lane.forget_dead`."""
        dead, size = self._num_dead, len(self._heap)
        if dead > max(_MIN_DEAD, size // 2) or 0 < dead == size:
            self._heap = [entry for entry in self._heap if entry[2].phase is not Phase.ENDED]
            heapq.heapify(self._heap)
            self._num_dead = 0
