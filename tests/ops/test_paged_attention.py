"""Properties of paged attention, for the reference and for the compiled kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.ops import PAGED_ATTENTION
from src.ops.cpu.kernel_library import KernelLibrary
from tests.ops.comparison import copied, in_chunks

Attention = Callable[..., Any]


@pytest.fixture(params=["reference", "compiled"], scope="session")
def attention(request: pytest.FixtureRequest, library: KernelLibrary) -> Attention:
    if request.param == "reference":
        return PAGED_ATTENTION.reference
    return library.paged_attention


rows = st.one_of(
    st.integers(1, 150).map(lambda n: (1, n)),  # decode
    st.integers(1, 90).map(lambda n: (n, n)),  # prefill
    st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda t: (t[0], sum(t))),  # chunk
    st.integers(0, 20).map(lambda n: (0, n)),  # idle
)
mixes = st.fixed_dictionaries(
    {
        "rows": st.lists(rows, max_size=5).map(tuple),
        "num_heads": st.sampled_from([2, 6]),
        "num_kv_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([8, 24, 64]),
        "block_size": st.sampled_from([1, 3, 16]),
        "sliding_window": st.sampled_from([0, 1, 5, 70]),
        "padding": st.integers(0, 2),
        "seed": st.integers(0, 1000),
    }
)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def dense(args: tuple[Any, ...], row: int) -> torch.Tensor:
    """One row by torch's SDPA over keys gathered one by one, [query_len, heads, head_dim]."""
    query, _, _, key_cache, value_cache, tables, starts, lengths, _, _, scale, window, *_ = args
    begin, end, seq_len = int(starts[row]), int(starts[row + 1]), int(lengths[row])
    block_size = key_cache.shape[1]
    slots = [(int(tables[row, p // block_size]), p % block_size) for p in range(seq_len)]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return torch.stack([cache[slot] for slot in slots], dim=1)

    mask = torch.zeros(end - begin, seq_len, dtype=torch.bool)
    for i in range(end - begin):
        position = seq_len - (end - begin) + i
        mask[i, max(0, position - window + 1) if window else 0 : position + 1] = True
    return torch.nn.functional.scaled_dot_product_attention(
        query[begin:end].transpose(0, 1),
        gathered(key_cache),
        gathered(value_cache),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    ).transpose(0, 1)


@quick
@given(mix=mixes)
def test_any_mix_of_rows_equals_dense_attention(attention: Attention, mix: dict[str, Any]) -> None:
    args = PAGED_ATTENTION.build("cpu", **mix)
    attention(*args)
    starts, out = args[6].tolist(), args[9]
    for row, (query_len, _) in enumerate(mix["rows"]):
        if query_len:
            torch.testing.assert_close(
                out[starts[row] : starts[row + 1]], dense(args, row), rtol=1e-5, atol=1e-5
            )
    assert torch.equal(out[starts[-1] :], torch.zeros_like(out[starts[-1] :]))


@quick
@given(mix=mixes)
def test_only_the_named_slots_are_written(attention: Attention, mix: dict[str, Any]) -> None:
    args = PAGED_ATTENTION.build("cpu", **mix)
    before = copied(args)
    attention(*args)
    slots = args[8][args[8] >= 0]
    for cache, new in ((3, args[1]), (4, args[2])):
        expected = before[cache]
        expected.view(-1, *expected.shape[2:])[slots] = new[: len(slots)]
        assert torch.equal(args[cache].view(torch.int32), expected.view(torch.int32))


@quick
@given(
    length=st.integers(2, 200),
    cuts=st.lists(st.integers(1, 199), max_size=3),
    window=st.sampled_from([0, 9]),
)
def test_chunked_prefill_gives_what_the_whole_prefill_gives(
    attention: Attention, length: int, cuts: list[int], window: int
) -> None:
    whole = PAGED_ATTENTION.build("cpu", rows=((length, length),), sliding_window=window, seed=1)
    cached = copied(whole)
    attention(*whole)
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    out = in_chunks(attention, cached, bounds)
    torch.testing.assert_close(out, whole[9], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_alone_and_in_a_batch(
    library: KernelLibrary, dtype: torch.dtype
) -> None:
    batch = ((1, 1000), (70, 70), (1, 300), (33, 600))
    args = PAGED_ATTENTION.build("cpu", rows=batch, dtype=dtype, num_heads=6)
    library.paged_attention(*args)
    starts = args[6].tolist()
    threads = torch.get_num_threads()
    for row, (query_len, seq_len) in enumerate(batch):
        tokens = slice(starts[row], starts[row + 1])
        out = torch.empty_like(args[9][tokens])
        torch.set_num_threads(1 + row % 2)
        try:
            library.paged_attention(
                *(x[tokens] for x in args[:3]),
                *args[3:5],
                args[5][row : row + 1],
                torch.tensor([0, query_len], dtype=torch.int32),
                args[7][row : row + 1],
                args[8][tokens],
                out,
                *args[10:12],
                query_len,
                seq_len,
            )
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(out, args[9][tokens])


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (8, lambda x: x + 10**6, "slot_mapping"),
        (5, lambda x: x * 0 + 2**30, "block table"),
        (5, lambda x: x * 0 - 1, "block table"),
        (7, lambda x: x * 0, "seq_lens"),
        (0, lambda x: x[..., ::2], "query"),
        (1, lambda x: x[:-1], "key"),
        (9, lambda x: x.transpose(0, 1), "out"),
        (4, lambda x: x.to(torch.float16), "dtype"),
    ],
)
def test_arguments_that_would_corrupt_memory_are_refused(
    library: KernelLibrary, position: int, change: Callable[..., Any], message: str
) -> None:
    args = list(PAGED_ATTENTION.build("cpu"))
    args[position] = change(args[position])
    with pytest.raises(ValueError, match=message):
        library.paged_attention(*args)


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_head_sizes_outside_of_the_contract_are_refused(
    library: KernelLibrary, head_dim: int
) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=((1, 3),), head_dim=head_dim)
    with pytest.raises(ValueError, match="head_dim"):
        library.paged_attention(*args)


def test_nan_in_a_visible_key_shows(library: KernelLibrary) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=((1, 40), (1, 40)))
    args[1][0] = torch.nan
    library.paged_attention(*args)
    assert args[9][0].isnan().all()
    assert not args[9][1].isnan().any()
