"""What was said before is found again, by whom it may be, and in memory of a fixed size."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest, Scope
from src.engine.speculation import Guess
from src.engine.speculation.choice import Traits, choose_speculation
from src.engine.speculation.history import SharedHistory

OWN: Scope = ("a", "", 0)
PROMPT = list(range(500, 540))
OUTPUT = list(range(100, 160))


def request(scope: Scope = OWN, prompt_len: int = len(PROMPT), key: int = 1) -> DeviceRequest:
    return DeviceRequest(key=key, prompt_len=prompt_len, params=SamplingParams(), scope=scope)


def say(
    history: SharedHistory,
    output: list[int],
    prompt: list[int] = PROMPT,
    scope: Scope = OWN,
    row: int = 0,
) -> None:
    """A request of this prompt comes, and ends with this output."""
    asked = request(scope, len(prompt))
    history.install(row, asked)
    history.leave(row, asked, np.array(prompt + output, np.int32))
    for _ in range(2 + (len(prompt) + len(output)) // 512):
        history.catch_up()


def propose(
    history: SharedHistory, tokens: list[int], most: int = 4, scope: Scope = OWN, row: int = 1
) -> Guess | None:
    history.install(row, request(scope))
    return history.propose(row, np.array(tokens, np.int32), most)


def test_the_same_question_gets_the_same_answer() -> None:
    history = SharedHistory(1 << 20)
    assert propose(history, PROMPT) is None
    say(history, OUTPUT)
    for known in (0, 1, 7, 30, 58):
        guess = propose(history, PROMPT + OUTPUT[:known])
        assert guess == Guess(OUTPUT[known : known + 4], 16, "history")
    assert propose(history, PROMPT + OUTPUT) is None


def test_the_longest_end_is_looked_for_first_and_then_the_last_place() -> None:
    history = SharedHistory(1 << 20)
    say(history, [*range(1, 20), 70, 71])
    say(history, [9, 9, 9, *range(14, 20), 80, 81])
    say(history, [8, 8, 8, *range(15, 20), 90, 91])
    assert propose(history, list(range(1, 20)), 1) == Guess([70], 16, "history")
    # Of 8 tokens there is one place, with another token before.
    assert propose(history, [9, 9, *range(14, 20)], 1) == Guess([80], 8, "history")
    assert propose(history, [7, 7, *range(16, 20)], 1) == Guess([90], 4, "history")
    assert propose(history, [7, 7, *range(17, 20)], 1) is None


@pytest.mark.parametrize("other", [("b", "", 0), ("a", "salt", 0), ("a", "", 3), ("", "", 0)])
def test_nobody_else_finds_it(other: Scope) -> None:
    history = SharedHistory(1 << 20)
    say(history, OUTPUT)
    assert propose(history, PROMPT, scope=other) is None
    assert propose(history, PROMPT) is not None
    # Not even where the same was said to both.
    say(history, [*OUTPUT[:20], 7, 7, 7], scope=other)
    assert propose(history, PROMPT + OUTPUT[:20]) in (
        None,
        Guess(OUTPUT[20:24], 16, "history"),
    )
    assert propose(history, PROMPT + OUTPUT[:20], scope=other) == Guess([7, 7, 7], 16, "history")


def test_a_collision_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(ends: np.ndarray, number: int) -> np.ndarray:
        return np.zeros(len(ends), np.int64)

    history = SharedHistory(1 << 20)
    monkeypatch.setattr(history, "_hashes", same)
    say(history, OUTPUT)
    assert propose(history, PROMPT + OUTPUT[:59]) == Guess(OUTPUT[59:], 16, "history")
    assert propose(history, PROMPT + OUTPUT[:58]) is None
    assert propose(history, PROMPT + OUTPUT[:59], scope=("b", "", 0)) is None


def test_a_text_ends_where_it_ended() -> None:
    history = SharedHistory(20480)
    # The second round overwrites the first, and ends before it.
    for _ in range(12):
        say(history, [token % 300 for token in range(100)], [1, 2, 3])
    for _ in range(12):
        say(history, OUTPUT[:23], [1, 2, 3])
        assert propose(history, [1, 2, 3, *OUTPUT[:22]]) == Guess([OUTPUT[22]], 16, "history")


def test_rows_that_nobody_has_get_nothing() -> None:
    history = SharedHistory(1 << 20)
    say(history, OUTPUT)
    tokens = np.array(PROMPT, np.int32)
    assert history.propose(0, tokens, 4) is None
    assert history.propose(9, tokens, 4) is None


@pytest.mark.parametrize("size", [20480, 65536, 100_000])
def test_memory_is_fixed_and_old_texts_are_overwritten(size: int) -> None:
    history, source = SharedHistory(size), random.Random(5)
    assert history.nbytes <= size
    said: list[list[int]] = []
    for _ in range(300):
        output = [source.randrange(40) for _ in range(source.randrange(1, 90))]
        scope = (source.choice("ab"), "", 0)
        say(history, output, PROMPT[:3], scope)
        said.append(output)
        tokens = PROMPT[:3] + output[: source.randrange(len(output) + 1)]
        guess = propose(history, tokens, 5, scope)
        if guess is not None:
            followed = [*tokens[-guess.match :], *guess.token_ids]
            assert any(
                (PROMPT[:3] + text)[at : at + len(followed)] == followed
                for text in said
                for at in range(len(text) + 3)
            )
    assert history.nbytes <= size
    newest = next(text for text in reversed(said) if len(text) > 20)
    assert propose(history, PROMPT[:3] + newest[:18], 1, ("a", "", 0)) or propose(
        history, PROMPT[:3] + newest[:18], 1, ("b", "", 0)
    )


def test_a_long_output_is_kept_in_part() -> None:
    history = SharedHistory(1 << 15)
    output = [token % 30_000 for token in range(1000, 21_000)]
    say(history, output)
    assert propose(history, output[-30:-10], 2) == Guess(output[-10:-8], 16, "history")
    assert propose(history, output[:30]) is None


def test_texts_are_entered_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many may end in one step, which does not wait for them."""
    history, hashed = SharedHistory(1 << 24), [0]
    hashes = history._hashes

    def counting(ends: np.ndarray, number: int) -> np.ndarray:
        hashed[0] += len(ends)
        return hashes(ends, number)

    monkeypatch.setattr(history, "_hashes", counting)
    texts = [list(range(begin, begin + 700)) for begin in range(1000, 9000, 1000)]
    asked = request(prompt_len=3)
    for row, text in enumerate(texts):
        history.install(row, asked)
        history.leave(row, asked, np.array([1, 2, 3, *text], np.int32))
    assert hashed == [0]
    for _ in range(len(texts) * 703 // 512 + 1):
        before = hashed[0]
        history.catch_up()
        assert hashed[0] - before <= 3 * 512
    for text in texts:
        for place in (30, 508, 509, 512, 513, 650):
            guess = propose(history, text[:place], 2)
            assert guess is not None, (text[0], place)
            assert guess.token_ids == text[place : place + 2]
    done = hashed[0]
    history.catch_up()
    # But for those that `propose` has looked for.
    assert hashed[0] == done


def test_what_waits_to_be_entered_is_bounded() -> None:
    history = SharedHistory(20480)
    for number in range(50):
        asked = request(prompt_len=3)
        history.install(0, asked)
        text = [1, 2, 3, *range(number * 100, number * 100 + 100)]
        history.leave(0, asked, np.array(text, np.int32))
    assert len(history._left) <= 10
    assert history._num_left == sum(entry[2] - entry[1] for entry in history._left)
    for _ in range(3):
        history.catch_up()
    assert not history._left
    assert history._num_left == 0
    assert propose(history, list(range(4900, 4920)), 2) == Guess([4920, 4921], 16, "history")
    assert propose(history, list(range(100, 120)), 2) is None


def test_too_little_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="shared_history_bytes must be 0 or at least 20480"):
        SharedHistory(20_000)


def test_many_scopes_are_forgotten_one_after_the_other() -> None:
    history = SharedHistory(1 << 20)
    say(history, OUTPUT, scope=("first", "", 0))
    for number in range(4096):
        history.install(0, request((str(number), "", 0)))
    assert propose(history, PROMPT, scope=("first", "", 0)) is None
    assert len(history._numbers) <= 4097


def test_what_is_forgotten_is_not_found_and_requests_that_had_begun_neither_find_nor_leave() -> (
    None
):
    history = SharedHistory(1 << 20)
    say(history, OUTPUT)
    # One that has a row, one that has lost it, and one that has just ended.
    running, preempted, ended = (request(key=key) for key in (2, 3, 4))
    for row, each in enumerate((running, preempted, ended)):
        history.install(row, each)
    known = np.array(PROMPT + OUTPUT[:5], np.int32)
    text = np.array(PROMPT + OUTPUT, np.int32)
    assert history.propose(0, known, 4) is not None
    history.leave(2, ended, text)
    history.forget()
    history.install(3, preempted)
    for row in range(4):
        assert history.propose(row, known, 4) is None
    history.leave(3, preempted, text)
    history.leave(0, running, text)
    history.catch_up()
    history.install(5, request(key=5))
    assert history.propose(5, known, 4) is None
    # From then on all is as it was.
    history.leave(5, request(key=5), text)
    history.catch_up()
    history.install(0, request(key=6))
    assert history.propose(0, known, 4) == Guess(OUTPUT[5:9], 16, "history")


@pytest.mark.parametrize(
    ("method", "size", "device", "words"),
    [
        ("suffix", 1 << 20, "cpu", ""),
        ("auto", 1 << 20, "cpu", ""),
        ("ngram", 0, "cpu", ""),
        ("ngram", 1 << 20, "cpu", "without effect: speculation.method = ngram reads none"),
        ("draft", 1 << 20, "cpu", "without effect: speculation.method = draft reads none"),
        ("off", 1 << 20, "cpu", "without effect: nothing drafts: speculation.method = off"),
        ("suffix", 1 << 20, "cuda", "without effect: a GPU looks up in the row's own text alone"),
        ("suffix", 0, "cuda", ""),
    ],
)
def test_a_size_without_effect_is_said(
    method: Any, size: int, device: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    section = SpeculationSection(method=method, shared_history_bytes=size)
    choose_speculation(section, Traits(device))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(words)
    assert words in "".join(warned)
