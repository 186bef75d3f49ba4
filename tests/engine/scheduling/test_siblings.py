"""Requests of one prompt: what they have in common, and what they must not."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from src.core.request import Request
from src.engine.kv.hash_chain import HashChain
from src.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulation import make_limits, make_request

PROMPT = list(range(1, 10))


def chain_of(scheduler: Scheduler, key: int) -> HashChain:
    state = scheduler.state(key)
    assert state is not None
    return state.chain


def of_one_prompt(key: int, salt: str = "", media: Mapping[int, bytes] | None = None) -> Request:
    request = make_request(key, PROMPT, cache_salt=salt, media_keys=media)
    # The very same list.
    return msgspec.structs.replace(request, prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    ("salt", "media"), [("", None), ("tenant", None), ("", {1: b"an image"}), ("", {0: b"x"})]
)
def test_a_sibling_s_digests_are_those_that_it_has_alone(
    salt: str, media: Mapping[int, bytes] | None
) -> None:
    together, alone = Scheduler(make_limits()), Scheduler(make_limits())
    second = of_one_prompt(1, salt, media)
    together.add_all((of_one_prompt(0), second))
    alone.add(second)
    named, expected = chain_of(together, 1), chain_of(alone, 1)
    for index in range(4):
        assert named.digest(index, PROMPT) == expected.digest(index, PROMPT)
    # And another's, if what it depends on is another one.
    shares = named.digest(3, PROMPT) == chain_of(together, 0).digest(3, PROMPT)
    assert shares == (not salt and not media)


def test_a_prompt_of_its_own_is_no_sibling_s() -> None:
    scheduler = Scheduler(make_limits())
    other = [*PROMPT[:-2], 77, 78]
    scheduler.add_all((of_one_prompt(0), make_request(1, other)))
    expected = Scheduler(make_limits())
    expected.add(make_request(1, other))
    assert chain_of(scheduler, 1).digest(3, other) == chain_of(expected, 1).digest(3, other)
