"""What is drawn with drafts, right, wrong and random ones, has the model's exact distribution."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from src import AsyncEngine, SamplingParams
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import config, speculating
from tests.support.checkpoints import load_reference, make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ALLOWED = (5, 9, 60)
PROMPT = [7, 40, 12, 33]
COUNT, LENGTH = 1500, 4


async def test_what_is_drawn_is_what_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=2)
    every = list(itertools.product(ALLOWED, repeat=LENGTH))
    exact = torch.zeros(len(every), dtype=torch.float64)
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, *text] for text in every])
        logits = load_reference(path)(ids).logits[:, len(PROMPT) - 1 : -1]
        chances = logits[..., list(ALLOWED)].double().log_softmax(-1)
        at = torch.tensor([[ALLOWED.index(token) for token in text] for text in every])
        exact = chances.gather(-1, at[..., None])[..., 0].sum(-1).exp()
    assert float(exact.sum()) == pytest.approx(1, abs=1e-6)
    # The adversary knows all texts, so that each of its guesses may be right.
    texts = [[*PROMPT, *text] for text in every]
    adversary = Adversary(texts, seed=2, spoils=0.5)
    changes = speculating(monkeypatch, adversary) | {"scheduler__max_num_seqs": 32}
    async with AsyncEngine.open(config(path, **changes)) as engine:
        results = await asyncio.gather(
            *(
                engine.generate(
                    PROMPT,
                    SamplingParams(
                        seed=seed,
                        allowed_token_ids=ALLOWED,
                        max_tokens=LENGTH,
                        ignore_eos=True,
                    ),
                )
                for seed in range(COUNT)
            )
        )
        drafted, accepted = engine.metrics.draft_counts
    assert 0.05 * drafted < accepted < drafted
    counted = Counter(tuple(result.token_ids) for result in results)
    found = torch.tensor([counted[text] for text in every], dtype=torch.float64)
    assert int(found.sum()) == COUNT
    # Pearson's statistic over cells that are expected five times or more; the others are one cell.
    expected = COUNT * exact
    often = expected >= 5
    pairs = [(found[often], expected[often])]
    if bool((~often).any()) and float(expected[~often].sum()) >= 5:
        pairs.append((found[~often].sum()[None], expected[~often].sum()[None]))
    cells = sum(len(each) for each, _ in pairs)
    statistic = sum(float(((a - b) ** 2 / b).sum()) for a, b in pairs)
    assert cells > 10
    # Mean cells - 1, variance twice that: a right one is beyond it once in some ten thousand.
    assert statistic < cells - 1 + 4 * (2 * (cells - 1)) ** 0.5
