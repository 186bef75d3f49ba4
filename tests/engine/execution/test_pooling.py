"""Sums of hidden states over the steps in which they are computed."""

from __future__ import annotations

import random

import pytest
import torch

from src.core.plan import RowResult, RowStep, StepPlan, StepResult
from src.core.request import Pooling
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.execution.pooling import (
    GROUP,
    Piece,
    RowPooling,
    Vectors,
    add_in_order,
    in_one_copy,
)


@pytest.mark.parametrize("length", [1, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP, 333])
def test_a_sum_in_order_has_the_same_bits_in_any_pieces(length: int) -> None:
    torch.manual_seed(length)
    values = torch.randn(length, 48) * torch.logspace(-4, 4, length)[:, None]
    want = torch.zeros(48)
    for begin in range(0, length, GROUP):
        part = torch.zeros(48)
        for value in values[begin : begin + GROUP]:
            part += value
        want += part
    source = random.Random(length)
    for longest in (1, 2, 7, GROUP, 100, length):
        total, group, start = torch.zeros(48), torch.zeros(48), 0
        while start < length:
            count = min(source.randint(1, longest), length - start)
            add_in_order(total, group, start, values[start : start + count])
            start += count
        assert torch.equal(total + group, want), longest
    torch.testing.assert_close(want.double(), values.double().sum(0), rtol=1e-4, atol=0.1)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("kind", ["first", "mean", "last"])
def test_the_first_tokens_are_left_out_in_any_pieces(kind: Pooling, is_deterministic: bool) -> None:
    """Two rows beside each other, whose tokens come in other pieces for each request."""
    torch.manual_seed(0)
    source = random.Random(1)
    owners: list[DeviceRequest | None] = [None, None]
    pooling = RowPooling(owners, 24, torch.device("cpu"), deterministic=is_deterministic)
    states = [torch.randn(97, 24), torch.randn(80, 24)]
    made: list[bytes] = []
    for unpooled in (0, 1, GROUP, 40, 79, 40):
        for row in range(2):
            owners[row] = DeviceRequest(
                key=row,
                prompt_len=len(states[row]),
                params=SamplingParams(),
                task="embed",
                pooling=kind,
                num_unpooled=unpooled,
            )
        starts, got = [0, 0], {}
        while len(got) < 2:
            steps: list[RowStep] = []
            for row, start in enumerate(starts):
                left = len(states[row]) - start
                if count := min(left, source.choice((1, 3, 20, 50))):
                    ends = count == left
                    steps.append(RowStep(row, 0, start, count, False, pools=ends))
                    starts[row] += count
            hidden = torch.cat([states[s.row][s.start : s.start + s.num_tokens] for s in steps])
            if (vectors := pooling.pool(StepPlan(0, [], [], steps), hidden)) is not None:
                got |= dict(zip(vectors.rows, vectors.values, strict=True))
        for row, vector in sorted(got.items()):
            rest = states[row][unpooled:]
            want = {"first": rest[0], "mean": rest.mean(0), "last": rest[-1]}[kind]
            torch.testing.assert_close(vector, want)
            if unpooled == 40:
                made.append(vector.numpy().tobytes())
    assert not is_deterministic or made[:2] == made[2:]


def test_tensors_of_several_shapes_are_copied_in_one_call() -> None:
    values = [torch.randn(3), torch.randn(2, 3), torch.randn(1)]
    calls: list[torch.Tensor] = []

    def copy(flat: torch.Tensor) -> torch.Tensor:
        calls.append(flat)
        return flat.clone()

    for made, given in zip(in_one_copy(values, copy), values, strict=True):
        assert torch.equal(made, given)
    assert [len(flat) for flat in calls] == [10]


def test_results_of_each_dtype_are_copied_in_one_call_and_keep_their_places() -> None:
    values = [
        torch.randn(3),
        torch.randn(2, 3).bfloat16(),
        torch.randn(1),
        torch.randn(4, 3).bfloat16(),
    ]
    calls: list[torch.dtype] = []

    def copy(flat: torch.Tensor) -> torch.Tensor:
        calls.append(flat.dtype)
        return flat.clone()

    pieces = [None if value.ndim == 1 else Piece(0, True) for value in values]
    made = Vectors(range(4), values, pieces, {}).copied(copy).values
    for one, other in zip(made, values, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert calls == [torch.float32, torch.bfloat16]


def test_hidden_states_of_tokens_are_given_in_float32() -> None:
    piece = torch.randn(2, 3).bfloat16()
    step = StepResult(0, [RowResult(1, 1, [])])
    (row,) = Vectors([1], [piece], [Piece(0, True)], {}).added_to(step).rows
    assert row.vector is not None
    assert memoryview(row.vector).cast("f").tolist() == piece.float().flatten().tolist()


def test_a_row_that_begins_again_forgets_the_pieces_before() -> None:
    known: dict[int, list[bytes]] = {}

    def step(start: int, ends: bool, *numbers: float) -> bytes | None:
        value, piece = torch.tensor(numbers)[:, None], Piece(start, ends)
        result = StepResult(0, [RowResult(2, 1, [])])
        (row,) = Vectors([2], [value], [piece], known).added_to(result).rows
        return row.vector

    assert step(0, False, 1.0, 2.0) is None
    # Preempted: its tokens are computed anew.
    assert step(0, False, 3.0) is None
    assert step(1, False, 4.0, 5.0) is None
    whole = step(3, True, 6.0)
    assert whole is not None
    assert memoryview(whole).cast("f").tolist() == [3.0, 4.0, 5.0, 6.0]
    assert not known
    # The first step of the row has failed, and so will its request.
    assert step(5, False, 1.0) is None
