"""What becomes of scores: the reference against a softmax that is written out, in float64."""

import itertools
import math
from typing import Any

import pytest
import torch

from src.ops import PAGED_ATTENTION, AttentionSpec
from src.ops.attention.backend import AttentionBackend, AttentionKernel
from src.ops.attention.spec import ALL_AHEAD
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import attention_matches, copied

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODIFIERS: list[dict[str, Any]] = [
    {"cap": cap, "has_sinks": has_sinks, "sliding_window": window}
    for cap, has_sinks, window in itertools.product((0, 0.5, 30.0), (False, True), (0, 1, 70))
] + [
    {"chunk": 1},
    {"chunk": 70},
    {"chunk": 256},
    {"chunk": 100, "sliding_window": 40},
    {"chunk": 70, "cap": 30.0, "has_sinks": True},
    {"ahead": 1},
    {"ahead": ALL_AHEAD},
    {"ahead": 40, "sliding_window": 41},
    {"ahead": 3, "sliding_window": 1, "cap": 30.0, "has_sinks": True},
]


def written_out(args: tuple[Any, ...]) -> torch.Tensor:
    """[T, heads, head_dim] float64, one query head and one key after the other."""
    query, key, value, _, _, tables, starts, lengths, *_ = args
    spec = AttentionSpec.of(*args[10:12])
    block_size, kv_heads = args[3].shape[1:3]
    caches = [cache.flatten(0, 1).clone() for cache in args[3:5]]  # [slots, kv_heads, head_dim]
    slots = args[8][args[8] >= 0]
    for cache, new in zip(caches, (key, value), strict=True):
        cache[slots] = new[: len(slots)]
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // kv_heads
    for row, seq_len in enumerate(lengths.tolist()):
        begin, end = starts[row].item(), starts[row + 1].item()
        for token in range(begin, end):
            position = seq_len - (end - token)
            seen = [
                key
                for key in range(seq_len)
                if key - position <= (spec.ahead or 0)
                and (spec.window is None or position - key < spec.window)
                and (spec.chunk is None or key // spec.chunk == position // spec.chunk)
            ]
            at = [tables[row, p // block_size].item() * block_size + p % block_size for p in seen]
            for head in range(query.shape[1]):
                keys, values = (cache[at, head // group].double() for cache in caches)
                scores = spec.scale * (keys @ query[token, head].double())
                if spec.cap is not None:
                    scores = torch.tensor([spec.cap * math.tanh(s / spec.cap) for s in scores])
                weights = scores.double().exp()
                total = weights.sum()
                if spec.sinks is not None:
                    total = total + spec.sinks[head].double().exp()
                out[token, head] = (weights / total) @ values
    return out


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_the_reference_is_the_softmax_written_out(
    monkeypatch: pytest.MonkeyPatch, modifier: dict[str, Any], heads: tuple[int, int]
) -> None:
    # So that what queries of a tile see ends within a row.
    monkeypatch.setattr("src.ops.attention.paged_attention._REFERENCE_QUERY_TILE", 2)
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((3, 80), (5, 5), (1, 290), (0, 3)),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=16,
        block_size=7,
        padding=1,
        **modifier,
    )
    expected = written_out(args)
    PAGED_ATTENTION.reference(*args)
    torch.testing.assert_close(args[9].double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (40, 1)])
def test_every_level_equals_the_reference(
    libraries: dict[str, KernelLibrary],
    modifier: dict[str, Any],
    dtype: torch.dtype,
    heads: tuple[int, int],
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((1, 700), (2, 280), (40, 150), (5, 33), (1, 1), (0, 5), (1, 610)),
        prefixes={6: (0, 32)},
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        padding=1,
        dtype=dtype,
        **modifier,
    )
    for library in libraries.values():
        attention_matches(library.paged_attention, args)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_keys_of_large_heads(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, deterministic: bool
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((1, 2300), (30, 2100), (1, 2200)),
        prefixes={2: (0, 130)},
        num_heads=6,
        num_kv_heads=2,
        head_dim=256,
        cap=50.0,
        has_sinks=True,
        dtype=dtype,
        deterministic=deterministic,
    )
    for library in libraries.values():
        attention_matches(library.paged_attention, args)


def test_a_cap_bounds_scores_that_no_exponential_could_take(
    libraries: dict[str, KernelLibrary],
) -> None:
    for dtype in DTYPES:
        args = PAGED_ATTENTION.build(
            "cpu", rows=((1, 300), (40, 100)), dtype=dtype, cap=50.0, has_sinks=True
        )
        for tensor in (args[0], args[1], args[3]):
            tensor.mul_(30)
        for library in libraries.values():
            attention_matches(library.paged_attention, args)


@pytest.mark.parametrize("cap", [0, 2.0])
def test_a_query_that_is_no_number_shows_beside_a_cap_and_sinks(
    libraries: dict[str, KernelLibrary], cap: float
) -> None:
    for rows in (((1, 320),), ((40, 320),), ((1, 2600),)):
        for dtype in DTYPES:
            args = PAGED_ATTENTION.build("cpu", rows=rows, dtype=dtype, cap=cap, has_sinks=True)
            args[0][:, 0] = torch.nan
            for library in libraries.values():
                some = copied(args)
                library.paged_attention(*some)
                assert some[9][:, 0].isnan().all()
                assert some[9][:, 1:].isfinite().all()


@pytest.mark.parametrize("sink", [-torch.inf, -200.0, 200.0])
def test_a_sink_takes_nothing_or_everything(
    libraries: dict[str, KernelLibrary], sink: float
) -> None:
    for dtype in DTYPES:
        args = PAGED_ATTENTION.build("cpu", rows=((1, 300), (40, 100)), dtype=dtype, has_sinks=True)
        plain = copied(args)
        PAGED_ATTENTION.reference(*plain[:10], None, *plain[11:])
        args[10].fill_(sink)
        for library in libraries.values():
            some = copied(args)
            library.paged_attention(*some)
            if sink > 0:
                assert not some[9].any()
            else:
                torch.testing.assert_close(some[9], plain[9], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cap": 0.0}, "cap above 0"),
        ({"cap": -1.0}, "cap above 0"),
        ({"cap": math.nan}, "cap above 0"),
        ({"window": 0}, "window of at least 1"),
        ({"chunk": 0}, "chunk of at least 1"),
        ({"ahead": 0}, "ahead of at least 1"),
        ({"ahead": ALL_AHEAD + 1}, "ahead up to"),
        ({"ahead": 1, "chunk": 4}, "without chunks"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks float32"),
        ({"sinks": torch.zeros(4, 1)}, "sinks float32"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(1.0, **fields)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(8)[::2]])
def test_sinks_that_would_be_read_elsewhere_are_refused(
    library: KernelLibrary, sinks: torch.Tensor
) -> None:
    args = PAGED_ATTENTION.build("cpu", num_heads=4)
    with pytest.raises(ValueError, match="sinks"):
        library.paged_attention(*args[:10], sinks, *args[11:])


def test_a_spec_comes_back_from_the_ops_arguments() -> None:
    sinks = torch.ones(2)
    reaches = ((None, None), (8, None), (None, 3), (None, ALL_AHEAD))
    options = itertools.product((None, 2.5), (None, 3), reaches, (None, sinks))
    for cap, window, (chunk, ahead), given in options:
        spec = AttentionSpec(0.5, cap, window, chunk, given, ahead)
        again = AttentionSpec.of(spec.sinks, spec.scalars())
        assert (again.scale, again.cap, again.window, again.chunk) == (0.5, cap, window, chunk)
        assert again.ahead == ahead
        assert again.sinks is given
        fields = {"cap": cap, "window": window, "chunk": chunk, "sinks": given, "ahead": ahead}
        assert again.features == {name for name, value in fields.items() if value is not None}


def test_what_a_backend_does_not_honour_goes_to_one_that_does() -> None:
    served: list[str] = []

    def kernel(name: str, honours: set[str]) -> AttentionKernel:
        def run(*args: Any) -> None:
            served.append(name)
            PAGED_ATTENTION.reference(*args)

        return AttentionKernel(name, run, frozenset(honours))

    backend = AttentionBackend(kernel("first", {"window"}), kernel("second", {"window", "cap"}))
    for modifier, expected in (
        ({}, "first"),
        ({"sliding_window": 5}, "first"),
        ({"cap": 2.0}, "second"),
        ({"cap": 2.0, "sliding_window": 5}, "second"),
        ({"chunk": 5}, "reference"),
        ({"has_sinks": True}, "reference"),
    ):
        args = PAGED_ATTENTION.build("cpu", **modifier)
        assert backend.kernel_for(AttentionSpec.of(*args[10:12]).features).name == expected
        served.clear()
        attention_matches(lambda *given: PAGED_ATTENTION.overload(*given, backend.handle), args)
        assert served == ([] if expected == "reference" else [expected])
