"""A drafter that knows the answers, and gives right, wrong and random guesses of every width."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from src.engine.speculation import Guess


class Adversary:
    """Guesses from known answers, and spoils some of them.

    Parameters
    ----------
    texts
        Whole texts, prompt and output. A row's tokens are the beginning of one of them, or nothing
        is known of the row, and the guesses are random.
    vocab_size
        Random guesses are below it.

    Attributes
    ----------
    widths
        Of all guesses so far.
    """

    def __init__(
        self, texts: Sequence[list[int]], seed: int, *, spoils: float = 0.3, vocab_size: int = 320
    ) -> None:
        self._texts = [np.array(text, np.int32) for text in texts]
        self._random = random.Random(seed)
        self._spoils = spoils
        self._vocab_size = vocab_size
        self.widths: list[int] = []

    def right(self, tokens: np.ndarray) -> list[int]:
        """All that follows a row's tokens, as far as it is known."""
        known = len(tokens)
        for text in self._texts:
            if len(text) >= known and np.array_equal(text[:known], tokens):
                return text[known:].tolist()
        return []

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        source = self._random
        width = source.randint(0, most)
        right = self.right(tokens)
        guessed = [*right, *(source.randrange(self._vocab_size) for _ in range(width))][:width]
        if source.random() < self._spoils:
            for place in range(width):
                if source.random() < 0.4:
                    guessed[place] = source.randrange(self._vocab_size)
        self.widths.append(len(guessed))
        return Guess(guessed, 1)
