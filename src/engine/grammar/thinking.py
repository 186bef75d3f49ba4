"""The thinking of rows that have a budget for it, ended when that is spent.

It is followed by the thread that follows grammars, and a token that must come is a mask like any
other, but that it holds whatever else a request wants. Until the budget can be spent, and once the
thinking has ended, no step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from src.core.plan import RowFailure
from src.core.step_message import DeviceRequest
from src.engine.grammar.masks import MaskTable
from src.text.thinking import ThinkingGuide


class _Thought:
    """Where the thinking of one output stands. Of the grammar thread, but for ``is_over``.

    Attributes
    ----------
    is_over
        Whether nobody has to look at it any more. Who learns it late waits once more for nothing.
    is_lost
        Whether tokens were missed, so that nobody knows where it stands.
    """

    __slots__ = ("_guide", "_has_grammar", "_tracker", "is_lost", "is_over", "key")

    def __init__(self, key: int, guide: ThinkingGuide, *, has_grammar: bool) -> None:
        self.key = key
        self._has_grammar = has_grammar
        self._guide = guide
        self._tracker = guide.begin()
        self.is_over = False
        self.is_lost = False

    def take(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these."""
        self._guide.follow(self._tracker, token_ids)
        self.is_over = self._tracker.is_over

    def forced(self) -> int | None:
        """The only token that may come next, if there is one."""
        return self._guide.forced(self._tracker, completes_characters=self._has_grammar)

    def forced_behind(self, drafts: Sequence[int]) -> list[int | None]:
        """The same behind each of these drafts."""
        tracker, found = self._tracker.copy(), []
        for token_id in drafts:
            self._guide.follow(tracker, (token_id,))
            found.append(self._guide.forced(tracker, completes_characters=self._has_grammar))
        return found

    def drafts(self, guessed: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` drafts: those guessed, up to where something else must come, and that."""
        tracker, drafts = self._tracker.copy(), list[int]()
        is_guessed = True
        while len(drafts) < most:
            own = guessed[len(drafts)] if is_guessed and len(drafts) < len(guessed) else None
            must = self._guide.forced(tracker, completes_characters=self._has_grammar)
            token_id = own if must is None else must
            if token_id is None:
                break
            is_guessed = token_id == own
            drafts.append(token_id)
            self._guide.follow(tracker, (token_id,))
        return drafts


class Change(NamedTuple):
    """A row got a request with a thinking budget, or lost it; the tokens are its output so far."""

    row: int
    thought: _Thought | None
    token_ids: list[int]


class RowThinking:
    """The rows whose thinking has a budget.

    Parameters
    ----------
    table
        Where the masks of rows are left.
    """

    def __init__(self, table: MaskTable) -> None:
        self._table = table
        # Handle -> what ends the thinking of a request that has not ended; added to by any thread.
        self._held: dict[int, ThinkingGuide] = {}
        # Of the device thread: row -> its thinking, and the first position at which that may end;
        # and what the grammar thread has not been told yet.
        self._rows: dict[int, tuple[_Thought, int]] = {}
        self._changes: list[Change] = []
        # Of the grammar thread: row -> its thinking.
        self._thoughts: dict[int, _Thought] = {}

    def hold(self, handle: int, guide: ThinkingGuide) -> None:
        """Store the guide under ``handle``, the request's key. Thread-safe."""
        self._held[handle] = guide

    @property
    def num_held(self) -> int:
        """Requests for which something is kept."""
        return len(self._held)

    # On the device thread.

    def install(self, row: int, request: DeviceRequest, output_token_ids: list[int]) -> None:
        """Give ``row``, which is vacant, to a request that has this output so far.

        Raises
        ------
        LookupError
            Nothing is held by the handle that the request names.
        """
        handle = request.thinking
        guide = None if handle is None else self._held.get(handle)
        if guide is None:
            raise LookupError(f"nothing that ends thinking is held by the handle {handle}")
        thought = _Thought(request.key, guide, has_grammar=request.grammar is not None)
        self._rows[row] = thought, request.prompt_len + guide.budget
        self._changes.append(Change(row, thought, output_token_ids))

    def vacate(self, row: int) -> None:
        """Nobody in this row has a budget."""
        if self._rows.pop(row, None) is not None:
            self._changes.append(Change(row, None, []))

    def forget(self, key: int) -> None:
        """The request has ended."""
        if self._held.pop(key, None) is not None:
            for row in [row for row, (thought, _) in self._rows.items() if thought.key == key]:
                self.vacate(row)

    def take_changes(self) -> list[Change]:
        """What has changed since the last time."""
        changes, self._changes = self._changes, []
        return changes

    def follows(self, rows: Sequence[int]) -> bool:
        """Whether what these rows sample matters."""
        return bool(self._rows) and any(
            (known := self._rows.get(row)) is not None and not known[0].is_over for row in rows
        )

    def may_force(self, rows: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether one of these rows may have no choice at its position."""
        if not self._rows:
            return False
        for row, position in zip(rows, positions, strict=True):
            known = self._rows.get(row)
            if known is not None and position >= known[1] and not known[0].is_over:
                return True
        return False

    # On the grammar thread.

    def apply(self, changes: Sequence[Change]) -> None:
        """Rows have changed hands."""
        for row, thought, token_ids in changes:
            self._thoughts.pop(row, None)
            if thought is not None:
                self._thoughts[row] = thought
                thought.take(token_ids)

    def drafts(self, row: int, guessed: Sequence[int], most: int) -> Sequence[int]:
        """The drafts that a row's thinking leaves of those guessed, and what it forces."""
        thought = self._thoughts.get(row)
        if thought is None or thought.is_over:
            return guessed
        return [] if thought.is_lost else thought.drafts(guessed, most)

    def forced_behind(self, row: int, drafts: Sequence[int]) -> list[int | None]:
        """Behind each of a row's drafts, the only token that may come there, if there is one."""
        thought = self._thoughts.get(row)
        if thought is None or thought.is_over or thought.is_lost:
            return [None] * len(drafts)
        return thought.forced_behind(drafts)

    def take(self, rows: Sequence[int], token_ids: np.ndarray) -> None:
        """The rows have sampled these tokens, [S] int64; negative where there was none."""
        if not self._thoughts:
            return
        for entry, row in enumerate(rows):
            thought = self._thoughts.get(row)
            if thought is not None and not thought.is_over:
                token_id = int(token_ids[entry])
                if token_id >= 0:
                    thought.take((token_id,))

    def lose(self, rows: Sequence[int]) -> None:
        """What these rows have sampled is not known."""
        for row in rows:
            if row in self._thoughts:
                self._thoughts[row].is_lost = True

    def force(self, rows: Sequence[int]) -> tuple[list[int], list[RowFailure]]:
        """Leave the masks of those rows that have one token to choose.

        Returns which of the rows they are, and of whom it is not known whether they have a choice.
        """
        forced: list[int] = []
        failures: list[RowFailure] = []
        if not self._thoughts:
            return forced, failures
        for entry, row in enumerate(rows):
            thought = self._thoughts.get(row)
            if thought is None or thought.is_over:
                continue
            if thought.is_lost:
                reason = "the thinking could not be followed"
                failures.append(RowFailure(thought.key, reason, is_own=False))
            elif (token_id := thought.forced()) is not None:
                self._table.force(row, token_id)
                forced.append(entry)
        return forced, failures
