from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.errors import InvalidRequestError
from src.text.stop_strings import StopStrings

texts = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def one_shot(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first character that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def could_begin_a_stop(text: str, stops: list[str]) -> int:
    return max(
        n
        for n in range(len(text) + 1)
        if n == 0 or any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)
    )


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stop_lists, st.booleans(), st.lists(st.integers(0, 24), max_size=12))
def test_any_cutting_gives_the_one_shot_text_and_match(
    text: str, stops: list[str], include: bool, places: list[int]
) -> None:
    expected, expected_stop = one_shot(text, stops, include)
    stopper = StopStrings(stops, include)
    emitted, seen, matched = "", "", None
    for piece in cut(text, places):
        seen += piece
        shown, matched = stopper.feed(piece)
        emitted += shown
        assert expected.startswith(emitted)
        if matched is not None:
            break
        # No more is held back than what may still become a stop string.
        assert len(emitted) == len(seen) - could_begin_a_stop(seen, stops)
    if matched is None:
        emitted += stopper.finish()
    assert (emitted, matched, stopper.matched) == (expected, expected_stop, expected_stop)


@given(texts, stop_lists, texts)
def test_a_suppressed_match_is_plain_text_and_its_parts_are_still_held_back(
    before: str, stops: list[str], after: str
) -> None:
    stopper = StopStrings(stops)
    emitted, matched = stopper.feed(before, allow_match=False)
    assert matched is None
    assert emitted == before[: len(before) - could_begin_a_stop(before, stops)]
    shown, matched = stopper.feed(after)
    emitted += shown
    if matched is None:
        emitted += stopper.finish()
    whole = before + after
    expected, expected_stop = whole, None
    for end in range(len(before) + 1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            expected_stop = max(ending, key=len)
            expected = whole[: end - len(expected_stop)]
            break
    assert (emitted, matched) == (expected, expected_stop)


def test_the_longest_of_the_stop_strings_that_end_together_matches() -> None:
    assert StopStrings(["b", "ab"]).feed("xaby") == ("x", "ab")


def test_the_earliest_end_wins_over_an_earlier_start() -> None:
    assert StopStrings(["abc", "b"]).feed("abc") == ("a", "b")


def test_nothing_is_emitted_after_a_match() -> None:
    stopper = StopStrings(["x"], include_in_output=True)
    assert stopper.feed("1x2") == ("1x", "x")
    assert stopper.feed("3") == ("", "x")
    assert stopper.finish() == ""


def test_what_was_held_back_is_shown_once() -> None:
    stopper = StopStrings(["abc"])
    assert stopper.feed("xab") == ("x", None)
    assert [stopper.finish(), stopper.finish()] == ["ab", ""]
    # It is the end of the text: what comes then does not complete what began before.
    assert stopper.feed("c") == ("c", None)


def test_a_stop_string_where_the_text_may_not_end_is_plain_text() -> None:
    asked: list[str] = []

    def may_end(shown: str) -> bool:
        asked.append(shown)
        return shown.endswith("}")

    stopper = StopStrings(["--"], may_end=may_end)
    assert stopper.feed("{--") == ("{-", None)
    # The second character is the beginning of another one that may follow.
    assert stopper.feed("}--") == ("-}", "--")
    # What was let out is not told again.
    assert asked == ["{", "-}"]


def test_an_empty_stop_string_is_refused_by_its_index() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop\[1\]"):
        StopStrings(["a", ""])


def test_a_long_repetitive_stop_string_takes_linear_time() -> None:
    stopper = StopStrings(["a" * 20_000 + "b"])
    emitted = "".join(stopper.feed("a" * 100)[0] for _ in range(1_000)) + stopper.finish()
    assert emitted == "a" * 100_000
