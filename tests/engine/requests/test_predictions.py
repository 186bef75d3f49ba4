"""A prediction is tokenized once for all requests that share it, and cut to what they may need."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import pytest

from src.engine.requests.predictions import PredictedOutput
from src.engine.requests.text_work import TextWork

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Encoding:
    """A tokenizer of characters, which notes what it reads, and where."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[int] = set()

    def encode(self, text: str) -> list[int]:
        self.read.append(len(text))
        self.threads.add(threading.get_ident())
        return list(map(ord, text))


async def packed(shared: PredictedOutput, encoding: Encoding, most: int = 10) -> list[int]:
    work = TextWork()

    def refuse(ids: Sequence[int]) -> Sequence[int]:
        if max(ids) > 1000:
            raise ValueError("no such token")
        return ids

    try:
        return array("i", await shared.packed(most, "", work, encoding.encode, refuse)).tolist()
    finally:
        work.close()


async def test_a_text_is_read_once_and_no_further_than_an_output_may_need() -> None:
    encoding, shared = Encoding(), PredictedOutput("abc" * 1_000_000)
    found = await packed(shared, encoding)
    assert len(found) == 10 + 8192
    assert found[:4] == [97, 98, 99, 97]
    assert encoding.read == [16 * (10 + 8192)]
    assert threading.get_ident() not in encoding.threads
    assert await packed(shared, encoding) == found
    assert len(encoding.read) == 1


async def test_token_ids_are_cut_and_checked() -> None:
    encoding = Encoding()
    assert await packed(PredictedOutput([5, 6, 7]), encoding) == [5, 6, 7]
    assert await packed(PredictedOutput([]), encoding) == []
    assert len(await packed(PredictedOutput([5] * 100_000), encoding, most=1)) == 8193
    with pytest.raises(ValueError, match="no such token"):
        await packed(PredictedOutput([5, 2000]), encoding)
    assert encoding.read == []
