"""What graphs will take is known before KV memory is sized."""

from __future__ import annotations

from src.compile.graphs import GraphShape, PaddingLadder
from src.engine.execution.graphs import trial_bytes
from tests.support.fake_capture import FakeCapture

# Bytes that are left after so many captures.
FREE = {0: 10_000, 1: 6_000, 2: 5_000, 3: 4_900, 4: 4_870}


def taken(ladder: PaddingLadder) -> tuple[int, list[GraphShape], int]:
    backend = FakeCapture(FREE.__getitem__)
    captured = []

    def capture(shape: GraphShape) -> None:
        backend.begin_series()
        backend.begin()
        backend.end()
        captured.append(shape)

    total = trial_bytes(backend, ladder.shapes, capture)
    # What runs before captures took is not what they take, and nothing of the trial is left.
    assert backend.releases > len(captured)
    assert backend.starts == 1
    return total, captured, len(ladder.shapes)


def test_the_largest_of_each_kind_and_what_every_other_one_adds() -> None:
    # Mixed: 16, 24, 32. Decode: 1, 2, 4, 8.
    total, captured, count = taken(PaddingLadder(8, 32))
    assert count == 7
    assert captured == [
        GraphShape("mixed", 32),
        GraphShape("decode", 8),
        GraphShape("mixed", 24),
        GraphShape("decode", 4),
    ]
    assert total == 5_000 + 2 * 100 + 3 * 30


def test_a_kind_of_one_shape_or_none() -> None:
    total, captured, _ = taken(PaddingLadder(1, 0))
    assert captured == [GraphShape("decode", 1)]
    assert total == 4_000
    assert taken(PaddingLadder(0, 0))[0] == 0


def test_memory_that_others_gave_back_meanwhile_is_not_taken() -> None:
    backend = FakeCapture(lambda count: 1_000 + 50 * count)
    shapes = PaddingLadder(4, 0).shapes

    def capture(shape: GraphShape) -> None:
        backend.begin()
        backend.end()

    assert trial_bytes(backend, shapes, capture) == 0
