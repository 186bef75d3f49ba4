"""What every op must satisfy, driven by its declaration alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import library as torch_library

from src.ops import (
    DECODE_SCHEDULE,
    GUMBEL_ARGMAX,
    LINEAR,
    OPS,
    PAGED_ATTENTION,
    ROTATE_AND_CACHE,
    Kernel,
    Op,
)
from src.ops.attention_cases import CACHED_CASES
from src.ops.cpu.kernel_library import KernelLibrary
from tests.ops.comparison import (
    COMPILED,
    TOLERANCE,
    attention_matches,
    copied,
    rotation_matches,
)

# Each of them exercises another dtype, head size, window, or none of the rows.
OPCHECKED = {
    "paged_attention": [
        {"padding": 2},
        {"dtype": torch.bfloat16, "head_dim": 8, "sliding_window": 7},
    ],
    "decode_schedule": [{"tile": 16, "members": 2, "rows": ((1, 70), (1, 80)), "head_dim": 8}],
    "rotate_and_cache": [
        {"padding": 2},
        {"dtype": torch.bfloat16, "head_dim": 24, "has_norms": False},
    ],
    "gumbel_argmax": [{"rows": 3, "vocab_size": 65}],
    "streamed_linear": [
        {"tokens": 3, "inputs": 64, "outputs": 5, "has_bias": True},
        {"tokens": 2, "inputs": 128, "outputs": 9, "dtype": torch.bfloat16, "weight": "int4/64"},
        {"tokens": 2, "inputs": 128, "outputs": 70, "weight": "strips of int8"},
        {"tokens": 3, "inputs": 128, "outputs": 64, "weight": "strips of int4/32"},
    ],
}


def cases_of(ops: Sequence[Op]) -> list[Any]:
    return [
        pytest.param(op, case, id=f"{op.name}-{index}")
        for op in ops
        for index, case in enumerate(op.cases)
    ]


def test_every_op_has_cases_and_is_registered() -> None:
    for op in OPS:
        assert op.cases
        assert op.overload._schema.name == f"slipstream::{op.name}"
    assert PAGED_ATTENTION.mutated == ("key_cache", "value_cache", "out")
    assert ROTATE_AND_CACHE.mutated == ("query", "key_cache", "value_cache", "out")
    assert GUMBEL_ARGMAX.mutated == LINEAR.mutated == DECODE_SCHEDULE.mutated == ()


def test_what_is_compiled_serves_the_ops_that_say_so(library: KernelLibrary) -> None:
    assert tuple(op for op in OPS if hasattr(library, op.name)) == COMPILED


@pytest.mark.parametrize(("op", "case"), cases_of(COMPILED))
def test_compiled_kernel_equals_reference(
    op: Op, case: dict[str, Any], libraries: dict[str, KernelLibrary]
) -> None:
    args = op.build("cpu", **case)
    for library in libraries.values():
        _matches(op, getattr(library, op.name), args)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), cases_of(OPS))
def test_cuda_kernel_equals_reference(op: Op, case: dict[str, Any]) -> None:
    op.uninstall_cuda()  # an engine before this may have chosen another
    _matches(op, op.overload, op.build("cuda", **case))
    assert op.active("cuda").name == ("reference" if op is LINEAR else "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CACHED_CASES)
def test_cuda_kernel_finds_keys_in_the_cache(case: dict[str, Any]) -> None:
    attention_matches(PAGED_ATTENTION.overload, PAGED_ATTENTION.build("cuda", **case))


def _matches(op: Op, kernel: Any, args: tuple[Any, ...]) -> None:
    if op is PAGED_ATTENTION:
        attention_matches(kernel, args)
    elif op is ROTATE_AND_CACHE:
        rotation_matches(kernel, args)
    elif op is LINEAR:
        expected = op.reference(*args)
        # Sums are rounded once, and torch may sum bfloat16 in another order.
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(kernel(*args), expected, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(kernel(*args), op.reference(*args))


@pytest.fixture
def references() -> Iterator[None]:
    """Whatever this process has installed, the references serve."""
    before = [op.active("cpu") for op in OPS]
    for op in OPS:
        op.uninstall_cpu()
    yield
    for op, kernel in zip(OPS, before, strict=True):
        op.install_cpu(kernel)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_opcheck(op: Op, references: None) -> None:
    for case in OPCHECKED[op.name]:
        torch_library.opcheck(op.overload, op.build("cpu", **case))


@pytest.mark.parametrize("op", COMPILED, ids=lambda op: op.name)
def test_opcheck_of_what_is_compiled(op: Op, library: KernelLibrary, references: None) -> None:
    op.install_cpu(Kernel("compiled", getattr(library, op.name)))
    for case in OPCHECKED[op.name]:
        torch_library.opcheck(op.overload, op.build("cpu", **case))


def test_opcheck_of_attention_without_keys(references: None) -> None:
    torch_library.opcheck(
        PAGED_ATTENTION.overload, PAGED_ATTENTION.build("cpu", cached=True, padding=2)
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cost_is_positive_and_grows(op: Op) -> None:
    small, large = {
        "paged_attention": ({"rows": ((1, 10),)}, {"rows": ((1, 100),)}),
        "decode_schedule": (
            {"tile": 64, "members": 4, "rows": ((1, 10),)},
            {"tile": 64, "members": 4, "rows": ((1, 10), (1, 10))},
        ),
        "rotate_and_cache": ({"tokens": 1}, {"tokens": 2}),
        "gumbel_argmax": ({"rows": 1, "vocab_size": 10}, {"rows": 1, "vocab_size": 100}),
        "streamed_linear": (
            {"tokens": 1, "inputs": 32, "outputs": 8},
            {"tokens": 1, "inputs": 64, "outputs": 8},
        ),
    }[op.name]
    less, more = (op.cost(*op.build("cpu", **case)) for case in (small, large))
    assert 0 < less.bytes < more.bytes
    assert 0 < less.flops < more.flops or op is DECODE_SCHEDULE


def test_attention_cost_counts_what_is_visible() -> None:
    args = PAGED_ATTENTION.build(
        "cpu", rows=((3, 5),), num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=4
    )
    # Positions 2, 3, 4 see 3, 4, 4 keys; two heads; two multiply-adds of 8 elements for each pair.
    assert PAGED_ATTENTION.cost(*args).flops == (3 + 4 + 4) * 2 * 8 * 4


def test_switching_the_kernel_takes_effect_at_the_next_call() -> None:
    calls = []
    args = GUMBEL_ARGMAX.build("cpu", rows=1, vocab_size=4)

    def counted(*args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return GUMBEL_ARGMAX.reference(*args)

    before = GUMBEL_ARGMAX.active("cpu")
    GUMBEL_ARGMAX.install_cpu(Kernel("counted", counted))
    try:
        GUMBEL_ARGMAX.overload(*args)
        assert GUMBEL_ARGMAX.active("cpu").name == "counted"
    finally:
        GUMBEL_ARGMAX.install_cpu(before)
    GUMBEL_ARGMAX.overload(*args)
    assert calls == [1]


def test_a_cuda_kernel_is_imported_when_it_is_needed_and_can_be_another() -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    assert LINEAR.load_cuda().name == "reference"
    other = Kernel("other", PAGED_ATTENTION.reference)
    try:
        PAGED_ATTENTION.uninstall_cuda()
        assert PAGED_ATTENTION.active("cuda").name == "unresolved"
        assert PAGED_ATTENTION.load_cuda().name == "triton"
        PAGED_ATTENTION.install_cuda(other)
        assert PAGED_ATTENTION.active("cuda") is PAGED_ATTENTION.load_cuda() is other
    finally:
        PAGED_ATTENTION.uninstall_cuda()
    assert PAGED_ATTENTION.load_cuda().name == "triton"


def test_attention_inside_a_compiled_graph_equals_eager_and_clones_no_cache() -> None:
    from torch._inductor.utils import run_and_get_code

    def layer(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = torch.empty_like(query)
        torch.ops.slipstream.paged_attention(query * 2, *rest[:8], out, *rest[8:])
        return out + 1

    args = PAGED_ATTENTION.build("cpu", padding=2, block_size=7)
    arguments = (*args[:9], *args[10:])
    eager_args, compiled_args = copied(args), copied(args)
    expected = layer(*eager_args[:9], *eager_args[10:])
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    got, code = run_and_get_code(compiled, *compiled_args[:9], *compiled_args[10:])
    torch.testing.assert_close(got, expected)
    for cache in (3, 4):
        assert torch.equal(
            eager_args[cache].view(torch.int32), compiled_args[cache].view(torch.int32)
        )
    blocks = arguments[3].shape[0]
    allocations = [line for line in "\n".join(code).splitlines() if "empty_strided" in line]
    assert not [line for line in allocations if f"(({blocks}, 7," in line], "a cache was cloned"
