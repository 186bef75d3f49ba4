"""What the tests of every op need of one beside its declaration: a new op gets an entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from src.ops import (
    ACCEPT_DRAFTS,
    CAUSAL_CONVOLUTION,
    DECODE_SCHEDULE,
    EXPERTS,
    FLOAT8_PRODUCT,
    GUMBEL_ARGMAX,
    LATENT_ATTENTION,
    LINEAR,
    LINEAR_RECURRENCE,
    LOOK_UP,
    LORA,
    MASS_THRESHOLD,
    PAGED_ATTENTION,
    ROTATE_AND_CACHE,
    Op,
)
from src.ops.declaration import Case
from src.ops.matrix import KINDS, Tiling
from tests.ops.comparison import (
    TOLERANCE,
    attention_matches,
    latent_matches,
    rotation_matches,
    states_match,
)
from tests.ops.drafts.comparison import accepted_alike

Comparison = Callable[[Op[..., Any], Callable[..., Any], tuple[Any, ...]], None]


@dataclass(frozen=True)
class OpTests:
    """What the tests of one op are told."""

    # Cases for `opcheck`: each with another dtype, size or layout, or with none of the rows.
    checked: tuple[Case, ...]
    # Two cases, of which the second has more to read and to compute.
    small: Case
    large: Case
    # Asserts that a kernel does to these arguments what the reference does.
    matches: Comparison
    # What serves on CUDA.
    on_cuda: str = "triton"


def _is_the_same(op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The same result, of an op that changes none of its arguments."""
    expected = op.reference(*args)
    torch.testing.assert_close(kernel(*args), expected, rtol=0, atol=0, equal_nan=True)


def _is_close(op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Sums are rounded once, and torch may sum bfloat16 in another order."""
    expected = op.reference(*args)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(kernel(*args), expected, rtol=tolerance, atol=tolerance)


def _experts_are_close(op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """As others, but where inputs are rounded to 8 bits.

    What the first product gives is an input of the second. Sums of another order round it to
    another bfloat16, and then it may be nearer to the next of its 127 steps: that is a step of one
    of a hundred inputs, for all outputs of a token.
    """
    number, tiling = KINDS[args[op.record.flat_parameters().index("down_kind")]]
    if tiling is Tiling.ROWS or number.bits > 8:
        _is_close(op, kernel, args)
        return
    expected, got = op.reference(*args), kernel(*args)
    tolerance = TOLERANCE[expected.dtype]
    wrong = (got - expected).abs() > tolerance * (1 + expected.abs())
    assert wrong.float().mean() < 0.01
    torch.testing.assert_close(got, expected, rtol=5 * tolerance, atol=5 * tolerance)


TESTS_OF: dict[Op[..., Any], OpTests] = {
    PAGED_ATTENTION: OpTests(
        checked=(
            {"padding": 2},
            {"dtype": torch.bfloat16, "head_dim": 8, "sliding_window": 7},
        ),
        small={"rows": ((1, 10),)},
        large={"rows": ((1, 100),)},
        matches=lambda _, kernel, args: attention_matches(kernel, args),
    ),
    DECODE_SCHEDULE: OpTests(
        checked=({"tile": 16, "members": 2, "rows": ((1, 70), (1, 80)), "head_dim": 8},),
        small={"tile": 64, "members": 4, "rows": ((1, 10),)},
        large={"tile": 64, "members": 4, "rows": ((1, 10), (1, 10))},
        matches=_is_the_same,
    ),
    ROTATE_AND_CACHE: OpTests(
        checked=(
            {"padding": 2},
            {"dtype": torch.bfloat16, "head_dim": 24, "has_norms": False},
        ),
        small={"tokens": 1},
        large={"tokens": 2},
        matches=lambda _, kernel, args: rotation_matches(kernel, args),
    ),
    GUMBEL_ARGMAX: OpTests(
        checked=({"rows": 3, "vocab_size": 65},),
        small={"rows": 1, "vocab_size": 10},
        large={"rows": 1, "vocab_size": 100},
        matches=_is_the_same,
    ),
    MASS_THRESHOLD: OpTests(
        checked=(
            {"rows": 3, "vocab_size": 65},
            {"rows": 2, "vocab_size": 9, "apart": True},
            {"rows": 2, "vocab_size": 9, "weighs": False},
        ),
        small={"rows": 1, "vocab_size": 10},
        large={"rows": 1, "vocab_size": 100},
        matches=_is_the_same,
    ),
    LINEAR: OpTests(
        checked=(
            {"tokens": 3, "inputs": 64, "outputs": 5, "has_bias": True},
            {
                "tokens": 2,
                "inputs": 128,
                "outputs": 9,
                "dtype": torch.bfloat16,
                "weight": "int4/64",
            },
            {"tokens": 2, "inputs": 128, "outputs": 70, "weight": "strips of int8"},
            {"tokens": 2, "inputs": 128, "outputs": 9, "weight": "int8/16 with offsets"},
            {"tokens": 3, "inputs": 128, "outputs": 64, "weight": "strips of int4/32"},
        ),
        small={"tokens": 1, "inputs": 32, "outputs": 8},
        large={"tokens": 1, "inputs": 64, "outputs": 8},
        matches=_is_close,
    ),
    EXPERTS: OpTests(
        checked=(
            {"tokens": 5, "experts": 4, "chosen": 2, "hidden": 32, "intermediate": 8, "padding": 1},
            {
                "tokens": 3,
                "experts": 4,
                "chosen": 2,
                "hidden": 64,
                "intermediate": 64,
                "dtype": torch.bfloat16,
                "weight": "strips of int8",
            },
        ),
        small={"tokens": 1, "experts": 4, "chosen": 1, "hidden": 32, "intermediate": 8},
        large={"tokens": 1, "experts": 4, "chosen": 2, "hidden": 32, "intermediate": 8},
        matches=_experts_are_close,
    ),
    FLOAT8_PRODUCT: OpTests(
        checked=({"tokens": 2, "has_bias": True}, {"tokens": 1, "is_static": True}),
        small={"tokens": 1},
        large={"tokens": 2},
        matches=_is_close,
        on_cuda="torch",
    ),
    CAUSAL_CONVOLUTION: OpTests(
        checked=({"padding": 2}, {"dtype": torch.bfloat16, "has_bias": False}, {"rows": ()}),
        small={"rows": (1,)},
        large={"rows": (1, 1)},
        matches=states_match,
    ),
    LINEAR_RECURRENCE: OpTests(
        checked=(
            {"padding": 2},
            {"dtype": torch.bfloat16, "delta": False, "has_skip": True},
            {"rows": ()},
        ),
        small={"rows": (1,)},
        large={"rows": (1, 1)},
        matches=states_match,
    ),
    LORA: OpTests(
        checked=(
            {"slots": [0, -1], "inputs": 9, "parts": [5, 2], "ranks": [[2, 1]], "room": 3},
            {
                "slots": [1, 0, 1],
                "inputs": 32,
                "parts": [16],
                "ranks": [[4], [2]],
                "room": 4,
                "dtype": torch.bfloat16,
            },
        ),
        small={"slots": [0], "inputs": 8, "parts": [8], "ranks": [[1], [2]], "room": 2},
        large={"slots": [1], "inputs": 8, "parts": [8], "ranks": [[1], [2]], "room": 2},
        matches=_is_close,
    ),
    LATENT_ATTENTION: OpTests(
        checked=({"padding": 2}, {"dtype": torch.bfloat16, "heads": 3, "rows": ((1, 20),)}),
        small={"rows": ((1, 10),)},
        large={"rows": ((1, 100),)},
        matches=lambda _, kernel, args: latent_matches(kernel, args),
    ),
    LOOK_UP: OpTests(
        checked=({"lengths": (30, 3)}, {"lengths": ()}),
        small={"lengths": (30,)},
        large={"lengths": (30, 30)},
        matches=_is_the_same,
    ),
    ACCEPT_DRAFTS: OpTests(
        checked=({"counts": (4, 0, -1, 2)}, {"counts": ()}),
        small={"counts": (4,)},
        large={"counts": (4, 4)},
        matches=accepted_alike,
    ),
}
