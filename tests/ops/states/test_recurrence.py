"""Recurrent states: transformers' formulas, any cut of rows, and arguments that make no sense."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops import CAUSAL_CONVOLUTION, LINEAR_RECURRENCE, Op
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import with_own_states

OPS = (CAUSAL_CONVOLUTION, LINEAR_RECURRENCE)


def test_the_delta_rule_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    named, args = with_own_states(
        LINEAR_RECURRENCE, LINEAR_RECURRENCE.build("cpu", rows=(9,), has_skip=False)
    )
    (slot,) = named["slots"].tolist()
    read, state = torch_recurrent_gated_delta_rule(
        *(named[name][None] for name in ("query", "key", "value", "decay", "factor")),
        initial_state=named["states"][slot][None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    LINEAR_RECURRENCE.reference(*args)
    torch.testing.assert_close(named["out"], read[0])
    torch.testing.assert_close(named["states"][slot], state[0])


def test_the_scan_is_that_of_transformers() -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    named, _ = with_own_states(
        LINEAR_RECURRENCE,
        LINEAR_RECURRENCE.build("cpu", rows=(9,), delta=False, has_skip=True),
    )
    # Of one rate for each head, times the token's step.
    step, rate = named["factor"], torch.tensor([-0.5, -1.0, -2.0, -4.0])
    named["decay"] = step * rate
    (slot,) = named["slots"].tolist()
    read, state = mamba2_chunk_scan(
        *(named["value"][None], step[None], rate, named["key"][None], named["query"][None]),
        chunk_size=4,
        D=named["skip"],
        initial_states=named["states"][slot][None].transpose(-1, -2),
        return_final_states=True,
    )
    LINEAR_RECURRENCE.reference(*named.values())
    torch.testing.assert_close(named["out"], read[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(named["states"][slot], state[0].transpose(-1, -2))


def kernel_of(library: KernelLibrary, op: Op[..., Any]) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(library, op.name)
    return kernel


def in_pieces(
    op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...], cuts: list[int]
) -> dict[str, Any]:
    """Each row by itself, the tokens of each cut at these places."""
    named, _ = with_own_states(op, args)
    starts = named["query_start_loc"].tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        inner = sorted({begin + cut for cut in cuts if begin + cut < end})
        for first, last in itertools.pairwise([begin, *inner, end]):
            part = dict(named)
            part["slots"] = named["slots"][row : row + 1]
            part["query_start_loc"] = torch.tensor([0, last - first], dtype=torch.int32)
            for name in ("x", "query", "key", "value", "decay", "factor", "out"):
                if name in named:
                    part[name] = named[name][first:last]
            kernel(*part.values())
    return named


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_no_bit_depends_on_cuts_company_or_threads(
    op: Op[..., Any], library: KernelLibrary, data: st.DataObject
) -> None:
    rows = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    sizes: dict[str, Any] = {"rows": rows, "dtype": dtype}
    if op is LINEAR_RECURRENCE:
        delta = data.draw(st.booleans())
        sizes |= {"dim": 72, "delta": delta, "has_skip": not delta}
    args = op.build("cpu", **sizes)
    kernel = kernel_of(library, op)
    whole, given_args = with_own_states(op, args)
    torch.set_num_threads(2)
    try:
        kernel(*given_args)
    finally:
        torch.set_num_threads(1)
    cuts = data.draw(st.lists(st.integers(1, 19), max_size=4))
    pieces = in_pieces(op, kernel, args, cuts)
    assert torch.equal(whole["out"], pieces["out"])
    ours, theirs = (named["states"]._base.nan_to_num(7.0) for named in (whole, pieces))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slots", lambda x: x + 50),
        ("slots", lambda x: x - 50),
        ("slots", lambda x: x.to(torch.int32)),
        ("query_start_loc", lambda x: x + 1),
        ("query_start_loc", lambda x: x * 9),
        ("query_start_loc", lambda x: x.flip(0)),
        ("query_start_loc", lambda x: x[:-1]),
        # Of the right number of tokens, and a row ends before it begins.
        ("query_start_loc", lambda x: x[[0, 2, 1]]),
        ("out", lambda x: x[:-1]),
        ("states", lambda x: x[..., :-1]),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    op: Op[..., Any],
    library: KernelLibrary,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    named, _ = with_own_states(op, op.build("cpu", rows=(2, 3)))
    named[name] = change(named[name])
    with pytest.raises(ValueError, match=r"expected|row|contradict"):
        kernel_of(library, op)(*named.values())


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_row_without_tokens_touches_nothing(op: Op[..., Any], library: KernelLibrary) -> None:
    for kernel in (kernel_of(library, op), op.reference):
        named, args = with_own_states(op, op.build("cpu", rows=(0,), padding=2))
        before = named["states"]._base.clone()
        kernel(*args)
        assert torch.equal(before.nan_to_num(7.0), named["states"]._base.nan_to_num(7.0))
        assert (named["out"] == 0).all()
