"""Admission: the scheduler's limits, refusals, the waiting queue and deadlines."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter
from typing import Final, Literal

import msgspec

from src.core.blocks import Window, blocks_held, most_seen
from src.core.config import Config
from src.core.errors import ConfigError, InvalidRequestError, PromptTooLongError, QueueFullError
from src.core.request import Request
from src.engine.scheduling.adapter_slots import AdapterSlots
from src.engine.scheduling.request_state import Phase, Rank, RequestState

# The most waiting requests that admission passes over in one step: those that do not fit, and those
# whose prefix a running request is computing. The cost of a step must not grow with the queue.
MAX_MISFITS_PER_STEP: Final = 8
MAX_PREFIX_WAITS_PER_STEP: Final = 32
SNAPSHOT_TOKENS: Final = 512
"""Tokens between two copies of a row's recurrent states."""
_DEFAULT_MIXED_PREFILL: Final = {"cpu": 256}
_PLANS_LATE: Final = ("cpu",)
# A heap is rebuilt when more than this number and more than half of its entries are dead.
_MIN_DEAD: Final = 64
_FRONT_SIZE: Final = 2 * (MAX_MISFITS_PER_STEP + MAX_PREFIX_WAITS_PER_STEP)


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a scheduler, all resolved to numbers.

    Attributes
    ----------
    max_num_seqs
        Number of rows: requests that run at the same time.
    max_num_batched_tokens
        The most tokens of one step, decode and prefill together.
    max_mixed_prefill_tokens
        The most prefill tokens in a step with decoding rows. ``None``: the rest of the budget.
    prefill_tokens_per_decode
        Raises that limit to this many prefill tokens per decoding row, if that is more.
    block_size, num_blocks
        Tokens per block, and blocks of the pool.
    windows
        Per group of layers: what a query sees. Each group has its own block tables.
    num_snapshots, snapshot_interval
        Slots for copies of recurrent states, and blocks between two copies (``snapshots.py``).
        ``None``: the model has no such states.
    num_adapter_slots
        Adapters that rows may use at the same time.
    content_key
        Identifies the model. Prefix cache entries of different models never match.
    max_model_len
        The most tokens of a request, prompt and output together.
    policy
        ``fcfs`` orders by arrival, ``priority`` by the request's priority and then arrival.
    max_waiting_requests, max_waiting_tokens
        Bounds of the waiting queue. An empty queue takes any request.
    max_bypasses
        How many admissions may overtake the first waiting request while it does not fit.
    lookahead_tokens
        Admission keeps free the blocks that running requests and the new one need for this many
        further tokens, so that a new request is not preempted at once.
    enable_prefix_caching
        Whether computed blocks are registered and reused by content.
    plan_late
        Read by the loop, not by the scheduler: whether it plans a step shortly before the running
        step ends (:class:`~src.engine.scheduling.pace.Pace`), or as soon as that step runs.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_mixed_prefill_tokens: int | None = None
    prefill_tokens_per_decode: int = 8
    block_size: int
    num_blocks: int
    windows: tuple[Window, ...] = (None,)
    num_snapshots: int | None = None
    snapshot_interval: int = 32
    num_adapter_slots: int = 0
    content_key: str = ""
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting_requests: int = 2048
    max_waiting_tokens: int = 8_388_608
    max_bypasses: int = 64
    lookahead_tokens: int = 8
    enable_prefix_caching: bool = True
    plan_late: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks",
                     "max_model_len", "max_waiting_requests", "max_waiting_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_mixed_prefill_tokens is not None and self.max_mixed_prefill_tokens < 1:
            raise ConfigError(
                f"max_mixed_prefill_tokens must be at least 1, got {self.max_mixed_prefill_tokens}"
            )
        for name in ("max_bypasses", "lookahead_tokens", "prefill_tokens_per_decode"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if (self.num_snapshots or 0) < 0 or self.snapshot_interval < 1:
            raise ConfigError(
                f"expected num_snapshots >= 0 and snapshot_interval >= 1, got "
                f"{self.num_snapshots} and {self.snapshot_interval}"
            )
        spans = [most_seen(window) for window in self.windows if window is not None]
        if not self.windows or any(span < 1 for span in spans):
            raise ConfigError(f"windows must be at least 1 token each, got {self.windows}")

    @property
    def layout(self) -> str:
        """Describes how a sequence's KV is laid out in blocks; part of every block's digest."""
        states = "" if self.num_snapshots is None else " states"
        return f"{self.block_size} {self.windows}{states}"

    def blocks_held(self, num_tokens: int) -> int:
        """Blocks of all groups that a request of ``num_tokens`` tokens needs at least."""
        return sum([blocks_held(num_tokens, self.block_size, window) for window in self.windows])

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        device_type: str,
        block_size: int,
        num_blocks: int,
        windows: tuple[Window, ...],
        content_key: str,
        max_model_len: int,
        max_num_seqs: int | None = None,
        num_snapshots: int | None = None,
        num_adapter_slots: int = 0,
    ) -> SchedulerLimits:
        """The limits of an engine with these settings, once its KV memory and model are known.

        ``max_num_seqs``: fewer rows than the setting, because memory does not hold more states.
        """
        section = config.scheduler
        mixed = section.max_mixed_prefill_tokens or _DEFAULT_MIXED_PREFILL.get(device_type)
        plan_late = section.plan_late
        return cls(
            max_num_seqs=max_num_seqs or section.max_num_seqs,
            max_num_batched_tokens=section.max_num_batched_tokens,
            max_mixed_prefill_tokens=mixed,
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            num_snapshots=num_snapshots,
            snapshot_interval=max(1, SNAPSHOT_TOKENS // block_size),
            num_adapter_slots=num_adapter_slots,
            content_key=content_key,
            max_model_len=max_model_len,
            policy=section.policy,
            max_waiting_requests=section.max_waiting_requests,
            max_waiting_tokens=section.max_waiting_tokens,
            max_bypasses=section.max_bypasses,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            plan_late=device_type in _PLANS_LATE if plan_late is None else plan_late,
        )


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """Refuse a request that can never run.

    Raises
    ------
    PromptTooLongError
        If the prompt and the requested output exceed the model's context or the whole KV memory.
    InvalidRequestError
        If there is no prompt or no output is asked for.
    """
    prompt_len = len(request.prompt_token_ids)
    if prompt_len < 1:
        raise InvalidRequestError("the prompt must have at least 1 token, got 0", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
        )
    total = prompt_len + request.max_tokens
    if total > limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {prompt_len} tokens and max_tokens is {request.max_tokens}: "
            f"{total} together, but the model's context is {limits.max_model_len} tokens"
        )
    # The KV of the last token is never computed.
    needed = limits.blocks_held(total - 1)
    if needed > limits.num_blocks:
        raise PromptTooLongError(
            f"the prompt has {prompt_len} tokens and max_tokens is {request.max_tokens}: "
            f"{needed} blocks of KV memory, but there are only {limits.num_blocks} "
            f"of {limits.block_size} tokens each"
        )


class WaitingQueue:
    """Waiting requests in order of rank.

    Admission looks at the first few requests only. These are kept in a sorted list; the rest is a
    heap. A request that ends in the heap stays there as a dead entry, until it reaches the top or
    until the heap is rebuilt because most entries are dead. Every operation is O(log n) amortized;
    looking at the first few is O(1).

    Requests whose adapter can have no slot now wait aside, where nobody looks at them. They are
    brought back when a slot may be theirs.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, slots: AdapterSlots | None = None
    ) -> None:
        self._slots = slots or AdapterSlots(0, 0)
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        # Sorted by rank. All of them rank before everything in the heap, and none is dead.
        self._front: list[RequestState] = []
        self._heap: list[tuple[Rank, RequestState]] = []
        self._num_dead = 0
        # Key of an adapter -> its requests, sorted by rank.
        self._aside: dict[int, list[RequestState]] = {}
        self._num_aside = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._heap) - self._num_dead + self._num_aside

    def check_room(self, num_tokens: int, num_requests: int = 1) -> None:
        """Refuse new requests, of ``num_tokens`` together, unless the queue has room for them all.

        Raises
        ------
        InvalidRequestError
            Even an empty queue could not hold them. An empty queue takes any single request.
        QueueFullError
            The queue is too full now; the message names the limit.
        """
        if num_requests > self.max_requests:
            raise InvalidRequestError(
                f"n is {num_requests}, but at most {self.max_requests} requests may wait", param="n"
            )
        if num_requests > 1 and num_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"n is {num_requests}: {num_tokens} prompt tokens together, but at most "
                f"{self.max_tokens} may wait",
                param="n",
            )
        if len(self) + num_requests > self.max_requests:
            asked = f", {num_requests} more are asked for" if num_requests > 1 else ""
            raise QueueFullError(
                f"{len(self)} requests are waiting{asked}, at most {self.max_requests} may",
                code="queue_full",
            )
        if len(self) > 0 and self.num_tokens + num_tokens > self.max_tokens:
            raise QueueFullError(
                f"{self.num_tokens} tokens are waiting, with {num_tokens} more they would exceed "
                f"{self.max_tokens}",
                code="queue_full",
            )

    def push(self, state: RequestState) -> None:
        """Insert a request by its rank."""
        self.num_tokens += len(state.token_ids)
        self._insert(state)

    def _insert(self, state: RequestState) -> None:
        if self._front and state.rank < self._front[-1].rank:
            insort(self._front, state, key=attrgetter("rank"))
            if len(self._front) > _FRONT_SIZE:
                last = self._front.pop()
                heapq.heappush(self._heap, (last.rank, last))
        else:
            heapq.heappush(self._heap, (state.rank, state))

    def peek(self, index: int) -> RequestState | None:
        """The waiting request at place ``index``, counted from 0; ``None`` if there is none."""
        while len(self._front) <= index and self._heap:
            _, state = heapq.heappop(self._heap)
            if state.phase is Phase.WAITING:
                self._front.append(state)
            else:
                self._num_dead -= 1
        return self._front[index] if index < len(self._front) else None

    def pop(self, index: int) -> RequestState:
        """Take out the request that ``peek(index)`` returned."""
        state = self._front.pop(index)
        self.num_tokens -= len(state.token_ids)
        self._forget_dead()
        return state

    def set_aside(self, index: int) -> None:
        """Put aside the request that ``peek(index)`` returned: its adapter can have no slot now."""
        state = self._front.pop(index)
        adapter = state.request.adapter
        assert adapter is not None
        insort(self._aside.setdefault(adapter.key, []), state, key=attrgetter("rank"))
        self._num_aside += 1
        self._slots.wait(adapter)

    def bring_back(self) -> None:
        """Bring back requests that may be admitted now, since slots have changed.

        These are all of adapters that have a slot, and the first one of as many other adapters as
        could get one, by rank. The others of such an adapter follow once it has its slot.
        """
        slots = self._slots
        slots.close_for_the_patient()
        if not slots.changed:
            return
        slots.changed = False
        for key in [key for key in self._aside if slots.is_open(key)]:
            for state in self._aside[key][:]:
                self._take_back(state, key)
        # Not those of a closed one: it has a slot, and may not use it.
        heads = [
            (states[0].rank, key)
            for key, states in self._aside.items()
            if not slots.is_resident(key)
        ]
        for _, key in heapq.nsmallest(slots.num_openings, heads):
            self._take_back(self._aside[key][0], key)

    def _take_back(self, state: RequestState, key: int) -> None:
        self._remove_aside(state, key)
        self._insert(state)

    def _remove_aside(self, state: RequestState, key: int) -> bool:
        """Remove a request from those aside; returns whether it was there."""
        states = self._aside.get(key, [])
        index = bisect_left(states, state.rank, key=attrgetter("rank"))
        if index == len(states) or states[index] is not state:
            return False
        del states[index]
        self._num_aside -= 1
        if not states:
            del self._aside[key]
        return True

    def discard(self, state: RequestState) -> None:
        """Drop a request that has just ended while waiting."""
        self.num_tokens -= len(state.token_ids)
        adapter = state.request.adapter
        if adapter is not None:
            was_aside = self._remove_aside(state, adapter.key)
            if adapter.key not in self._aside:
                self._slots.give_up(adapter.key)
            # It may have been brought back for a slot, which another one can have now.
            self._slots.changed = True
            if was_aside:
                return
        if self._front and state.rank <= self._front[-1].rank:
            del self._front[bisect_left(self._front, state.rank, key=attrgetter("rank"))]
        else:
            self._num_dead += 1
        self._forget_dead()

    def _forget_dead(self) -> None:
        """Rebuild the heap when most entries are dead, or empty it when all of them are."""
        dead, size = self._num_dead, len(self._heap)
        if dead > max(_MIN_DEAD, size // 2) or 0 < dead == size:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0


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
        """See :meth:`WaitingQueue._forget_dead`."""
        dead, size = self._num_dead, len(self._heap)
        if dead > max(_MIN_DEAD, size // 2) or 0 < dead == size:
            self._heap = [entry for entry in self._heap if entry[2].phase is not Phase.ENDED]
            heapq.heapify(self._heap)
            self._num_dead = 0
