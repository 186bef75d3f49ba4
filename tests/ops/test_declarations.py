"""What every op must satisfy, driven by its declaration alone."""

import random
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
from src.ops.attention.cached_rows import CODES
from src.ops.attention.cases import CACHED_CASES
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import COMPILED, attention_matches, copied
from tests.ops.per_op import TESTS_OF
from tests.ops.served_cases import SERVED


def cases_of(ops: Sequence[Op[..., Any]]) -> list[Any]:
    return [
        pytest.param(op, case, id=f"{op.name}-{index}")
        for op in ops
        for index, case in enumerate(op.cases)
    ]


def test_every_op_has_cases_and_is_registered() -> None:
    for op in OPS:
        assert op.cases
        assert op.overload._schema.name == f"slipstream::{op.name}"
    assert TESTS_OF.keys() == set(OPS), "tests/ops/per_op.py has an entry for every op"
    assert PAGED_ATTENTION.mutated == ("key_cache", "value_cache", "out")
    assert ROTATE_AND_CACHE.mutated == ("query", "key_cache", "value_cache", "out")
    assert GUMBEL_ARGMAX.mutated == LINEAR.mutated == DECODE_SCHEDULE.mutated == ()


def test_what_is_compiled_serves_the_ops_that_say_so(library: KernelLibrary) -> None:
    assert tuple(op for op in OPS if hasattr(library, op.name)) == COMPILED


@pytest.mark.parametrize(("op", "case"), cases_of(COMPILED))
def test_compiled_kernel_equals_reference(
    op: Op[..., Any], case: dict[str, Any], libraries: dict[str, KernelLibrary]
) -> None:
    """At the fastest level, and at two of the others: over all cases each of them has its part.

    The reference rounds inputs that meet quantized weights in tiles, however many there are. Where
    a level may leave many as they are, other tests compare with what is exact.
    """
    args = op.build("cpu", **case)
    *slower, fastest = libraries.values()
    for library in (fastest, *random.Random(str(case)).sample(slower, min(2, len(slower)))):
        with library.ways.keeping_one():
            TESTS_OF[op].matches(op, getattr(library, op.name), args)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), cases_of(OPS))
def test_cuda_kernel_equals_reference(op: Op[..., Any], case: dict[str, Any]) -> None:
    args, kernel, weight = op.build("cuda", **case), op.overload, str(case.get("weight"))
    if weight.startswith("strips") or (op is LINEAR and weight.startswith("e2m1")):
        # No model on a GPU has such a matrix: loading lays none out for it, and decodes the latter.
        with pytest.raises(ValueError, match="no kernel for CUDA"):
            kernel(*args)
    else:
        TESTS_OF[op].matches(op, kernel, args)
    assert op.active("cuda").name == TESTS_OF[op].on_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("case", CACHED_CASES)
def test_cuda_kernel_finds_keys_in_the_cache(case: dict[str, Any]) -> None:
    attention_matches(PAGED_ATTENTION.overload, PAGED_ATTENTION.build("cuda", **case))


def test_cases_of_served_sizes_are_those_that_an_op_can_build() -> None:
    for op, case in SERVED.values():
        assert case.keys() <= op.parameters.keys()
    for op in (PAGED_ATTENTION, ROTATE_AND_CACHE):
        kept = {case["cache_dtype"] for each, case in SERVED.values() if each is op}
        assert kept == {None, *CODES}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_cuda_kernel_equals_reference_at_served_sizes(name: str) -> None:
    op, case = SERVED[name]
    TESTS_OF[op].matches(op, op.overload, op.build("cuda", **case))
    assert op.active("cuda").name == "triton"


@pytest.fixture
def references() -> Iterator[None]:
    """Whatever this process has installed, the references serve."""
    before = [op.active("cpu") for op in OPS]
    for op in OPS:
        op.uninstall_cpu()
    yield
    for op, kernel in zip(OPS, before, strict=True):
        op.install_cpu(kernel)


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def check(op: Op[..., Any], args: tuple[Any, ...]) -> None:
    """What torch can say of an op's declaration."""
    kinds = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    # Torch cannot compare tensors of 8-bit floats, by which it sees that none was changed.
    tests = OPCHECKS[1:] if torch.float8_e4m3fn in kinds else OPCHECKS
    torch_library.opcheck(op.overload, args, test_utils=tests)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_opcheck(op: Op[..., Any], references: None) -> None:
    for case in TESTS_OF[op].checked:
        check(op, op.build("cpu", **case))


@pytest.mark.parametrize("op", COMPILED, ids=lambda op: op.name)
def test_opcheck_of_what_is_compiled(
    op: Op[..., Any], library: KernelLibrary, references: None
) -> None:
    op.install_cpu(Kernel("compiled", getattr(library, op.name)))
    for case in TESTS_OF[op].checked:
        check(op, op.build("cpu", **case))


def test_opcheck_of_attention_without_keys(references: None) -> None:
    torch_library.opcheck(
        PAGED_ATTENTION.overload, PAGED_ATTENTION.build("cpu", cached=True, padding=2)
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cost_is_positive_and_grows(op: Op[..., Any]) -> None:
    less, more = (
        op.cost(*op.build("cpu", **case)) for case in (TESTS_OF[op].small, TESTS_OF[op].large)
    )
    assert 0 < less.bytes < more.bytes
    # An op of integers alone has no floating point operations.
    assert 0 < less.flops < more.flops or less.flops == more.flops == 0


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


def test_a_cuda_kernel_is_imported_when_it_is_needed() -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    assert LINEAR.load_cuda().name == "triton"
    assert PAGED_ATTENTION.load_cuda().name == "triton"
    assert PAGED_ATTENTION.active("cuda") is PAGED_ATTENTION.load_cuda()


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
