"""A prediction is followed, left where the output leaves it, and found again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.speculation import Guess
from src.engine.speculation.prediction import Predicted

PROMPT = [900, 901, 902]
TEXT = list(range(100, 160))


def packed(text: list[int]) -> bytes:
    return np.array(text, np.int32).tobytes()


def predicted(text: list[int] = TEXT, row: int = 0) -> Predicted:
    drafter = Predicted()
    params = SamplingParams()
    drafter.install(row, DeviceRequest(key=1, prompt_len=3, params=params, prediction=packed(text)))
    return drafter


def propose(drafter: Predicted, output: list[int], most: int = 4, row: int = 0) -> Guess | None:
    return drafter.propose(row, np.array(PROMPT + output, np.int32), most)


def test_it_begins_with_the_output() -> None:
    drafter = predicted()
    assert propose(drafter, []) == Guess([100, 101, 102, 103], 1, "prediction")
    # Nobody took the guess, or took some of it.
    assert propose(drafter, []) == Guess([100, 101, 102, 103], 1, "prediction")
    assert propose(drafter, TEXT[:1]) == Guess([101, 102, 103, 104], 2, "prediction")
    assert propose(drafter, TEXT[:7], 2) == Guess([107, 108], 8, "prediction")
    assert propose(drafter, TEXT[:58]) == Guess([158, 159], 59, "prediction")
    assert propose(drafter, TEXT) is None
    assert propose(drafter, [*TEXT, 5]) is None


@pytest.mark.parametrize("replacement", [[], [7], [7, 8, 9], [7] * 30])
@pytest.mark.parametrize("removed", [0, 1, 5])
def test_it_goes_on_behind_a_deviation(replacement: list[int], removed: int) -> None:
    if not replacement and not removed:
        return
    output = [*TEXT[:10], *replacement, *TEXT[10 + removed :]]
    behind = 10 + len(replacement) + 2
    drafter = predicted()
    for length in range(behind):
        propose(drafter, output[:length])
    # Two tokens tell where it goes on.
    guess = propose(drafter, output[:behind])
    assert guess is not None
    assert guess.token_ids == output[behind : behind + 4]


def test_the_nearest_place_behind_the_deviation_is_meant() -> None:
    text = [1, 2, 50, 3, 4, 1, 2, 60, 3, 4, 1, 2, 70, 5]
    drafter = predicted(text)
    assert propose(drafter, text[:5]) is not None
    # It leaves at the fifth token.
    assert propose(drafter, [*text[:5], 9]) is None
    assert propose(drafter, [*text[:5], 9, 1, 2], 1) == Guess([60], 2, "prediction")
    # Where there is none behind, one before will do.
    drafter = predicted(text)
    propose(drafter, [*text[:13], 9])
    assert propose(drafter, [*text[:13], 9, 3, 4], 1) == Guess([1], 2, "prediction")


def test_after_a_preemption_it_goes_on_where_it_was() -> None:
    drafter = predicted()
    assert propose(drafter, TEXT[:20]) == Guess(TEXT[20:24], 21, "prediction")
    drafter = predicted()
    guess = propose(drafter, [*TEXT[:20], 7, *TEXT[21:30]])
    assert guess is not None
    assert guess.token_ids == TEXT[30:34]


def test_a_long_output_finds_its_place_after_a_preemption() -> None:
    text = list(range(100, 30_100))
    drafter = predicted(text)
    # It has left out some, and said something else in between.
    output = [*text[:50], 7, *text[80:20_000]]
    guess = propose(drafter, output)
    assert guess is not None
    assert guess.token_ids == text[20_000:20_004]


def test_rows_have_their_own_and_lose_it() -> None:
    drafter = predicted(row=2)
    assert propose(drafter, []) is None
    assert propose(drafter, [], row=2) is not None
    request = DeviceRequest(key=2, prompt_len=3, params=SamplingParams())
    drafter.install(2, request)
    assert propose(drafter, [], row=2) is None
    drafter = predicted(row=2)
    drafter.leave(2, request, np.array(PROMPT, np.int32))
    assert propose(drafter, [], row=2) is None
    assert not drafter._rows


def test_what_it_guesses_stands_in_the_prediction() -> None:
    """Any output: guesses are what follows the last tokens somewhere, or what began."""
    source = random.Random(3)
    for _ in range(200):
        text = [source.randrange(6) for _ in range(source.randrange(1, 40))]
        output = [source.randrange(6) for _ in range(60)]
        drafter, length = predicted(text), 0
        while length < len(output):
            guess = propose(drafter, output[:length])
            if guess is not None:
                end = output[max(0, length - min(guess.match, 2)) : length]
                followed = [*end, *guess.token_ids]
                if len(end) == 2 or output[:length] == text[:length]:
                    assert any(
                        text[at : at + len(followed)] == followed for at in range(len(text))
                    ), (text, output[:length], guess)
            length += source.randrange(1, 4)


def test_a_long_prediction_is_looked_through_near_its_place_only() -> None:
    text = list(range(1000, 40_000))
    drafter = predicted(text)
    propose(drafter, text[:10])
    assert propose(drafter, [*text[:10], 7, *text[8000:8003]]) is not None
    drafter = predicted(text)
    propose(drafter, text[:10])
    assert propose(drafter, [*text[:10], 7, *text[20_000:20_003]]) is None
