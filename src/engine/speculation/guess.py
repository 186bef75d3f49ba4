"""A drafter's answer."""

from __future__ import annotations

from typing import NamedTuple


class Guess(NamedTuple):
    """Guesses of a row's next tokens.

    Attributes
    ----------
    token_ids
        What comes next, in order.
    match
        How many tokens they are derived from: the longer, the likelier they hold.
    source
        Who guesses; how likely they hold is measured for each source by itself.
    """

    token_ids: list[int]
    match: int
    source: str = ""
