"""Guesses drawn from a drafter's logits as the model draws its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from src.engine.devices.transfer import upload
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import SampleBatch, Sampler


class GuessWriter:
    """Draws the guesses of one step, and writes them into the rows while it lasts.

    A guess is drawn from the drafter's logits with the parameters of its row and the noise of its
    position, which the model's own token is drawn with too. So a greedy row gets the likeliest
    token, and where the two distributions are equal the tokens are. For distributions with the
    total variation distance TV both draw the same with a chance of at least (1 - TV) / (1 + TV)
    (arXiv 2408.07978). What penalties count is read from the rows, hence the writing.

    Use it as a context: at its end the rows hold their own tokens alone.

    Parameters
    ----------
    known
        Row -> its number of tokens.

    Attributes
    ----------
    guesses
        Row -> its guesses so far.
    """

    def __init__(self, rows: RowState, sampler: Sampler, known: dict[int, int]) -> None:
        self._rows, self._sampler, self._known = rows, sampler, known
        self._vocab_size = sampler.state.vocab_size
        self.guesses: dict[int, list[int]] = {row: [] for row in known}

    def __enter__(self) -> GuessWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for row, guesses in self.guesses.items():
            start = self._known[row]
            self._rows.tokens[row, start : start + len(guesses)] = POISON

    def draw(self, rows: Sequence[int], logits: Tensor) -> list[int]:
        """Guess one more token of each row; returns the rows that have got one.

        Parameters
        ----------
        logits
            [B, V'] float32 of the drafter's vocabulary, one for each row; may be overwritten.
        """
        logits = fitted(logits, self._vocab_size)
        positions = [self._known[row] + len(self.guesses[row]) for row in rows]
        batch = SampleBatch(rows, positions, guesses=True)
        rows_s = upload(rows, torch.int64, logits.device)
        positions_s = upload(positions, torch.int64, logits.device)
        if self._sampler.only_draws(batch):
            token_ids_s = self._sampler.draw(logits, rows_s, positions_s)
        else:
            token_ids_s = self._sampler.sample(logits, batch, self._rows.tokens).token_ids
        going_on = []
        for row, token_id in zip(rows, token_ids_s.tolist(), strict=True):
            # Negative where nothing may be chosen.
            if token_id >= 0:
                self.guesses[row].append(token_id)
                going_on.append(row)
        if len(going_on) == len(rows):
            self._rows.scatter_tokens(rows_s, positions_s, token_ids_s)
        else:
            for row in going_on:
                place = self._known[row] + len(self.guesses[row]) - 1
                self._rows.tokens[row, place] = self.guesses[row][-1]
        return going_on


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [B, V'] of a vocabulary that is padded to another size, as [B, vocab_size]."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[:, :vocab_size].contiguous() if missing else logits
