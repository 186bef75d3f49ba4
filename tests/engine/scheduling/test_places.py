"""Calls of many texts take turns, and who asks for one text waits for none of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from src.core.outputs import FinishReason
from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Request
from src.engine.scheduling.places import WEIGHT_ALONE, Places
from src.engine.scheduling.request_state import RequestState
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request

WINDOW = 64


def text(key: int, num_tokens: int, call: int | None = None, **more: object) -> Request:
    """A text for a vector, of a call or alone, which shares no prefix with others."""
    request = make_request(key, [1000 * (key + 1) + place for place in range(num_tokens)], 1)
    return msgspec.structs.replace(request, pooling="last", task="embed", call=call, **more)


def limits_of(budget: int, **more: object) -> SchedulerLimits:
    settings: dict[str, object] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": budget,
        "block_size": 16,
        "num_blocks": 4096,
        "max_model_len": 128,
        "max_waiting_requests": 2048,
    }
    return make_limits(**(settings | more))


class Flood:
    """A scheduler with calls of many texts, of which a few are queued at a time."""

    def __init__(self, limits: SchedulerLimits, depth: int = 2) -> None:
        self.scheduler = Scheduler(limits)
        self.depth = depth
        self.steps = 0
        # Step in which each request was computed to its end.
        self.step_of: dict[int, int] = {}
        self.ended: set[int] = set()
        self.in_flight: deque[StepPlan] = deque()
        # Texts that are not queued yet, keys of those that are, and how many may be.
        self.calls: list[tuple[deque[Request], deque[int], int]] = []
        self.keys = iter(range(10**6))

    def call(self, num_texts: int, num_tokens: int, *, window: int = WINDOW) -> list[int]:
        """Begin a call; returns the keys of its texts."""
        keys = [next(self.keys) for _ in range(num_texts)]
        texts = deque(text(key, num_tokens, keys[0]) for key in keys)
        self.calls.append((texts, deque(), window))
        self.refill()
        return keys

    def alone(self, num_tokens: int = 10) -> int:
        self.scheduler.add(text(key := next(self.keys), num_tokens))
        return key

    def refill(self) -> None:
        for left, queued, window in self.calls:
            while queued and queued[0] in self.ended:
                queued.popleft()
            while left and len(queued) < window:
                self.scheduler.add(left[0], succeeds=True)
                queued.append(left.popleft().key)

    def step(self) -> None:
        """One step is planned, and the oldest one committed if as many run as may."""
        keys = {state.row: state.key for state in self.scheduler.states}
        plan = self.scheduler.schedule()
        self.steps += 1
        if plan is not None:
            self.in_flight.append(plan)
            keys |= {install.row: install.request_key for install in plan.installs}
            for row in plan.rows:
                if row.pools:
                    self.step_of[keys[row.row]] = self.steps
        if len(self.in_flight) >= self.depth or plan is None:
            done = self.in_flight.popleft()
            rows = [RowResult(r.row, r.generation, [7] if r.samples else []) for r in done.rows]
            events = self.scheduler.commit(StepResult(done.step_id, rows))
            self.ended |= {event.key for event in events if event.finish_reason is not None}
        self.refill()

    def steps_until(self, key: int) -> int:
        """Steps that are planned from now on until one has a request's last token."""
        begin = self.steps
        while key not in self.step_of:
            self.step()
        return self.step_of[key] - begin


@pytest.mark.parametrize("num_calls", [1, 8, 16])
@pytest.mark.parametrize(("budget", "num_tokens"), [(2048, 128), (256, 100), (128, 128)])
@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_lone_query_waits_a_step_behind_any_number_of_calls(
    num_calls: int, budget: int, num_tokens: int, whole_prompts: bool
) -> None:
    flood = Flood(limits_of(budget, whole_prompts=whole_prompts))
    for _ in range(num_calls):
        flood.call(512, num_tokens)
    waits = [flood.steps_until(flood.alone())]  # when all calls have just come
    for _ in range(3):
        flood.step()
        # One after the other, as of a client that waits for its answers.
        waits += [flood.steps_until(flood.alone()) for _ in range(4)]
    assert max(waits) <= 2, waits


def test_text_waits_for_no_call_either() -> None:
    flood = Flood(limits_of(256))
    for _ in range(8):
        flood.call(200, 100)
    keys = [next(flood.keys) for _ in range(3)]
    for key in keys:
        flood.scheduler.add(make_request(key, 10, 4, ends=False))
    flood.step()
    installs = flood.in_flight[-1].installs
    # One text of a call may start when the first of them does.
    assert [install.request_key for install in installs if install.request_key >= keys[0]] == keys
    assert [install.request_key in keys for install in installs][:4].count(True) == 3


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_call_ends_among_more_lone_queries_than_can_be_served(whole_prompts: bool) -> None:
    """It gets a part in `WEIGHT_ALONE` and one."""
    budget, num_texts, num_tokens = 256, 30, 100
    flood = Flood(limits_of(budget, whole_prompts=whole_prompts, max_waiting_requests=10**6))
    keys = flood.call(num_texts, num_tokens)
    # A step takes two texts at most where none is cut, and the queries behind them.
    served = (num_texts + 1) * num_tokens * (1 + WEIGHT_ALONE)
    most = served // (budget - num_tokens * whole_prompts) + 2
    while not flood.ended.issuperset(keys):
        for _ in range(30):
            flood.alone()
        flood.step()
        assert flood.steps <= most
    # And the queries were not held up either: they had most of each step.
    assert flood.steps > served // budget // 2


def test_a_call_ends_among_more_new_calls_than_can_be_served() -> None:
    """New ones start one behind the other, or the second text of none would ever start."""
    flood = Flood(limits_of(256, max_waiting_requests=10**6))
    keys = flood.call(20, 100)
    while not flood.ended.issuperset(keys):
        for _ in range(3):
            flood.call(2, 60)
        flood.step()
        # Beside 100 tokens of it, new calls start that have 60 and 60 in 60 units of time.
        assert flood.steps <= 20 * (100 + 2 * WEIGHT_ALONE * 100) // 256 + 20


def test_calls_get_equal_parts_however_long_their_texts_are() -> None:
    flood = Flood(limits_of(240, max_model_len=240))
    calls = [(flood.call(400, length), length) for length in (30, 30, 60, 120)]
    for _ in range(60):
        flood.step()
    late = flood.call(400, 30), 30
    before = set(flood.step_of)
    for _ in range(60):
        flood.step()

    def served(call: tuple[list[int], int], known: set[int] | dict[int, int]) -> int:
        return call[1] * len(known & set(call[0]))

    new = flood.step_of.keys() - before
    parts = [served(call, new) for call in [*calls, late]]
    # The one that came late takes no turns for the time before it came.
    assert max(parts) - min(parts) <= 2 * 120, parts
    parts = [served(call, before) for call in calls]
    assert max(parts) - min(parts) <= 2 * 120, parts


def test_a_call_that_queues_one_text_at_a_time_gets_no_more_than_others() -> None:
    """Between two of its texts none of it waits, and yet it is no new one."""
    flood = Flood(limits_of(64), depth=1)
    calls = [flood.call(100, 64, window=window) for window in (1, 1, 64)]
    for _ in range(90):
        flood.step()
    served = [len(flood.step_of.keys() & set(call)) for call in calls]
    assert max(served) < 2 * min(served), served


def keys_in_order(scheduler: Scheduler) -> Iterator[int]:
    """The waiting requests of one lane, as admission would take them one after the other."""
    lane = scheduler._waiting.lanes[""]
    while (state := lane.peek(0)) is not None:
        scheduler._waiting.pop(lane, 0)
        yield state.key


def queue(*requests: Request, policy: str = "fcfs") -> Scheduler:
    scheduler = Scheduler(limits_of(256, policy=policy))
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_the_order_of_calls_and_lone_queries() -> None:
    texts = [text(key, 10, call=0) for key in range(4)] + [text(key, 10, call=4) for key in (4, 5)]
    alone = [text(key, 10) for key in (6, 7)]
    # Before each further text of a call there are 160 tokens of lone queries.
    assert list(keys_in_order(queue(*texts, *alone))) == [6, 0, 7, 4, 1, 5, 2, 3]
    many = [text(key, 10) for key in range(6, 50)]
    order = list(keys_in_order(queue(*texts, *many)))
    assert [order.index(key) for key in range(6)] == [1, 19, 37, 49, 3, 21]
    assert [key for key in order if key > 5] == list(range(6, 50))


def test_who_is_alone_is_served_in_order_of_arrival_and_by_priority() -> None:
    requests = [text(key, 1 + key % 7, priority=key % 3) for key in range(60)]
    by_priority = sorted(range(60), key=lambda key: (key % 3, key))
    assert list(keys_in_order(queue(*requests, policy="priority"))) == by_priority
    assert list(keys_in_order(queue(*requests))) == list(range(60))
    # A call of more importance is before all of less, and takes none of their time.
    call = [text(key, 100, call=60, priority=-1) for key in range(60, 70)]
    order = [*range(60, 70), *by_priority]
    assert list(keys_in_order(queue(*requests, *call, policy="priority"))) == order


def test_what_ends_while_it_waits_has_taken_no_time() -> None:
    scheduler = queue(text(1000, 100))
    for first in range(0, 900, 30):
        for key in range(first, first + 30):
            scheduler.add(text(key, 100, call=first + 1 if key % 2 else None))
        # Some are looked at, and get their places.
        scheduler._waiting.lanes[""].peek(7)
        for key in range(first, first + 30):
            scheduler.finish(key, FinishReason.ABORT)
    for key in range(2000, 2004):
        scheduler.add(text(key, 100, call=2000))
    scheduler.add(text(3000, 100))
    scheduler.add(text(3001, 100))
    assert list(keys_in_order(scheduler)) == [1000, 2000, 3000, 3001, 2001, 2002, 2003]


def test_nothing_is_kept_of_those_that_have_ended() -> None:
    scheduler = Scheduler(limits_of(256, max_waiting_requests=10**6, policy="priority"))
    scheduler.add(text(10**6, 10))
    for first in range(0, 3000, 3):
        for key in range(first, first + 3):
            scheduler.add(text(key, 10, call=first, priority=first))
        for key in range(first, first + 3):
            scheduler.finish(key, FinishReason.ABORT)
    lane = scheduler._waiting.lanes[""]
    assert len(lane._places) == 1
    places = lane._places[0]
    assert not places._calls
    for key in range(10_000):
        scheduler.add(text(key, 1))
        if key % 5:
            scheduler.finish(key, FinishReason.ABORT)
    assert len(places._alone.behind) < 5200
    for key in range(0, 10_000, 5):
        scheduler.finish(key, FinishReason.ABORT)
    assert len(places._alone.behind) == 0
    assert len(lane._heap) < 200
    assert len(places._alone.placed) < 200
    # Later ones go past one that waits for long, and one waits behind them.
    for key in range(20_000, 21_000):
        scheduler.add(text(key, 1))
        if key > 20_005:
            lane.peek(4)
            scheduler._waiting.pop(lane, 1).cached_tokens = 0
    assert len(places._alone.placed) < 200
    assert list(keys_in_order(scheduler)) == [10**6, *range(20_994, 21_000)]


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_any_kind_come_out_once_and_those_of_a_flow_in_order(seed: int) -> None:
    source = random.Random(seed)
    ends = source.choice([0.6, 0.75, 0.9])
    scheduler = queue()
    waiting: dict[int, int | None] = {}
    firsts = [0]
    for key in range(3000):
        action = source.random()
        lane = scheduler._waiting.lanes.get("")
        if action < 0.55 or not waiting:
            call = source.choice([None, key, *firsts[-3:]])
            if call == key:
                firsts.append(key)
            scheduler.add(text(key, source.randint(1, 40), call=call))
            waiting[key] = call
        elif action < ends:
            ended = source.choice(list(waiting))
            scheduler.finish(ended, FinishReason.ABORT)
            del waiting[ended]
        else:
            assert lane is not None
            index = source.randrange(min(12, len(waiting)))
            states = [lane.peek(place) for place in range(index + 1)]
            places = [state.place for state in states if state is not None and state.place]
            assert places == sorted(places)
            assert len(places) == index + 1
            # Often it is only looked at: then time stands, and others get their places.
            if source.random() < 0.5:
                continue
            state = scheduler._waiting.pop(lane, index)
            before = {s.key for s in states[:-1] if s is not None}
            older = {k for k, call in waiting.items() if call == waiting[state.key]}
            assert {k for k in older if k < state.key} <= before, "an older one of its flow waits"
            del waiting[state.key]
        scheduler._waiting.check()
    assert sorted(keys_in_order(scheduler)) == sorted(waiting)


def test_texts_of_calls_and_streams_in_little_memory() -> None:
    """Small memory: texts of calls are preempted and come back to their places."""
    limits = make_limits(
        num_blocks=16, max_num_seqs=6, max_num_batched_tokens=7, lookahead_tokens=0
    )
    simulation = Simulation(limits, 2)
    for key in range(40):
        if key % 4 == 3:
            simulation.add(make_request(key, 5, 20, ends=False))
        else:
            simulation.add(text(key, 6 + key % 3, call=key // 8 * 8))
        if key % 3 == 0:
            simulation.step()
    simulation.drain()
    assert simulation.scheduler.stats.preemptions


class Waiting:
    """Places of requests that are asked for directly: a lane looks at each when it likes."""

    def __init__(self) -> None:
        self.places = Places()

    def come(self, key: int, num_tokens: int, call: int | None = None) -> RequestState:
        request = text(key, num_tokens, call)
        tokens = request.prompt_token_ids
        state = RequestState(
            request=request,
            key=key,
            rank=(0, key),
            chain=None,  # type: ignore[arg-type]
            token_ids=list(tokens),
            prompt_len=len(tokens),
            limit=len(tokens) + 1,
        )
        self.places.enter(state)
        assert self.places.assign(state)
        return state

    def pass_time(self, key: int, num_tokens: int) -> None:
        """Admit a call's second text."""
        self.come(key, num_tokens, key)
        self.places.admit(self.come(key + 1, num_tokens, key))


@pytest.mark.parametrize("is_late", [False, True])
def test_who_ends_while_it_waits_takes_off_no_time_that_has_passed(is_late: bool) -> None:
    waiting = Waiting()
    early = waiting.come(0, 10)
    if is_late:
        waiting.pass_time(1, 100)
    waiting.come(3, 30)
    waiting.places.discard(early)
    following = waiting.come(4, 5)
    assert following.place is not None
    # Behind the second one, and where the first one would have been if that still counts.
    assert following.place[1] == (16 * 100 + 30 if is_late else 30)


@pytest.mark.parametrize("is_late", [False, True])
def test_nor_does_a_call_that_ends_while_it_waits(is_late: bool) -> None:
    waiting = Waiting()
    if is_late:
        early = waiting.come(0, 10, 0)
        waiting.pass_time(1, 100)
    else:
        waiting.pass_time(1, 100)
        early = waiting.come(0, 10, 0)
    waiting.come(3, 30, 3)
    waiting.places.discard(early)
    following = waiting.come(4, 5, 4)
    assert following.place is not None
    # The call that passed time was the second one there, or the first.
    assert following.place[1] == 16 * 100 + 30 + 10 * is_late
