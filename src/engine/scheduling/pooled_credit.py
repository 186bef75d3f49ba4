"""How many tokens of pooled requests a step gets beside rows that decode."""

from __future__ import annotations


class PooledCredit:
    """Saves up what pooled requests may have of each step, so that they get it in few steps.

    A step with a prompt costs more than one that only decodes, however short the prompt is. So a
    flood of texts gets nothing of most steps and many tokens of one. A few tokens, as of a query,
    get in at once while there is enough credit for all who ask.

    Parameters
    ----------
    most
        The most tokens of one step.
    steps
        Steps that decode until as many have been saved up. With 1 each step gets the most.
    """

    __slots__ = ("_most", "_saved", "_steps")

    def __init__(self, most: int, steps: int) -> None:
        self._most = most
        self._steps = steps
        # In parts of a token, ``steps`` to each. None: all that may be saved.
        self._saved: int | None = None

    def most(self, decoding: int) -> int:
        """The most tokens of a step in which so many rows decode."""
        return max(self._most, decoding // 4)

    def grant(self, decoding: int, wanted: int) -> int:
        """Tokens for this step: all that are saved, or 0 while those are too few.

        Parameters
        ----------
        decoding
            Rows that decode, at least one.
        wanted
            Tokens of all pooled requests that are not computed yet.
        """
        most = self.most(decoding)
        full = most * self._steps
        self._saved = full if self._saved is None else min(self._saved + most, full)
        tokens = self._saved // self._steps
        return tokens if tokens >= min(most, wanted) else 0

    def spend(self, tokens: int) -> None:
        """Take off what the step got."""
        assert self._saved is not None
        self._saved -= tokens * self._steps

    def fill(self) -> None:
        """Save all that may be saved: no row decodes."""
        self._saved = None
