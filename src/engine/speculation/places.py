"""Where the end of a text stands in another text, or in itself before."""

from __future__ import annotations

from typing import Final

import numpy as np

# Tokens that a place is first found by, at most: each costs a pass over the text.
_FOUND_BY: Final = 4
# The most places whose matches are measured, the latest ones: a common end has many.
_MOST_PLACES: Final = 128


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
    size, last, nothing = len(text), len(end) - 1, (np.empty(0, np.int64), 0)
    few = min(least, _FOUND_BY)
    if last + 1 < least or size < few:
        return nothing
    # Where matches of a few tokens end; longer ones are among them.
    found = text[few - 1 :] == end[last]
    for before in range(1, few):
        found &= text[few - 1 - before : size - before] == end[last - before]
    ends = np.flatnonzero(found)[-_MOST_PLACES:] + (few - 1)
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
