"""Look-ups on the device find what the host's look-up finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from src.engine.speculation.lookup import Lookup
from src.ops import look_up


def found_on_host(tokens: list[int], least: int, longest: int, most: int) -> list[int]:
    guess = Lookup(least=least, longest=longest).propose(0, np.array(tokens, np.int32), most)
    drafts = [] if guess is None else guess.token_ids
    match = 0 if guess is None else guess.match
    return [match, len(drafts), *drafts, *[-1] * (most - len(drafts))]


@pytest.mark.parametrize(("least", "longest"), [(1, 1), (1, 24), (3, 24), (2, 5), (6, 6), (9, 64)])
def test_it_finds_what_the_host_finds(least: int, longest: int) -> None:
    source = random.Random(least)
    texts = [
        [source.randrange(source.choice((1, 2, 3, 20))) for _ in range(length)]
        for length in [*range(70), 300, 600]
    ]
    # Long ends that stand in the text before, in many places or in few.
    texts += [part * times for part in texts[5:40:5] for times in (2, 3, 30)]
    most = 7
    tokens = torch.full((len(texts), max(map(len, texts)) + 1), -1, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    wanted = torch.arange(len(texts)) % most + 1
    found = look_up(
        tokens,
        torch.arange(len(texts)),
        torch.tensor([len(text) for text in texts], dtype=torch.int32),
        wanted.int(),
        least,
        longest,
        most,
    )
    for row, (text, count) in enumerate(zip(texts, wanted.tolist(), strict=True)):
        expected = found_on_host(text, least, longest, count) + [-1] * (most - count)
        assert found[row].tolist() == expected, (row, text)


def test_what_is_far_back_is_not_looked_for() -> None:
    text = [1, 2, 3, *range(100, 8290), 1, 2]
    tokens = torch.tensor([[*text, 300, 1, 2], [0, *text, 0, 0]], dtype=torch.int32)
    rows, one = torch.tensor([1, 0, 0]), torch.ones(3, dtype=torch.int32)
    lengths = torch.tensor([len(text) + 1, len(text), len(text) + 3], dtype=torch.int32)
    found = look_up(tokens, rows, lengths, one, 2, 24, 1).tolist()
    assert found[:2] == [found_on_host([0, *text], 2, 24, 1), found_on_host(text, 2, 24, 1)]
    assert [each[0] for each in found] == [0, 0, 2]


def test_a_row_that_wants_none_is_not_looked_at() -> None:
    tokens = torch.tensor([[5, 5, 5, 5, 5]], dtype=torch.int32)
    row = torch.tensor([0, 0])
    asked = torch.tensor([0, 2], dtype=torch.int32)
    lengths = torch.tensor([4, 4], dtype=torch.int32)
    assert look_up(tokens, row, lengths, asked, 1, 3, 2).tolist() == [[0, 0, -1, -1], [3, 1, 5, -1]]
