"""What requests leave unread is read before others get it, or others begin behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from src.core.plan import RowInstall
from src.engine.drafters.reading import Reading
from src.engine.drafters.source import DraftPlace
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler, SamplingState
from src.models import load_model
from tests.engine.drafters.test_eagle3 import CPU, GREEDY, Bench, loaded, plain
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import device_request, make_eagle3

# Behind each of these the model has said 44.
TEXT = [5, 9, 60, 7, 33, 8, 90, 4, 77, 61, 12, 18, 19]
Said = Callable[[list[int], int, int], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=7)


class Sharing:
    """A head, and hidden states [T, 256] that any text has by position and token."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self.tensors = make_eagle3(directory)
        target, head = loaded(checkpoint, directory)
        self.embedding = self.tensors["embed_tokens.weight"]
        self.bench = Bench(head)
        self.width = (1 + len(target.options.taps)) * 64
        self.read: list[int] = []
        run = self.bench.drafter._run

        def noted(steps: Any, feature: Tensor) -> Any:
            self.read.append(len(feature))
            return run(steps, feature)

        self.bench.drafter._run = noted

    def hidden(self, tokens: list[int]) -> Tensor:
        return torch.stack(
            [
                torch.randn(self.width, generator=torch.Generator().manual_seed(99 * at + token))
                for at, token in enumerate(tokens)
            ]
        )

    def said(self, tokens: list[int], count: int, first: int = 0) -> list[int]:
        """What the head says behind a text, if it sees it from a position on."""
        features = functional.linear(self.hidden(tokens[:-1])[:, 64:], self.tensors["fc.weight"])
        return plain(self.tensors, self.embedding, features[first:], tokens[first:], count)

    def install(self, row: int, tokens: list[int], blocks: list[int]) -> None:
        bench = self.bench
        bench.rows.install(RowInstall(row, 1, row, tokens, len(tokens), [blocks]))
        bench.sampler.state.install(row, device_request(row, len(tokens), GREEDY), 1)
        bench.drafter.vacate(row)

    def compute(self, row: int, start: int, tokens: list[int]) -> None:
        """A step of the model: positions from ``start`` to the end of a text, and it says 44."""
        with torch.inference_mode():
            self.bench.drafter.compute([], {})
            hidden = self.hidden(tokens)[start:]
            self.bench.drafter.keep_all({row: (0, start, len(tokens) - start)}, hidden)
        self.bench.rows.tokens[row, len(tokens)] = 44

    def finish(self, *going_on: int) -> None:
        self.bench.drafter.finish(lambda row: row not in going_on)


@pytest.fixture
def sharing(checkpoint: Path, tmp_path: Path) -> Sharing:
    return Sharing(checkpoint, tmp_path)


def test_the_last_chunk_of_a_request_is_read_before_others_get_it(sharing: Sharing) -> None:
    sharing.install(0, TEXT, [0, 1, 2, 3])
    sharing.compute(0, 0, TEXT)
    # It has ended with its first token. Of its last block nobody hears.
    sharing.finish(1, 2)
    assert sharing.read == [12]
    sharing.install(1, TEXT, [0, 1, 2, 9, 10])
    sharing.compute(1, 12, TEXT)
    found = sharing.bench.step((1, 13, 1), r1=4)
    assert found == {1: sharing.said([*TEXT, 44], 4)}
    assert sharing.bench.drafter._reading.first == {}


def test_a_row_that_goes_on_is_read_as_ever(sharing: Sharing) -> None:
    sharing.install(0, TEXT, [0, 1, 2, 3, 4])
    sharing.compute(0, 0, TEXT)
    sharing.finish(0)
    assert sharing.read == []
    # One that is in no step for a while goes on later.
    sharing.finish()
    sharing.finish()
    assert sharing.read == [12]
    assert sharing.bench.step((0, 13, 1), r0=4) == {0: sharing.said([*TEXT, 44], 4)}
    assert sharing.read[:2] == [12, 1]


def test_where_something_was_skipped_a_row_begins_behind_it(sharing: Sharing) -> None:
    """The head rests while a text is computed, and is asked for a later part of it."""
    sharing.install(0, TEXT, list(range(8)))
    sharing.bench.drafter.rest()
    text = [*TEXT, 44, 44, 44]
    sharing.bench.rows.tokens[0, : len(text)] = torch.tensor(text, dtype=torch.int32)
    # Positions 14 to 18, of which those of a block that was begun in the rest are of no use.
    more = [*text, 21, 22, 23]
    sharing.bench.rows.tokens[0, : len(more)] = torch.tensor(more, dtype=torch.int32)
    sharing.compute(0, 14, more)
    found = sharing.bench.step((0, 19, 1), r0=4)
    assert found == {0: sharing.said([*more, 44], 4, first=16)}
    assert sharing.bench.drafter._reading.first == {0: 16}
    # Its blocks from there on serve others, which know that those before do not.
    sharing.finish()
    sharing.install(1, [*more, 44, 70], [0, 1, 2, 3, 4, 9])
    sharing.compute(1, 20, [*more, 44, 70])
    found = sharing.bench.step((1, 22, 1), r1=3)
    assert found == {}
    sharing.install(1, [*more, 70], [0, 1, 2, 3, 11, 9])
    sharing.compute(1, 16, [*more, 70])
    assert sharing.bench.step((1, 20, 1), r1=3) == {1: sharing.said([*more, 70, 44], 3, first=16)}


def test_positions_that_are_computed_again_are_read_once_and_none_is_left_out(
    sharing: Sharing,
) -> None:
    """As where recurrent states lacked them."""
    sharing.install(0, TEXT, list(range(8)))
    hidden = sharing.hidden(TEXT)
    drafter = sharing.bench.drafter
    with torch.inference_mode():
        drafter.keep_all({0: (0, 0, 7)}, hidden[:7])
        drafter.keep_all({0: (0, 4, 9)}, hidden[4:])
    sharing.bench.rows.tokens[0, 13] = 44
    assert sharing.bench.step((0, 13, 1), r0=3) == {0: sharing.said([*TEXT, 44], 3)}
    assert sharing.read[0] == 13


@pytest.fixture(scope="module")
def place(checkpoint: Path) -> DraftPlace:
    layers = load_model(checkpoint).kv_cache_spec()[:1]
    cache = allocate_kv_cache(layers, KVCachePlan(4, 40, bytes_per_block=1), CPU)
    rows = RowState(max_num_seqs=3, max_model_len=64, block_size=4, device=CPU)
    for row in range(3):
        blocks = [*range(3), *range(10 * row + 5, 10 * row + 9)]
        rows.install(RowInstall(row, 1, row, [5], 1, [blocks]))
    return DraftPlace(rows, Sampler(SamplingState(3, 320, CPU)), cache)


def test_blocks_are_known_by_how_many_of_their_positions_were_read(place: DraftPlace) -> None:
    reading = Reading(place)
    reading.write(0, 0, 14)
    assert reading.begin(0, 0) == 0
    reading.read(0, 0, 6)
    assert [reading.num_read(1, end) for end in (4, 6, 7, 12)] == [4, 6, 6, 6]
    # Another row with the same first three blocks.
    assert reading.begin(1, 6) == 6
    assert reading.first == {}
    # Of its second block one position that it has behind it was read by nobody.
    assert reading.begin(2, 7) == 8
    assert reading.first == {2: 8}
    reading.vacate(2)
    assert reading.begin(2, 9) == 12
    assert reading.first == {2: 12}
    reading.read(0, 6, 14)
    reading.vacate(2)
    assert reading.begin(2, 12) == 12
    assert reading.first == {}
    # A block is another text's as soon as its first position is computed again.
    reading.write(0, 8, 9)
    assert reading.num_read(1, 12) == 8
    reading.vacate(1)
    assert reading.begin(1, 12) == 12
    assert reading.first == {1: 12}
    reading.forget()
    assert reading.num_read(0, 3) == 0


def test_less_that_is_read_again_is_no_loss(place: DraftPlace) -> None:
    reading = Reading(place)
    reading.begin(0, 0)
    reading.read(0, 0, 12)
    reading.vacate(1)
    assert reading.begin(1, 11) == 11
    reading.read(1, 11, 12)
    reading.read(1, 9, 10)
    assert reading.num_read(2, 12) == 12


def test_a_whole_block_is_read_in_the_next_step(sharing: Sharing) -> None:
    """Another request may begin behind it then, though few positions are unread."""
    sharing.install(0, TEXT[:7], list(range(8)))
    sharing.compute(0, 0, TEXT[:7])
    sharing.bench.step((0, 7, 1))
    assert sharing.read == [7]
    sharing.compute(0, 7, [*TEXT[:7], 44])
    sharing.bench.step((0, 8, 1))
    assert sharing.read == [7, 1]
    sharing.compute(0, 8, [*TEXT[:7], 44, 44])
    sharing.bench.step((0, 9, 1))
    assert sharing.read == [7, 1]
