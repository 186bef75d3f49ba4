"""Where the end of a text stands in another text, or in itself before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import numpy as np

# Tokens that a place is first found by, at most: each costs a pass over the text.
_FOUND_BY: Final = 4
# The most places whose matches are measured, the latest ones: a common end has many.
_MOST_PLACES: Final = 128
# Where a search among bytes finds so many places, arrays are faster.
_MOST_TRIES: Final = 8
_NO_PLACES: Final = np.empty(0, np.int64)


def ends_before(text: np.ndarray, least: int) -> bool:
    """Whether a few of a text's last tokens may stand in it before: of ``least`` and 4 the fewer.

    A search among bytes. What it finds may lie across the bounds of tokens, so ``True`` may be
    wrong, and ``False`` is not.

    Parameters
    ----------
    text
        [n] int32 token ids.
    """
    size = text.itemsize
    data = text.tobytes()
    return data.find(data[-size * min(least, _FOUND_BY) :], 0, -size) >= 0


def places_of(
    text: np.ndarray, end: np.ndarray, least: int, longest: int
) -> tuple[np.ndarray, int]:
    """Indices behind the places in ``text`` of the longest end of ``end``, and its length.

    There are none, and the length is 0, if no end of ``least`` tokens stands there. An end of more
    than ``longest`` tokens is not told from one of ``longest``. Whatever the texts, this reads
    ``text`` a few times, and measures matches at the last 128 places only.

    Parameters
    ----------
    text, end
        [n], [m] int32 token ids.
    """
    size, last, nothing = len(text), len(end) - 1, (_NO_PLACES, 0)
    few = min(least, _FOUND_BY)
    if last + 1 < least or size < few:
        return nothing
    found = _found_among_bytes(text, end[-few:])
    if found is not None:
        return _measured_one_by_one(text, end, found, least, longest) if found else nothing
    # Where matches of a few tokens end; longer ones are among them.
    matches = text[few - 1 :] == end[last]
    for before in range(1, few):
        matches &= text[few - 1 - before : size - before] == end[last - before]
    ends = np.flatnonzero(matches)[-_MOST_PLACES:] + (few - 1)
    if not len(ends):
        return nothing
    # [places, tokens backwards from the end]: whether they are equal.
    back = np.arange(min(longest, last + 1))
    at = ends[:, None] - back
    equal = (text[np.maximum(at, 0)] == end[last - back]) & (at >= 0)
    lengths = np.where(equal.all(1), len(back), equal.argmin(1))
    length = int(lengths.max())
    if length < least:
        return nothing
    behind: np.ndarray = ends[lengths == length] + 1
    return behind, length


def _found_among_bytes(text: np.ndarray, few: np.ndarray) -> list[int] | None:
    """Indices of the last tokens of all places of ``few`` tokens; ``None`` if there are many.

    Mostly there are none, or one or two. A search among bytes finds that out in one call, where
    comparing arrays takes a dozen. It finds what lies across the bounds of tokens as well.
    """
    size, texts, wanted = text.itemsize, text.tobytes(), few.tobytes()
    found: list[int] = []
    at = texts.find(wanted)
    for _ in range(_MOST_TRIES):
        if at < 0:
            return found
        if at % size == 0:
            found.append(at // size + len(few) - 1)
        at = texts.find(wanted, at + 1)
    return None


def _measured_one_by_one(
    text: np.ndarray, end: np.ndarray, found: Sequence[int], least: int, longest: int
) -> tuple[np.ndarray, int]:
    """See `places_of`."""
    backwards = end[-longest:][::-1].tolist()
    lengths = []
    for place in found:
        before = text[max(0, place + 1 - len(backwards)) : place + 1][::-1].tolist()
        pairs = zip(before, backwards, strict=False)
        lengths.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    length = max(lengths)
    if length < least:
        return _NO_PLACES, 0
    behind = [place + 1 for place, own in zip(found, lengths, strict=True) if own == length]
    return np.array(behind), length
