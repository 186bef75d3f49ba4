"""Drafts of up to 64 tokens of a row, many more than take attention's path of one token."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src import AsyncEngine, SamplingParams
from src.engine import startup
from src.engine.speculation import Guess, Speculation, Widths
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import answer, ask, config, texts
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle
from tests.support.families import SHORT_SIGHTED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

# Windows that are shorter than the widest drafts; recurrent states, which keep few rows at once.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": SHORT_SIGHTED["gemma3"],
    "qwen3next": {},
}
LIMITS = (17, 40, 64)
# The last one has keys of several splits.
LENGTHS = (3, 17, 40, 250)
PARAMS = [
    SamplingParams(temperature=heat, seed=at, max_tokens=90, logprobs=2, ignore_eos=True)
    for at, heat in enumerate((0.0, 0.7, 1.0, 0.0))
]
SETTINGS: dict[str, Any] = {
    # A step samples as many positions as it may have rows: four rows may have 64 drafts each.
    "scheduler__max_num_seqs": 4 * 65,
    "scheduler__max_num_batched_tokens": 512,
    "cache__num_blocks": 1000,
}


class Noted(Widths):
    """Keeps how many drafts of each row were verified in each step, and how many were right."""

    def __init__(self) -> None:
        super().__init__(always=True)
        self.seen: list[tuple[int, int]] = []

    def verified(self, row: int, guess: Guess, accepted: int) -> None:
        self.seen.append((len(guess.token_ids), accepted))
        super().verified(row, guess, accepted)


class Widest(Adversary):
    """Every second guess is as wide as may be, by turns all right and wrong at its last token."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        turn = len(self.widths) % 4
        if turn % 2:
            return super().propose(row, tokens, most)
        guessed = self.right(tokens)[:most]
        if turn and guessed:
            guessed[-1] = (guessed[-1] + 1) % 320
        self.widths.append(len(guessed))
        return Guess(guessed, 1)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_widest_drafts_change_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_position_embeddings": 512} | FAMILIES[family]
    path = make_checkpoint(tmp_path, family, tokenizer=True, **changes)
    source = random.Random(5)
    asked = [
        ([source.randrange(3, 320) for _ in range(length)], params)
        for length, params in zip(LENGTHS, PARAMS, strict=True)
    ]
    async with AsyncEngine.open(config(path, **SETTINGS)) as engine:
        expected = await ask(engine, asked)
    for limit in LIMITS:
        widths = Noted()
        widest = Widest(texts(asked, expected), seed=limit)
        made = partial(Speculation, (widest,), widths=widths)
        monkeypatch.setattr(startup, "choose_speculation", lambda *_, made=made, **__: made)
        drafting = {
            "speculation__method": "suffix",
            "speculation__num_speculative_tokens": limit,
        }
        async with AsyncEngine.open(config(path, **SETTINGS, **drafting)) as engine:
            results = await ask(engine, asked)
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            assert_idle(engine)
        for at, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert answer(got) == answer(wanted), (limit, at)
        # A token and 17 drafts are the first that take another path of attention.
        assert max(right for _, right in widths.seen) >= 17
        assert min(limit, 18) <= max(drafts for drafts, _ in widths.seen) <= limit
        assert any(drafts > right for drafts, right in widths.seen)
