"""Latent attention: what does not depend on the batch, the two ways, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from src.ops import LATENT_ATTENTION
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import bits, copied, keeping_one_way, latent_matches

MUTATED = (2, 8)  # cache, out
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The projection is small beside the rest, so that prompts of this length are expanded.
SHAPE = {"heads": 3, "nope": 16, "rope": 8, "rank": 48, "value": 24}
# In bfloat16, whole vectors; heads of one token fit into 4 or 8 lanes, or need 16 twice.
WHOLE = {"nope": 16, "rope": 32, "rank": 96, "value": 24}
HEADS = (3, 7, 18)


@pytest.fixture
def one_way(libraries: dict[str, KernelLibrary]) -> Iterator[None]:
    """Projections of latents keep one order of sums, as in a deterministic engine."""
    with keeping_one_way(libraries.values()):
        yield


def in_chunks(
    kernel: Callable[..., None], args: tuple[Any, ...], bounds: Sequence[int]
) -> torch.Tensor:
    """Compute the only row's tokens in chunks that end at ``bounds``."""
    query, latent, cache, up, tables, _, _, slots, out, scale, _, _, deterministic, *_ = args
    for begin, end in itertools.pairwise(bounds):
        kernel(
            *(query[begin:end], latent[begin:end], cache, up, tables),
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            *(slots[begin:end], out[begin:end], scale, end - begin, end, deterministic),
        )
    result: torch.Tensor = out
    return result


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize(
    "case",
    [
        *({"dtype": dtype, **SHAPE} for dtype in DTYPES),
        *({"dtype": torch.bfloat16, "heads": heads, **WHOLE} for heads in HEADS),
    ],
)
def test_chunks_and_single_tokens_give_the_bits_of_the_whole_prompt(
    libraries: dict[str, KernelLibrary], case: dict[str, Any]
) -> None:
    whole = LATENT_ATTENTION.build("cpu", rows=((530, 530),), deterministic=True, **case)
    for library in libraries.values():
        torch.set_num_threads(1)
        kernel = library.latent_attention
        expected = in_chunks(kernel, copied(whole, MUTATED), [0, 530])
        torch.set_num_threads(2)
        got = in_chunks(kernel, copied(whole, MUTATED), [0, 1, 2, 40, 255, 256, 257, 529, 530])
        torch.set_num_threads(1)
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize(
    "case",
    [SHAPE, *({"dtype": torch.bfloat16, "heads": heads, **WHOLE} for heads in HEADS)],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_row_has_the_same_bits_alone_and_beside_others(
    library: KernelLibrary, deterministic: bool, case: dict[str, Any]
) -> None:
    rows = ((1, 800), (90, 300), (5, 33), (1, 690))
    args = LATENT_ATTENTION.build("cpu", rows=rows, deterministic=deterministic, **case)
    together = copied(args, MUTATED)
    library.latent_attention(*together)
    starts = args[5].tolist()
    for row, (count, length) in enumerate(rows):
        query, latent, cache, up, tables, _, _, slots, out, *rest = copied(args, MUTATED)
        part = slice(starts[row], starts[row + 1])
        library.latent_attention(
            *(query[part], latent[part], cache, up, tables[row : row + 1]),
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            *(slots[part], out[part], *rest),
        )
        assert torch.equal(bits(out[part]), bits(together[8][part])), rows[row]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_reading_a_shared_prefix_together_changes_no_bit(
    library: KernelLibrary, heads: int, threads: int
) -> None:
    """Three rows that share their first 1,024 tokens, and one that shares nothing."""
    args = LATENT_ATTENTION.build(
        "cpu", rows=((1, 1100),) * 4, dtype=torch.bfloat16, heads=heads, **WHOLE
    )
    tables = args[4]
    tables[1:3, :64] = tables[0, :64]
    torch.set_num_threads(threads)
    together, apart = copied(args, MUTATED), copied(args, MUTATED)
    library.latent_attention(*together)
    library.share_prefixes(False)
    try:
        library.latent_attention(*apart)
    finally:
        library.share_prefixes(True)
        torch.set_num_threads(1)
    assert torch.equal(bits(together[8]), bits(apart[8]))
    latent_matches(library.latent_attention, args)


@pytest.mark.parametrize("heads", HEADS)
def test_what_lies_behind_a_context_does_not_count(library: KernelLibrary, heads: int) -> None:
    """An odd number of keys: the partner of the last one is NaN in the cache."""
    for length in (1, 127, 129, 513):
        case = {"rows": ((1, length),), "dtype": torch.bfloat16, "heads": heads, **WHOLE}
        latent_matches(library.latent_attention, LATENT_ATTENTION.build("cpu", **case))


@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_give_what_the_reference_gives(
    library: KernelLibrary, dtype: torch.dtype
) -> None:
    """A row of few queries and one of many, and the same rows with every one absorbed."""
    ways = [
        LATENT_ATTENTION.build(
            "cpu", rows=((2, 350), (120, 350)), dtype=dtype, deterministic=absorbs, **SHAPE
        )
        for absorbs in (False, True)
    ]
    for args in ways:
        latent_matches(library.latent_attention, args)
    outs = []
    for args in ways:
        library.latent_attention(*args)
        outs.append(args[8])
    # The same work where few queries are absorbed anyway; another where many are expanded.
    assert torch.equal(bits(outs[0][:2]), bits(outs[1][:2])) or dtype != torch.float32
    assert not torch.equal(bits(outs[0][2:]), bits(outs[1][2:]))


@pytest.mark.parametrize("threads", [1, 2])
def test_heads_whose_keys_do_not_fit_together_take_turns(
    library: KernelLibrary, threads: int
) -> None:
    """32 MiB of expanded keys and values: 953 heads of this prompt, then those that are left."""
    keys, heads, of_a_head = 100, 960, 4 * (2 * 24 + 16 + 24)
    assert 953 * keys * of_a_head < 32 << 20 < 954 * keys * of_a_head
    case = {**SHAPE, "heads": heads, "rows": ((keys, keys),)}
    torch.set_num_threads(threads)
    latent_matches(library.latent_attention, LATENT_ATTENTION.build("cpu", **case))


def test_what_is_outside_of_the_contract_is_refused(library: KernelLibrary) -> None:
    def refuses(index: int, change: Callable[[Any], Any], **case: Any) -> None:
        args = list(LATENT_ATTENTION.build("cpu", **case))
        args[index] = change(args[index])
        with pytest.raises(ValueError, match=r".+"):
            library.latent_attention(*args)

    refuses(7, lambda slots: slots + 10**6)
    refuses(4, lambda tables: tables - 1000)
    refuses(4, lambda tables: tables + 1000)
    refuses(5, lambda starts: starts.flip(0))
    refuses(6, lambda lengths: lengths + 10**6)
    refuses(6, lambda lengths: lengths * 0)
    refuses(3, lambda up: up.bfloat16())
    refuses(3, lambda up: up[1:])
    refuses(3, lambda up: up.transpose(1, 2))
    refuses(2, lambda cache: cache[:, :, :-1])
    refuses(8, lambda out: out[1:])
    refuses(0, lambda query: query, rank=4, rope=2)
    refuses(0, lambda query: query, rank=576, rope=8)
