"""A device's drafter that knows the answers, and gives right, wrong and random guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from src.engine import startup
from src.engine.execution.graphs import planning
from src.engine.speculation import Widths, on_device
from src.engine.speculation.on_device import Bounds
from tests.support.fake_capture import FakeCapture

ROOM = 128


class AdversaryOnDevice(Bounds):
    """Guesses from known answers in operations of torch, so that it can be captured.

    Attributes
    ----------
    texts
        [N, 128] int32: whole texts, prompt and output, and -1 behind them.
    guessed
        [N, 128] int32: what is guessed at each of their positions, wrong at some.
    widths
        [N, 128] int64: how many drafts are given from each position on, at most.
    """

    texts: Tensor
    guessed: Tensor
    widths: Tensor

    def proposing(self, most: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        places = torch.arange(most)

        def propose(tokens: Tensor, rows: Tensor, lengths: Tensor, wanted: Tensor) -> Tensor:
            room = min(ROOM, tokens.shape[1])
            mine = torch.arange(room) < lengths[:, None]
            alike = tokens[rows, :room][:, None] == self.texts[None, :, :room]
            is_known = (alike | ~mine[:, None]).all(2)
            of = is_known.int().argmax(1)
            # Of a row that is not known the guesses are those of another text, as good as random.
            known = lengths.long()
            at = (known[:, None] + places).clamp(max=ROOM - 1)
            width = torch.minimum(wanted.long(), self.widths[of, known.clamp(max=ROOM - 1)])
            drafts = self.guessed[of[:, None], at]
            drafts = drafts.masked_fill(places >= width[:, None], -1)
            return torch.cat((width[:, None] * 3, width[:, None], drafts), 1).int()

        return propose


def adversary(texts: Sequence[list[int]], seed: int, most: int = 6) -> AdversaryOnDevice:
    """One that is wrong at three of ten positions."""
    made = AdversaryOnDevice(3, 24, "suffix", most)
    random = torch.Generator().manual_seed(seed)
    made.texts = torch.full((len(texts), ROOM), -1, dtype=torch.int32)
    for number, text in enumerate(texts):
        made.texts[number, : len(text)] = torch.tensor(text, dtype=torch.int32)
    shape = made.texts.shape
    spoilt = torch.rand(shape, generator=random) < 0.3
    others = torch.randint(320, shape, generator=random, dtype=torch.int32)
    made.guessed = torch.where(spoilt | (made.texts < 0), others, made.texts)
    made.widths = torch.randint(most + 1, shape, generator=random)
    return made


def drafting(monkeypatch: pytest.MonkeyPatch, bounds: Bounds) -> None:
    """Makes this device draft so, whatever that costs; and capture steps, if it may."""
    monkeypatch.setattr(startup, "choose_speculation", lambda *_, **__: bounds)
    monkeypatch.setattr(planning, "bounds_of", lambda *_: bounds)
    monkeypatch.setattr(startup, "bounds_of", lambda *_: bounds)
    monkeypatch.setattr(on_device, "Widths", lambda: Widths(always=True))
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
