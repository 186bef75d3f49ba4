"""How kernels of the ops that write into caches are held against their references."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from src.ops import (
    CAUSAL_CONVOLUTION,
    EXPERTS,
    GUMBEL_ARGMAX,
    LATENT_ATTENTION,
    LINEAR,
    LINEAR_RECURRENCE,
    LORA,
    PAGED_ATTENTION,
    ROTATE_AND_CACHE,
    Op,
)
from src.ops.attention.cached_rows import CODES, from_rows, is_coded
from src.ops.runtime.kernel_library import KernelLibrary

# The others are called on CUDA only, and have their references on the CPU.
COMPILED = (
    *(PAGED_ATTENTION, GUMBEL_ARGMAX, LINEAR, EXPERTS),
    *(LATENT_ATTENTION, CAUSAL_CONVOLUTION, LINEAR_RECURRENCE, LORA),
)

# Both accumulate in float32; what differs is the order of sums and the rounding of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MUTATED = (3, 4, 9)  # key_cache, value_cache, out


def copied(args: tuple[Any, ...], mutated: Sequence[int] = MUTATED) -> tuple[Any, ...]:
    """The same arguments with copies of those that a call changes."""
    return tuple(x.clone() if i in mutated else x for i, x in enumerate(args))


def attention_matches(kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    expected, got = copied(args), copied(args)
    PAGED_ATTENTION.reference(*expected)
    kernel(*got)
    for cache in (3, 4):
        # Bitwise, poison included: what must not be written has not been.
        assert torch.equal(bits(expected[cache]), bits(got[cache]))
    tolerance = TOLERANCE[got[9].dtype]
    # Without keys, padding is not the op's business: both leave the poison.
    cached, num_tokens = got[1] is None, int(got[6][-1])
    torch.testing.assert_close(
        got[9], expected[9], rtol=tolerance, atol=tolerance, equal_nan=cached
    )
    assert not got[9][: num_tokens if cached else None].isnan().any()
    assert not cached or got[9][num_tokens:].isnan().all()


def latent_matches(kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The kernels may round keys and values, or queries and sums of latents, to the dtype."""
    expected, got = copied(args, (2, 8)), copied(args, (2, 8))
    LATENT_ATTENTION.reference(*expected)
    kernel(*got)
    # Bitwise, poison included: what must not be written has not been.
    assert torch.equal(bits(expected[2]), bits(got[2]))
    tolerance = 2 * TOLERANCE[got[8].dtype]
    torch.testing.assert_close(got[8], expected[8], rtol=tolerance, atol=tolerance)


def fused_copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments of `rotate_and_cache` with copies of what a call changes.

    Query, key and value are slices of one copy, as they were of one tensor.
    """
    fused = args[0]._base.clone()
    slices = (fused.as_strided(x.shape, x.stride(), x.storage_offset()) for x in args[:3])
    return (*slices, *args[3:9], *(x.clone() for x in args[9:]))


def rotation_matches(
    kernel: Callable[..., Any], args: tuple[Any, ...], *, exact: bool = False
) -> None:
    """`exact` asks for the same bits of queries and keys, too."""
    expected, got = fused_copied(args), fused_copied(args)
    ROTATE_AND_CACHE.reference(*expected)
    kernel(*got)
    # Keys and values where they came from, cached values, and the output's rows of zeros.
    for index in (1, 2, 10, 11):
        assert torch.equal(bits(expected[index]), bits(got[index]))
    tolerance = 0.0 if exact else TOLERANCE[got[0].dtype]
    for index in (0, 9):
        if is_coded(got[index].dtype) and not exact:
            same_codes(got[index], expected[index])
            continue
        torch.testing.assert_close(
            bits(got[index]) if is_coded(got[index].dtype) else got[index],
            bits(expected[index]) if is_coded(got[index].dtype) else expected[index],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )


def same_codes(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Rows of codes of numbers that differ in their last bits: a code may be the next one."""
    got_rows, expected_rows = from_rows(got), from_rows(expected)
    apart = (got_rows - expected_rows).abs()
    largest = expected_rows.abs().amax(-1, keepdim=True)
    # A step of int8, and of float8 for the largest numbers.
    step = largest / 127 if got.dtype == torch.int8 else largest / 14
    assert not (apart > 1.01 * step).any()
    assert torch.equal(got_rows.isnan(), expected_rows.isnan())
    assert (apart > 1e-2 * step).float().mean() < 1e-2


def with_own_states(
    op: Op[..., Any], args: tuple[Any, ...]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The same arguments with copies of states, slices as they were, and output; also by name."""
    names = [argument.name for argument in op.overload._schema.arguments]
    given = dict(zip(names, args, strict=True))
    states = given["states"]
    memory = states._base.clone()
    given["states"] = memory.as_strided(states.shape, states.stride(), states.storage_offset())
    given["out"] = given["out"].clone()
    return given, tuple(given.values())


def states_match(op: Op[..., Any], kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The same outputs and states, and nothing written beside them."""
    expected, wanted = with_own_states(op, args)
    got, given = with_own_states(op, args)
    op.reference(*wanted)
    kernel(*given)
    tolerance = TOLERANCE[got["out"].dtype]
    torch.testing.assert_close(got["out"], expected["out"], rtol=10 * tolerance, atol=tolerance)
    memories = got["states"]._base, expected["states"]._base
    torch.testing.assert_close(*memories, rtol=1e-4, atol=1e-5, equal_nan=True)


def in_chunks(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    bounds: Sequence[int],
    *,
    verifies: bool = False,
    before: int = 0,
) -> torch.Tensor:
    """Output [T, heads, head_dim] of a one-row prefill cut at `bounds`, 0 and T included.

    With ``verifies`` each chunk is a row that verifies drafts. So many tokens ``before`` are in the
    caches of `args`, which are written.
    """
    out = torch.full_like(args[9], torch.nan)
    for begin, end in itertools.pairwise(bounds):
        kernel(
            *(x[begin:end] for x in args[:3]),
            *args[3:6],
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([before + end], dtype=torch.int32),
            args[8][begin:end],
            out[begin:end],
            *args[10:12],
            end - begin,
            before + end,
            *(args[14], None, says_verifies(verifies)),
        )
    return out


def says_verifies(*rows: bool) -> torch.Tensor | None:
    """What an op is told of rows that verify drafts."""
    return torch.tensor(rows, dtype=torch.int32) if any(rows) else None


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: equal if nothing differs, not even a sign of zero or a NaN."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def drawn_attention(data: st.DataObject, groups: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """A case of paged attention; ``groups``: numbers of key heads, and of query heads of each."""
    kv_heads, group = data.draw(st.sampled_from(groups))
    return {
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": data.draw(st.sampled_from([8, 40, 64, 128, 256])),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "sliding_window": data.draw(st.sampled_from([0, 0, 9, 300])),
        "chunk": data.draw(st.sampled_from([0, 0, 13, 150])),
        "block_size": data.draw(st.sampled_from([1, 7, 16])),
        "cache_dtype": data.draw(st.sampled_from([None, None, *CODES])),
        "cap": data.draw(st.sampled_from([0, 0, 2.0])),
        "has_sinks": data.draw(st.booleans()),
    }


def some_tokens(data: st.DataObject, tokens: int) -> tuple[slice, int]:
    """Some neighbouring ones of so many, and by how many threads they are computed."""
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    return slice(first, last), data.draw(st.integers(1, 3))


@contextlib.contextmanager
def keeping_one_way(libraries: Iterable[KernelLibrary]) -> Iterator[None]:
    """As for a deterministic engine: results do not depend on the number of tokens."""
    with contextlib.ExitStack() as kept:
        for library in libraries:
            kept.enter_context(library.ways.keeping_one())
        yield


def linear_is_alike_in_any_company(
    libraries: Iterable[KernelLibrary], args: tuple[Any, ...], part: slice, threads: int
) -> None:
    """Some tokens of `streamed_linear` are the same bits among all of `args` and by themselves."""
    x, *rest = args
    for library in libraries:
        whole = library.streamed_linear(x, *rest)
        torch.set_num_threads(threads)
        assert torch.equal(library.streamed_linear(x[part], *rest), whole[part])
