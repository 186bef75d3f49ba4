"""A row that verifies drafts has the bits of its tokens one at a time; others are as ever."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.ops import LATENT_ATTENTION, PAGED_ATTENTION
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import (
    bits,
    copied,
    drawn_attention,
    in_chunks,
    keeping_one_way,
    says_verifies,
)

# The tokens of a row that verifies as many drafts as there are by default, behind recurrent states.
MOST = 25


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_drafts_give_the_bits_of_one_token_at_a_time(
    libraries: dict[str, KernelLibrary], data: st.DataObject
) -> None:
    length = data.draw(st.one_of(st.integers(2, 60), st.integers(230, 560)))
    case = PAGED_ATTENTION.build(
        "cpu",
        rows=((length, length),),
        **drawn_attention(data, [(2, 1), (1, 2), (3, 3), (2, 7), (1, 20)]),
        seed=length,
    )
    bounds = [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + data.draw(st.integers(1, MOST))))
    for library in libraries.values():
        torch.set_num_threads(1)
        expected = in_chunks(library.paged_attention, copied(case), range(length + 1))
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        got = in_chunks(library.paged_attention, copied(case), bounds, verifies=True)
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_with_drafts_change_nothing_beside_others(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype
) -> None:
    """Two rows have drafts; these and two that decode begin with the same blocks."""
    shared = {
        "prefixes": {1: (0, 32), 2: (0, 32), 3: (0, 32)},
        "num_heads": 6,
        "num_kv_heads": 2,
        "dtype": dtype,
    }
    rows = ((MOST, 600), (1, 600), (1, 610), (9, 620), (40, 80))
    drafted = PAGED_ATTENTION.build("cpu", rows=rows, **shared)
    drafted = (*drafted[:-1], says_verifies(True, False, False, True, False))
    undrafted = (*drafted[:-1], None)
    for library in libraries.values():
        torch.set_num_threads(2)
        items = library.attention_items(*copied(drafted)).items
        library.share_prefixes(False)
        apart = library.attention_items(*copied(drafted)).items
        library.share_prefixes(True)
        assert items < apart
        together, beside = copied(drafted), copied(undrafted)
        library.paged_attention(*together)
        library.paged_attention(*beside)
        for at in (slice(MOST, MOST + 2), slice(MOST + 11, None)):
            assert torch.equal(bits(together[9][at]), bits(beside[9][at]))
        for at in range(MOST):
            one = copied(drafted)
            last = at + 1
            library.paged_attention(
                *(x[at:last] for x in one[:3]),
                together[3],
                together[4],
                one[5][:1],
                torch.tensor([0, 1], dtype=torch.int32),
                one[7][:1] - (MOST - last),
                one[8][at:last],
                one[9][at:last],
                *one[10:12],
                1,
                600,
                False,
            )
            assert torch.equal(bits(one[9][at:last]), bits(together[9][at:last])), at


def latents_in_chunks(
    library: KernelLibrary, case: tuple[Any, ...], bounds: Sequence[int], *, verifies: bool
) -> torch.Tensor:
    """Compute the only row's tokens in chunks that end at ``bounds``."""
    query, latent, cache, up, tables, _, _, slots, out, scale, *_ = copied(case, (2, 8))
    for begin, end in itertools.pairwise(bounds):
        library.latent_attention(
            *(query[begin:end], latent[begin:end], cache, up, tables),
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            *(slots[begin:end], out[begin:end], scale, end - begin, end, False, None, 0),
            says_verifies(verifies),
        )
    result: torch.Tensor = out
    return result


@pytest.mark.parametrize("heads", [3, 7, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_over_latents_give_the_bits_of_one_token_at_a_time(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, heads: int
) -> None:
    """Also behind no context, and with so many queries that an item folds its sums."""
    shape = {"nope": 16, "rope": 32, "rank": 96, "value": 24, "heads": heads}
    length = 550
    case = LATENT_ATTENTION.build("cpu", rows=((length, length),), dtype=dtype, **shape)
    bounds = [*range(0, 500, MOST), 500, 505, 511, 514, 530, length - 8, length]
    for library in libraries.values():
        with keeping_one_way([library]):
            expected = latents_in_chunks(library, case, range(length + 1), verifies=False)
            got = latents_in_chunks(library, case, bounds, verifies=True)
        assert torch.equal(bits(got), bits(expected))


def test_prompts_and_more_drafts_or_keys_take_the_paths_of_prompts(
    libraries: dict[str, KernelLibrary],
) -> None:
    """Items of few query rows are split every 256 keys, those of prompts every 2048."""
    shape = {"num_heads": 2, "num_kv_heads": 2, "block_size": 16}
    for verifies, tokens, keys, splits in (
        (True, 25, 8192, 32),
        (True, 26, 8192, 4),
        (True, 25, 8193, 5),
        (False, 25, 8192, 4),
        (False, 2, 2049, 9),
    ):
        case = PAGED_ATTENTION.build("cpu", rows=((tokens, keys),), **shape)
        case = (*case[:-1], says_verifies(verifies))
        for library in libraries.values():
            items = library.attention_items(*copied(case)).items
            # Of one or both heads, and of 16 or all tokens.
            assert items in {splits * each for each in (1, 2, 4)}, (tokens, keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_tokens_that_are_left_of_a_prompt_have_the_bits_of_the_whole(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype
) -> None:
    """Behind a cached prefix, though it has no more tokens than a row with drafts."""
    shape = {"num_heads": 6, "num_kv_heads": 2, "dtype": dtype}
    case = PAGED_ATTENTION.build("cpu", rows=((112, 112),), **shape)
    for library in libraries.values():
        whole = in_chunks(library.paged_attention, copied(case), [0, 112])
        rest = in_chunks(library.paged_attention, copied(case), [0, 96, 112])
        assert torch.equal(bits(rest), bits(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [2060, 4100])
def test_many_heads_fold_where_one_token_is_split(
    libraries: dict[str, KernelLibrary], length: int, dtype: torch.dtype
) -> None:
    """Twenty query heads share a key head, so that one item has all keys of some drafts."""
    case = PAGED_ATTENTION.build(
        "cpu", rows=((40, length),), num_heads=20, num_kv_heads=1, head_dim=64, dtype=dtype
    )
    for library in libraries.values():
        expected = in_chunks(library.paged_attention, copied(case), range(41), before=length - 40)
        got = in_chunks(
            library.paged_attention,
            copied(case),
            [0, 17, 40],
            verifies=True,
            before=length - 40,
        )
        assert torch.equal(bits(got), bits(expected))
