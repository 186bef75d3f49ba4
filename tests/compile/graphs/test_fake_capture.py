"""The fake is only worth something if it refuses what a GPU would refuse."""

from __future__ import annotations

import pytest
import torch

from tests.support.fake_capture import CaptureError, FakeCapture


def test_a_replay_computes_again_from_what_its_inputs_hold_now() -> None:
    backend, given, state = FakeCapture(), torch.tensor([1.0, 2.0]), torch.zeros(2)
    backend.begin()
    doubled = given * 2
    state[1:].add_(doubled[:1])
    captured = backend.end()
    state.zero_()
    given.copy_(torch.tensor([5.0, 7.0]))
    captured.replay()
    assert doubled.tolist() == [10.0, 14.0]
    assert state.tolist() == [0.0, 10.0]


def test_what_python_computed_is_baked_in() -> None:
    backend, given, factor = FakeCapture(), torch.ones(1), [3]
    backend.begin()
    result = given * factor[0]
    captured = backend.end()
    factor[0] = 4
    captured.replay()
    assert result.tolist() == [3.0]


def test_a_capture_that_looks_at_a_value_fails() -> None:
    backend = FakeCapture()
    backend.begin()
    with pytest.raises(CaptureError, match="waits"):
        torch.ones(1).item()
    backend.abandon()
    assert torch.ones(1).item() == 1.0


def test_an_input_that_moves_is_found() -> None:
    backend, given = FakeCapture(), torch.ones(2)
    backend.begin()
    given + 1
    captured = backend.end()
    given.set_(torch.zeros(2))
    with pytest.raises(CaptureError, match="moved"):
        captured.replay()


def test_other_captures_lose_what_they_had() -> None:
    backend, given = FakeCapture(), torch.ones(2)
    results = []
    for _ in range(2):
        backend.begin_series()
        backend.begin()
        results.append(given + 1)
        backend.end()
    backend.captures[0].replay()
    assert results[0].tolist() == [2.0, 2.0]
    backend.captures[1].replay()
    assert results[0].isnan().all()


def test_a_series_keeps_its_order() -> None:
    backend, given = FakeCapture(), torch.ones(1)
    backend.begin_series()
    backend.begin()
    between = given + 1
    backend.end()
    backend.begin()
    last = between * 10
    backend.end()
    given.fill_(4.0)
    first, second = backend.captures
    first.replay()
    second.replay()
    assert last.tolist() == [50.0]
    with pytest.raises(CaptureError, match="order"):
        second.replay()
