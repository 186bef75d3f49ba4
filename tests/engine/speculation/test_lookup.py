"""Guesses from a row's own tokens, against a plain search."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from src.core.config import SpeculationSection
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.drafters.loading import SOURCES as WITH_WEIGHTS
from src.engine.speculation import Guess
from src.engine.speculation import lookup as lookup_module
from src.engine.speculation.drafter import DRAFTERS, SOURCES, UNDER_GRAMMARS, Follower
from src.engine.speculation.history import SharedHistory
from src.engine.speculation.lookup import Lookup
from src.engine.speculation.places import places_of


def propose(lookup: Lookup, tokens: list[int], most: int = 4) -> Guess | None:
    return lookup.propose(0, np.array(tokens, np.int32), most)


def plainly(tokens: list[int], longest: int) -> tuple[int, list[int]]:
    """Length of the longest end that stands in the tokens before, and the places behind it."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        end = tokens[-length:]
        places = [
            start + length
            for start in range(len(tokens) - length)
            if tokens[start : start + length] == end
        ]
        if places:
            return length, places
    return 0, []


def test_a_text_goes_on_as_before() -> None:
    lookup = Lookup(least=1, longest=24)
    assert propose(lookup, [1, 2, 3, 4, 5, 9, 2, 3]) == Guess([4, 5, 9, 2], 2, "suffix")
    assert propose(lookup, [1, 2, 3, 4, 5, 9, 2, 3], 1) == Guess([4], 2, "suffix")
    # What follows the match may end where the text ends.
    assert propose(lookup, [7, 7, 7]) == Guess([7], 2, "suffix")
    for without in ([], [1], [1, 2, 3]):
        assert propose(lookup, without) is None


def test_most_places_win_and_then_the_last_one() -> None:
    lookup = Lookup(least=1, longest=24)
    assert propose(lookup, [1, 5, 0, 1, 6, 0, 1, 5, 8, 0, 1]) == Guess([5, 8, 0, 1], 2, "suffix")
    assert propose(lookup, [3, 1, 5, 4, 1, 6, 1], 2) == Guess([6, 1], 1, "suffix")


def test_a_match_has_bounds() -> None:
    tokens = [1, 2, 3, 8, 3, 9, 1, 2, 3]
    assert propose(Lookup(least=4, longest=5), tokens) is None
    assert propose(Lookup(least=3, longest=5), tokens) == Guess([8, 3, 9, 1], 3, "suffix")
    # With one token for a match, the later place is as good.
    assert propose(Lookup(least=1, longest=1), tokens, 1) == Guess([9], 1, "suffix")


@pytest.mark.parametrize("longest", [1, 2, 5, 24])
def test_it_is_what_a_plain_search_finds(longest: int) -> None:
    source = random.Random(longest)
    lookup = Lookup(least=1, longest=longest)
    for _ in range(300):
        tokens = [source.randrange(source.choice((2, 3, 20))) for _ in range(source.randint(1, 40))]
        length, places = plainly(tokens, longest)
        guess = propose(lookup, tokens, 6)
        if not places:
            assert guess is None
            continue
        assert guess is not None
        assert guess.match == length
        # Of many places the latest are followed.
        places = places[-16:]
        following = [tokens[place] for place in places]
        assert following.count(guess.token_ids[0]) == max(map(following.count, following))
        # Every guess continues one of the places.
        width = len(guess.token_ids)
        assert any(tokens[place : place + width] == guess.token_ids for place in places)


def test_the_table_has_every_method() -> None:
    section = SpeculationSection(
        prompt_lookup_min=2, prompt_lookup_max=3, shared_history_bytes=20480
    )
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    params = SamplingParams()
    for source, build in DRAFTERS.items():
        drafter = build(section)
        if isinstance(drafter, Follower):
            prediction = np.array([2, 3, 4, 5], np.int32).tobytes()
            request = DeviceRequest(key=1, prompt_len=6, params=params, prediction=prediction)
            drafter.install(0, request)
            if isinstance(drafter, SharedHistory):
                drafter.leave(0, request, np.array([0, 5, 1, 2, 3, 4, 5], np.int32))
                drafter.catch_up()
                drafter.install(0, request)
                assert drafter.propose(0, tokens, 2) == Guess([4, 5], 4, source)
                continue
        guess = drafter.propose(0, tokens, 2)
        assert guess == Guess([4, 5], 3, "suffix" if source == UNDER_GRAMMARS else source), source
    # Those with weights are built where a checkpoint is read.
    named = {source for sources in SOURCES.values() for source in sources}
    assert named == {*DRAFTERS, *WITH_WEIGHTS}
    assert DRAFTERS["ngram"](section).propose(0, np.array([1, 3, 1], np.int32), 2) is None


class Counted(np.ndarray):
    """Counts the elements that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        taken = super().__getitem__(index)
        Counted.read += np.size(taken)
        return taken


def work(tokens: np.ndarray, least: int) -> tuple[int, int]:
    """Elements that a look-up reads, and lines of Python that it executes."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename == lookup_module.__file__
        return trace

    counted, lookup = tokens.view(Counted), Lookup(least=least, longest=24)
    Counted.read, before = 0, sys.gettrace()
    sys.settrace(trace)
    try:
        lookup.propose(0, counted, 16)
    finally:
        sys.settrace(before)
    return Counted.read, lines


@pytest.mark.parametrize("least", [1, 2, 24])
@pytest.mark.parametrize("period", [1, 2, 7, 1000])
def test_no_text_takes_more_than_a_bounded_look(period: int, least: int) -> None:
    """A row of one repeated token is the worst of them, and may be of any length."""
    text = np.arange(200_000, dtype=np.int32) % period
    found = [work(text[:length].copy(), least) for length in (20_000, 40_000, 200_000)]
    assert found[0] == found[1] == found[2]
    read, lines = found[0]
    assert 0 < read < 10 * 8192
    assert 0 < lines < 1000


def test_what_is_far_back_is_not_looked_for() -> None:
    lookup = Lookup(least=2, longest=24)
    between = list(range(100, 100 + 8192))
    assert propose(lookup, [1, 2, 3, *between[:-8], 1, 2], 1) == Guess([3], 2, "suffix")
    assert propose(lookup, [1, 2, 3, *between, 1, 2], 1) is None


def test_two_tokens_are_no_match_for_suffix() -> None:
    suffix = DRAFTERS["suffix"](SpeculationSection())
    assert suffix.propose(0, np.array([1, 2, 3, 4, 1, 2], np.int32), 2) is None
    tokens = np.array([1, 2, 3, 4, 1, 2, 3], np.int32)
    assert suffix.propose(0, tokens, 2) == Guess([4, 1], 3, "suffix")


@pytest.mark.parametrize("copies", [0, 1, 7, 8, 9, 200])
@pytest.mark.parametrize("scale", [1, 256, 65536])
def test_few_places_are_found_as_many_are(copies: int, scale: int) -> None:
    """A search among bytes finds a few; what lies across tokens is none of them."""
    # Bytes of 0, 1, 0 stand across every two of these tokens.
    filler = [0, 1, 0, 256, 1]
    end = [1, 0, 2, 1]
    text = np.array((filler + end) * copies + filler, np.int32) * scale
    places, length = places_of(text, np.array(end, np.int32) * scale, 3, 24)
    size = len(filler) + len(end)
    expected = [size * (copy + 1) for copy in range(copies)]
    assert places.tolist() == expected[-128:]
    assert length == (4 if copies else 0)


def test_what_lies_across_tokens_is_no_second_place() -> None:
    """The first byte of 256 is 0, so bytes of three zeros stand there twice."""
    text = np.array([0, 0, 0, 256], np.int32)
    places, length = places_of(text, text[:3], 3, 24)
    assert (places.tolist(), length) == ([3], 3)
