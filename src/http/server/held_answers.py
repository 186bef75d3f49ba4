"""Answers that are large until their readers have taken them: how much all of them may hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from src.core.errors import QueueFullError


class HeldAnswers:
    """Counts the bytes of answers, from when they are asked for until they are sent.

    A reader may take as long as it likes over an answer, as long as it takes some of it now and
    then. So their number alone bounds nothing.
    """

    def __init__(self) -> None:
        # Of each owner; none that has nothing.
        self._held: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Bytes of all answers."""
        return sum(self._held.values())

    @contextlib.contextmanager
    def holding(self, size: int, owner: str, most: int) -> Iterator[None]:
        """Count an answer of ``size`` bytes within the context.

        One answer is let in whatever its size. Beyond that all take ``most`` at the most, and an
        owner leaves as much room to the others as it takes, where owners are told apart: see
        ``WaitingQueue.check_room`` for the rule.

        Raises
        ------
        QueueFullError
            There is no room for it now.
        """
        held, own = self.size, self._held.get(owner, 0)
        if held and held + size > most:
            raise QueueFullError(
                f"answers of {held} bytes wait for their readers, with {size} more they would "
                f"exceed {most} (http.max_held_vector_bytes)",
                code="answers_full",
            )
        if owner and own and own + size > most - held - size:
            raise QueueFullError(
                f"answers of {own} bytes wait for readers with this key, and of {held} for all: "
                f"one key has to leave as much room to the others as it takes, of {most} bytes "
                "(http.max_held_vector_bytes)",
                code="answers_full",
            )
        self._held[owner] = own + size
        try:
            yield
        finally:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]

    async def close(self) -> None:
        """Nothing is to be done: each answer ends with its request."""
