from __future__ import annotations

import random

import pytest

from src.core.errors import ConfigError, InvalidRequestError, PromptTooLongError, QueueFullError
from src.engine.kv.hash_chain import HashChain
from src.engine.scheduling.admission import check_request
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.waiting import Deadlines, WaitingQueue
from tests.engine.scheduling.simulation import make_limits, make_request


def make_state(rank: int, *, priority: int = 0, deadline: float | None = None) -> RequestState:
    request = make_request(rank, 2, deadline=deadline)
    return RequestState(
        request=request,
        key=rank,
        rank=(priority, rank),
        chain=HashChain(2, b""),
        token_ids=[1, 2],
        prompt_len=2,
        limit=4,
    )


@pytest.mark.parametrize("name", ["max_num_seqs", "num_blocks", "block_size", "max_bypasses"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        make_limits(**{name: -1})


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    limits = make_limits(max_model_len=16, num_blocks=6)
    check_request(make_request(0, 9, 4), limits)  # 12 positions of KV in 6 blocks of 2
    check_request(make_request(0, 10, 6), make_limits(max_model_len=16))
    with pytest.raises(PromptTooLongError, match=r"9 tokens .* 5: 7 blocks .* only 6 of 2"):
        check_request(make_request(0, 9, 5), limits)
    with pytest.raises(PromptTooLongError, match=r"10 tokens .* 7: 17 together, .* 16 tokens"):
        check_request(make_request(0, 10, 7), limits)
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1, got 0"):
        check_request(make_request(0, 1, 0), limits)
    with pytest.raises(InvalidRequestError, match="at least 1 token, got 0"):
        check_request(make_request(0, []), limits)


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    queue = WaitingQueue(2, 5)
    queue.check_room(100)  # an empty queue takes any
    queue.push(make_state(1))
    queue.check_room(3)
    with pytest.raises(QueueFullError, match="exceed 5"):
        queue.check_room(4)
    queue.push(make_state(2))
    with pytest.raises(QueueFullError, match="at most 2 may") as refusal:
        queue.check_room(1)
    assert refusal.value.retry_after > 0


def test_the_queue_against_a_sorted_list() -> None:
    rng = random.Random(7)
    queue = WaitingQueue(10**6, 10**6)
    oracle: list[RequestState] = []
    for rank in range(4000):
        action = rng.random()
        if action < 0.5 or not oracle:
            state = make_state(rank, priority=rng.randrange(50))
            queue.push(state)
            oracle.append(state)
            oracle.sort(key=lambda state: state.rank)
        elif action < 0.8:
            state = oracle.pop(rng.randrange(len(oracle)))
            state.phase = Phase.ENDED
            queue.discard(state)
        else:
            index = rng.randrange(min(8, len(oracle)))
            assert queue.lanes[""].peek(index) is oracle[index]
            assert queue.pop(queue.lanes[""], index) is oracle.pop(index)
        assert len(queue) == len(oracle)
        assert queue.num_tokens == 2 * len(oracle)
    assert queue.lanes[""].peek(len(oracle)) is None
    assert [queue.lanes[""].peek(i) for i in range(len(oracle))] == oracle


def test_dead_entries_do_not_pile_up() -> None:
    queue, deadlines = WaitingQueue(10**6, 10**6), Deadlines()
    survivor = make_state(0, deadline=1e9)
    queue.push(survivor)
    deadlines.push(survivor)
    for rank in range(1, 2000):
        state = make_state(rank, deadline=1e9)
        queue.push(state)
        deadlines.push(state)
        state.phase = Phase.ENDED
        queue.discard(state)
        deadlines.discard(state)
    assert len(queue.lanes[""]._heap) < 200
    assert len(deadlines._heap) < 200
    assert len(queue) == 1
    assert queue.lanes[""].peek(0) is survivor
    assert deadlines.pop_expired(2e9) is survivor


def test_deadlines_come_in_order_and_skip_the_ended() -> None:
    deadlines = Deadlines()
    states = [make_state(i, deadline=deadline) for i, deadline in enumerate([3.0, 1.0, 2.0, None])]
    for state in states:
        deadlines.push(state)
    assert deadlines.pop_expired(0.5) is None
    states[1].phase = Phase.ENDED
    deadlines.discard(states[1])
    assert deadlines.pop_expired(2.0) is states[2]
    assert deadlines.pop_expired(2.0) is None
    assert deadlines.pop_expired(9.0) is states[0]
    assert deadlines.pop_expired(9.0) is None


@pytest.mark.parametrize("last_is", ["popped", "discarded"])
def test_nobody_is_kept_for_nobody(last_is: str) -> None:
    queue, deadlines = WaitingQueue(10**6, 10**6), Deadlines()
    states = [make_state(rank, deadline=10.0 + rank) for rank in range(4)]
    for state in states:
        queue.push(state)
        deadlines.push(state)
    assert queue.lanes[""].peek(0) is states[0]
    for state in states[1:]:
        state.phase = Phase.ENDED
        queue.discard(state)
        deadlines.discard(state)
    if last_is == "popped":
        assert queue.pop(queue.lanes[""], 0) is states[0]
        assert deadlines.pop_expired(10.5) is states[0]
    else:
        states[0].phase = Phase.ENDED
        queue.discard(states[0])
        deadlines.discard(states[0])
    assert (len(queue), queue.lanes[""]._heap, deadlines._heap) == (0, [], [])
    # And those who come later are served in order.
    later = [make_state(rank, deadline=20.0) for rank in (5, 6)]
    for state in later:
        queue.push(state)
    assert [
        queue.pop(queue.lanes[""], 0) if queue.lanes[""].peek(0) else None for _ in range(3)
    ] == [*later, None]
