"""Properties of paged attention, for the reference and for the compiled kernel."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from src.ops import PAGED_ATTENTION
from src.ops.attention.cases import CACHED_CASES
from src.ops.attention.spec import ALL_AHEAD
from src.ops.runtime.calls import use_threads
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import TOLERANCE, copied, in_chunks
from tests.ops.conftest import MACHINE_LEVELS, at_level

Attention = Callable[..., Any]


@pytest.fixture(params=["reference", *MACHINE_LEVELS], scope="session")
def attention(request: pytest.FixtureRequest, libraries: dict[str, KernelLibrary]) -> Attention:
    if request.param == "reference":
        return PAGED_ATTENTION.reference
    return at_level(libraries, request.param).paged_attention


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
        "head_dim": st.sampled_from([8, 24, 64, 128]),
        "block_size": st.sampled_from([1, 3, 16]),
        "sliding_window": st.sampled_from([0, 1, 5, 70]),
        "chunk": st.sampled_from([0, 0, 1, 50]),
        "ahead": st.sampled_from([0, 0, 1, 70, ALL_AHEAD]),
        "padding": st.integers(0, 2),
        "seed": st.integers(0, 1000),
    }
).map(lambda mix: {**mix, "ahead": 0} if mix["chunk"] else mix)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def dense(args: tuple[Any, ...], row: int) -> torch.Tensor:
    """One row by torch's SDPA over keys gathered one by one, [query_len, heads, head_dim]."""
    query, _, _, key_cache, value_cache, tables, starts, lengths, *_ = args
    scale, _, window, chunk, ahead = args[11]
    begin, end, seq_len = int(starts[row]), int(starts[row + 1]), int(lengths[row])
    block_size = key_cache.shape[1]
    # What none of its queries sees may be another's by now.
    of_rows = [
        [
            key
            for key in range(min(seq_len, position + 1 + int(ahead)))
            if (not window or position - key < window)
            and (not chunk or key // chunk == position // chunk)
        ]
        for position in range(seq_len - (end - begin), seq_len)
    ]
    first = of_rows[0][0]
    slots = [(int(tables[row, p // block_size]), p % block_size) for p in range(first, seq_len)]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return torch.stack([cache[slot] for slot in slots], dim=1)

    mask = torch.zeros(end - begin, seq_len - first, dtype=torch.bool)
    for i, seen in enumerate(of_rows):
        mask[i, seen[0] - first : seen[-1] - first + 1] = True
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


# A split of a decode is 256 keys, and so is what a prefill takes in at a time.
LONG = [255, 256, 257, 300, 511, 512, 513, 700]


@settings(quick, max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 40, 150]), st.sampled_from(LONG)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sliding_window=st.sampled_from([0, 0, 257, 300]),
    head_dim=st.sampled_from([8, 64]),
    seed=st.integers(0, 1000),
)
@example(rows=((1, 257), (1, 700)), dtype=torch.bfloat16, sliding_window=0, head_dim=64, seed=0)
def test_more_keys_than_are_read_at_a_time_equal_dense_attention(
    attention: Attention, rows: tuple[tuple[int, int], ...], dtype: torch.dtype, **shape: int
) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=rows, dtype=dtype, **shape)
    attention(*args)
    starts, out, tolerance = args[6].tolist(), args[9], TOLERANCE[dtype]
    exact = [x.float() if isinstance(x, torch.Tensor) and x.dtype is dtype else x for x in args]
    for row in range(len(rows)):
        torch.testing.assert_close(
            out[starts[row] : starts[row + 1]].float(),
            dense(tuple(exact), row),
            rtol=tolerance,
            atol=tolerance,
        )


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
        (7, lambda x: x + 10**6, "seq_lens"),
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


@pytest.mark.parametrize("head_dim", [4, 12, 584])
def test_head_sizes_outside_of_the_contract_are_refused(
    library: KernelLibrary, head_dim: int
) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=((1, 3),), head_dim=head_dim)
    with pytest.raises(ValueError, match="head_dim"):
        library.paged_attention(*args)


@pytest.mark.parametrize("case", CACHED_CASES)
def test_keys_that_are_in_the_cache_need_not_come_again(case: dict[str, Any]) -> None:
    writing = PAGED_ATTENTION.build("cpu", **case | {"cached": False})
    before = copied(writing)
    PAGED_ATTENTION.reference(*writing)
    finding = (writing[0], None, None, writing[3].clone(), writing[4].clone(), *before[5:])
    PAGED_ATTENTION.reference(*finding)
    num_tokens = int(writing[6][-1])
    assert torch.equal(finding[9][:num_tokens], writing[9][:num_tokens])
    assert finding[9][num_tokens:].isnan().all(), "padding's output is the caller's business"
    for cache in (3, 4):
        assert torch.equal(finding[cache].view(torch.int32), writing[cache].view(torch.int32))


@pytest.mark.parametrize("missing", [(1, 2), (1,), (2,)])
def test_the_compiled_kernel_refuses_to_find_keys_in_the_cache(
    library: KernelLibrary, missing: tuple[int, ...]
) -> None:
    args = list(PAGED_ATTENTION.build("cpu"))
    for index in missing:
        args[index] = None
    with pytest.raises(ValueError, match="expected key and value"):
        library.paged_attention(*args)


def test_nan_in_a_visible_key_shows(library: KernelLibrary) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=((1, 40), (1, 40)))
    args[1][0] = torch.nan
    library.paged_attention(*args)
    assert args[9][0].isnan().all()
    assert not args[9][1].isnan().any()


@st.composite
def families(draw: st.DrawFn) -> dict[str, Any]:
    """Decoding rows, most of which begin with blocks of one before them, and a few others."""
    block_size = draw(st.sampled_from([4, 16, 48]))
    rows: list[tuple[int, int]] = []
    prefixes: dict[int, tuple[int, int]] = {}
    for row in range(draw(st.integers(2, 6))):
        query_len = draw(st.sampled_from([1, 1, 1, 1, 2, 0]))
        seq_len = max(query_len, draw(st.integers(1, 1100)))
        rows.append((query_len, seq_len))
        if row and draw(st.integers(0, 3)):
            other = draw(st.integers(0, row - 1))
            ends = (seq_len - query_len, rows[other][1] - rows[other][0])
            prefixes[row] = (other, draw(st.integers(0, max(0, min(ends)) // block_size)))
    return {
        "rows": tuple(rows),
        "prefixes": prefixes,
        "block_size": block_size,
        "head_dim": draw(st.sampled_from([8, 24, 32])),
        "num_heads": draw(st.sampled_from([2, 6, 40])),
        "num_kv_heads": 2,
        "sliding_window": draw(st.sampled_from([0, 0, 300])),
        "cap": draw(st.sampled_from([0, 0, 2.0])),
        "has_sinks": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "deterministic": draw(st.booleans()),
        "seed": draw(st.integers(0, 100)),
    }


def alone(args: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    """The call without its other rows, whose keys and values are in the cache."""
    begin, end = int(args[6][row]), int(args[6][row + 1])
    changed = list(args)
    for index in (0, 1, 2, 8, 9):
        changed[index] = args[index][begin:end]
    changed[9] = torch.zeros_like(changed[9])
    changed[5], changed[7] = args[5][row : row + 1], args[7][row : row + 1]
    changed[6] = torch.tensor([0, end - begin], dtype=torch.int32)
    return tuple(changed)


@contextlib.contextmanager
def sharing_off(library: KernelLibrary) -> Iterator[None]:
    """Each row reads for itself."""
    library.share_prefixes(False)
    try:
        yield
    finally:
        library.share_prefixes(True)


@quick
@given(family=families())
def test_rows_that_share_a_prefix_have_the_bits_that_each_has_alone(
    library: KernelLibrary, family: dict[str, Any]
) -> None:
    args = PAGED_ATTENTION.build("cpu", **family)
    library.paged_attention(*args)
    starts, out = args[6].tolist(), args[9].clone()
    with sharing_off(library):
        library.paged_attention(*args)
    assert out.equal(args[9])
    for row in range(len(family["rows"])):
        single = alone(args, row)
        library.paged_attention(*single)
        assert out[starts[row] : starts[row + 1]].equal(single[9])


@pytest.mark.parametrize("heads", [20, 64, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_heads_share_long_prefixes(
    libraries: dict[str, KernelLibrary], heads: int, dtype: torch.dtype, deterministic: bool
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((1, 2100), (1, 2200)),
        prefixes={1: (0, 130)},
        num_heads=heads,
        num_kv_heads=1,
        head_dim=32,
        dtype=dtype,
        deterministic=deterministic,
    )
    for library in libraries.values():
        library.paged_attention(*args)
        out = args[9].clone()
        for row in range(2):
            single = alone(args, row)
            library.paged_attention(*single)
            assert out[row : row + 1].equal(single[9])


def test_a_shared_prefix_is_work_for_all_of_its_rows_at_once(library: KernelLibrary) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "block_size": 16, "head_dim": 64}
    rows, prefixes = ((1, 1040),) * 12, dict.fromkeys(range(1, 12), (0, 64))
    apart = PAGED_ATTENTION.build("cpu", rows=rows, **shape)
    together = PAGED_ATTENTION.build("cpu", rows=rows, prefixes=prefixes, **shape)
    # Five splits of 256 keys, of which the last is each row's own.
    use_threads(2)
    try:
        assert library.attention_items(*apart).items == 12 * 5
        assert library.attention_items(*together).items == 12 + 4
        windowed = (*together[:11], [1.0, 0.0, 600.0, 0.0, 0.0], *together[12:])
        assert library.attention_items(*windowed).items == 12 * 4
        # Two tiles of all of these heads would be more than a second level cache holds.
        shape |= {"num_heads": 16, "num_kv_heads": 16, "head_dim": 256}
        large = PAGED_ATTENTION.build("cpu", rows=((1, 200),) * 4, **shape)
        assert library.attention_items(*large).items == 4 * 8
    finally:
        use_threads(0)


@quick
@given(
    num_rows=st.integers(1, 40),
    splits=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 5, 16]),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    threads=st.integers(1, 64),
)
def test_counts_alone_decide_what_is_read_in_company(
    library: KernelLibrary,
    num_rows: int,
    splits: int,
    heads: int,
    num_kv_heads: int,
    threads: int,
) -> None:
    """As few items as have room for 64 query rows each, and as give every thread two heads."""
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((1, 256 * splits + 1),) * num_rows,
        prefixes=dict.fromkeys(range(1, num_rows), (0, 16 * splits)),
        num_heads=heads * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        block_size=16,
    )
    use_threads(threads)
    try:
        found = library.attention_items(*args)
        with sharing_off(library):
            apart = library.attention_items(*args)
    finally:
        use_threads(0)

    def for_heads(query_rows: int) -> int:
        """Items of a piece with these query rows of each kv head, before any is cut."""
        return math.ceil(num_kv_heads / min(num_kv_heads, 64 // query_rows))

    room = math.ceil(num_rows / (64 // heads))
    work_for_all = math.ceil(2 * threads / (splits * num_kv_heads))
    parts = max(room, work_for_all)
    whole = num_rows * (splits + 1) * for_heads(heads)
    if parts >= num_rows:
        assert found == apart
        uncut = whole
    else:
        ends = [num_rows * part // parts for part in range(parts + 1)]
        members = [end - begin for begin, end in itertools.pairwise(ends)]
        company = sum(for_heads(count * heads) for count in members)
        uncut = num_rows * for_heads(heads) + splits * company
    for cut, fewest in ((apart, whole), (found, uncut)):
        assert cut.busiest <= 1 + max(0.25, cut.one_head) + 1e-9
        assert fewest <= cut.items <= fewest * num_kv_heads


@quick
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    threads=st.integers(1, 16),
)
def test_items_are_cut_until_no_thread_is_done_late(
    library: KernelLibrary, lengths: list[int], num_kv_heads: int, threads: int
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=tuple((1, length) for length in lengths),
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
    )
    use_threads(threads)
    try:
        items, busiest, one_head = library.attention_items(*args)
    finally:
        use_threads(0)
    whole = sum(math.ceil(length / 256) for length in lengths)
    assert busiest <= 1 + max(0.25, one_head) + 1e-9
    assert whole <= items <= whole + (threads - 1) * num_kv_heads
    if threads == 1:
        assert items == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_between_heads_changes_no_bit(library: KernelLibrary, dtype: torch.dtype) -> None:
    # Long enough to be worth more than one thread.
    shape = {"num_heads": 24, "num_kv_heads": 12, "head_dim": 128, "block_size": 16, "dtype": dtype}
    rows, prefixes = ((1, 600), (1, 650), (2, 300)), {1: (0, 32)}
    args = PAGED_ATTENTION.build("cpu", rows=rows, prefixes=prefixes, **shape)
    results, counts = [], set()
    try:
        for threads in (1, 3, 16, 24):
            use_threads(threads)
            library.paged_attention(*args)
            results.append(args[9].clone())
            counts.add(library.attention_items(*args).items)
    finally:
        use_threads(0)
    assert len(counts) > 1
    for result in results[1:]:
        assert result.equal(results[0])
