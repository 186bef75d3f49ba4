"""Drafters whose guesses are known beforehand: text that goes on, and texts that were heard."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from src.core.step_message import DeviceRequest
from src.engine.speculation import Guess


class Continuing:
    """Guesses what a text says next, also behind the place where a request ends.

    Parameters
    ----------
    text
        Prompt and output of a run that nothing ends.

    Attributes
    ----------
    begins
        Whether it guesses for a row of so many tokens. Elsewhere it has no idea.
    asked
        (tokens of the row, most guesses) of each call for a row that says this text.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text = np.array(text, np.int32)
        self.begins: Callable[[int], bool] = lambda known: True
        self.asked: list[tuple[int, int]] = []

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        known = len(tokens)
        if not np.array_equal(self._text[:known], tokens):
            return None
        self.asked.append((known, most))
        if not self.begins(known):
            return None
        return Guess(self._text[known : known + most].tolist(), 1)


class Hearing:
    """Guesses what ended requests have said, spoils some of it, and invents the rest.

    Parameters
    ----------
    spoils
        The part of guesses that have wrong tokens.
    vocab_size
        Invented tokens are below it.
    """

    reads_texts = True

    def __init__(self, seed: int, *, spoils: float = 0.3, vocab_size: int = 320) -> None:
        self._random = random.Random(seed)
        self._spoils = spoils
        self._vocab_size = vocab_size
        self._texts: list[np.ndarray] = []

    def install(self, row: int, request: DeviceRequest) -> None:
        """See `Follower`."""

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """See `Follower`."""
        self._texts.append(tokens.copy())

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        source, known = self._random, len(tokens)
        width = source.randint(0, most)
        right = next(
            (
                text[known:].tolist()
                for text in reversed(self._texts)
                if len(text) > known and np.array_equal(text[:known], tokens)
            ),
            [],
        )
        guessed = [*right, *(source.randrange(self._vocab_size) for _ in range(width))][:width]
        if source.random() < self._spoils:
            guessed = [
                source.randrange(self._vocab_size) if source.random() < 0.4 else token_id
                for token_id in guessed
            ]
        return Guess(guessed, 1)
