"""Attention libraries behind the op: how they are called, tried, and refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as torch_library

from src.ops import PAGED_ATTENTION, AttentionSpec
from src.ops.attention.call import PagedAttention
from src.ops.attention.libraries import (
    LIBRARIES,
    AttentionShape,
    Library,
    LibraryAttention,
    LibraryUnavailableError,
    open_library,
)
from tests.ops import flash_attention_stand_in as stand_in
from tests.ops.comparison import attention_matches, copied

CPU = torch.device("cpu")
HALF_CASES = [
    # What is float32 by default is bfloat16 here: no library takes float32.
    {**case, "dtype": case.get("dtype", torch.bfloat16)}
    for case in PAGED_ATTENTION.cases
    # Nor does one take a cache in 8 bits.
    if case.get("dtype") != torch.float32 and "cache_dtype" not in case
]
# Of torch's function in the version that is installed.
VERSION_HAS_PAGES = (
    "block_table"
    in inspect.signature(import_module("torch.nn.attention.varlen").varlen_attn).parameters
)
HOPPER_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_pages = pytest.mark.skipif(
    not VERSION_HAS_PAGES, reason="this torch's varlen_attn has no block tables"
)
PAGED_LIBRARIES = ["flash_attention_3", pytest.param("torch_varlen", marks=needs_pages)]
WINDOWED = frozenset({"window"})
SHAPE = AttentionShape(4, 2, 64, 16, torch.bfloat16)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> stand_in.TritonInTorch:
    """What a library finds where it expects the Triton kernels, on what looks like a Hopper."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    return stand_in.pretend_hopper(monkeypatch)


@pytest.fixture
def flash_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in installed, with the kernels by whose names torch finds it."""
    stand_in.install(monkeypatch)
    kernels = torch_library.Library("flash_attn_3", "FRAGMENT")
    kernels.define("fwd(Tensor q) -> Tensor")
    kernels.define("bwd(Tensor q) -> Tensor")
    yield
    attention = import_module("torch.nn.attention")
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    kernels._destroy()


@pytest.fixture
def torch_on_cpu(flash_module: None) -> Iterator[None]:
    """The stand-in as what torch's own `varlen_attn_out` calls, below its schema."""

    def forward(
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert cum_seq_k is None, "not with pages"
        assert seqused_k is not None
        assert block_table is not None
        assert scale is not None
        assert num_splits == 1, "the split changes with the batch"
        assert int(seqused_k.max()) <= max_k
        left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
        stand_in.paged_varlen(
            out, query, key, value, cum_seq_q, seqused_k, block_table, max_q, scale,
            causal=is_causal, window_size=(left, right),
        )  # fmt: skip
        return query.new_empty(query.shape[1::-1], dtype=torch.float32)

    implementation = torch_library.Library("aten", "IMPL")
    implementation.impl("_flash_attention_forward_no_dropout_inplace", forward, "CPU")
    yield
    implementation._destroy()


def shape_of(args: tuple[Any, ...]) -> AttentionShape:
    query, cache, spec = args[0], args[3], AttentionSpec.of(*args[10:12])
    block_size, kv_heads, head_dim = cache.shape[1:]
    return AttentionShape(
        query.shape[1], kv_heads, head_dim, block_size, query.dtype, spec.features
    )


def opened(
    library: Library, args: tuple[Any, ...], base: Callable[..., None]
) -> tuple[LibraryAttention, bool]:
    """For the shape of these, and whether it is the library's: all of its features are honoured."""
    shape = shape_of(args)
    able = shape.features <= library.honours
    return LibraryAttention(library.prefill, [shape] if able else [], base), able


def called_as_the_op(name: str, base: stand_in.TritonInTorch, case: dict[str, Any]) -> None:
    args = PAGED_ATTENTION.build("cpu", **case)
    attention, able = opened(LIBRARIES[name](9), args, base)
    with torch.inference_mode():
        attention_matches(PagedAttention.taking_flat(attention.run), args)
    max_query_len, deterministic = args[12], args[14]
    assert base.prefill_calls == (able and max_query_len > 1 and not deterministic)


@pytest.mark.parametrize("case", HALF_CASES)
def test_flash_attention_3_is_called_as_the_op(
    case: dict[str, Any], base: stand_in.TritonInTorch, flash_module: None
) -> None:
    called_as_the_op("flash_attention_3", base, case)


@needs_pages
@pytest.mark.parametrize("case", HALF_CASES)
def test_torch_varlen_is_called_as_the_op(
    case: dict[str, Any], base: stand_in.TritonInTorch, torch_on_cpu: None
) -> None:
    called_as_the_op("torch_varlen", base, case)


@pytest.mark.parametrize("name", PAGED_LIBRARIES)
def test_lengths_are_computed_once_for_all_layers_of_a_step(
    name: str,
    base: stand_in.TritonInTorch,
    torch_on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = LibraryAttention(LIBRARIES[name](9).prefill, [SHAPE], base)
    given: list[int] = []
    attend = stand_in.paged_varlen

    def noted(*args: Any, **more: Any) -> None:
        given.append(id(args[5]))
        attend(*args, **more)

    monkeypatch.setattr(stand_in, "paged_varlen", noted)
    for rows in (((1, 40), (5, 20)), ((7, 9), (1, 3)), ((1, 2), (2, 2))):
        args = PAGED_ATTENTION.build("cpu", dtype=torch.bfloat16, rows=rows)
        given.clear()
        for _ in range(3):  # layers: another cache, the step's own lengths
            layer = list(copied(args))
            layer[6:8] = args[6:8]
            expected = copied(tuple(layer))
            PAGED_ATTENTION.reference(*expected)
            attention.run(PagedAttention.of_flat(*layer))
            torch.testing.assert_close(layer[9], expected[9], rtol=2e-2, atol=2e-2)
        assert len(given) == 3
        assert len(set(given)) == 1


def test_what_was_not_tried_is_left_to_triton(
    base: stand_in.TritonInTorch, flash_module: None
) -> None:
    attention = LibraryAttention(LIBRARIES["flash_attention_3"](9).prefill, [SHAPE], base)
    tried: dict[str, Any] = {"dtype": torch.bfloat16}
    for other in (
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"head_dim": 72},
        {"block_size": 5},
        {"sliding_window": 7},
        {"num_heads": 6},
        {"num_heads": 4, "num_kv_heads": 4},
        {"deterministic": True},
        {"rows": ((1, 40), (1, 7), (0, 3))},
    ):
        attention_matches(
            PagedAttention.taking_flat(attention.run),
            PAGED_ATTENTION.build("cpu", **(tried | other)),
        )
    assert base.prefill_calls == 0
    attention_matches(
        PagedAttention.taking_flat(attention.run), PAGED_ATTENTION.build("cpu", **tried)
    )
    assert base.prefill_calls == 1


@pytest.mark.parametrize("name", PAGED_LIBRARIES)
def test_an_opened_library_has_been_tried_on_every_shape(
    name: str, base: stand_in.TritonInTorch, torch_on_cpu: None
) -> None:
    shapes = [SHAPE, SHAPE._replace(features=WINDOWED, dtype=torch.float16)]
    kernel = open_library(name, CPU, shapes)
    assert kernel.name == name
    assert base.prefill_calls == 2
    attention_matches(kernel.run, PAGED_ATTENTION.build("cpu", dtype=torch.bfloat16))
    assert base.prefill_calls == 3


@needs_pages
def test_torchs_flash_attention_is_as_before_where_the_trial_fails(
    base: stand_in.TritonInTorch, flash_module: None
) -> None:
    attention = import_module("torch.nn.attention")
    # Nothing serves the CPU here, so the trial's call is an error.
    with pytest.raises(LibraryUnavailableError, match=r"fails with 4 heads over 2 of 64 bfloat16"):
        open_library("torch_varlen", CPU, [SHAPE])
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("FA3")
    with pytest.raises(LibraryUnavailableError, match="fails with"):
        open_library("torch_varlen", CPU, [SHAPE])
    assert attention.current_flash_attention_impl() == "FA3", "it was the program's before"


@wraps(stand_in.flash_attn_with_kvcache)
def wrong_window(*args: Any, window_size: tuple[int, int], **more: Any) -> Tensor:
    left, right = window_size
    return stand_in.flash_attn_with_kvcache(*args, window_size=(left + 1, right), **more)


@wraps(stand_in.flash_attn_with_kvcache)
def with_whole_pages(*args: Any, **more: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "paged_varlen", partial(stand_in.paged_varlen, whole_pages=True))
        return stand_in.flash_attn_with_kvcache(*args, **more)


def without_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> None:
    """An interface before pages and lengths of queries."""


@pytest.mark.parametrize(
    ("function", "features", "reason"),
    [
        (wrong_window, WINDOWED, "gives other results than the reference with .* window"),
        # Values behind a row's end are another request's, and might be NaN.
        (with_whole_pages, frozenset(), "gives other results .* differ by up to nan"),
        (without_pages, frozenset(), "is another version, without page_table, cu_seqlens_q"),
    ],
)
def test_a_library_that_does_something_else_is_refused(
    function: Callable[..., Any],
    features: frozenset[str],
    reason: str,
    base: stand_in.TritonInTorch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.install(monkeypatch, flash_attn_with_kvcache=function)
    with pytest.raises(LibraryUnavailableError, match=reason):
        open_library("flash_attention_3", CPU, [SHAPE._replace(features=features)])


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_cannot_serve_the_model_is_refused(
    name: str, base: stand_in.TritonInTorch, flash_module: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LibraryUnavailableError, match=r"the model is in float32"):
        open_library(name, CPU, [SHAPE._replace(dtype=torch.float32)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(LibraryUnavailableError, match=r"compute capability 9.* is 8"):
        open_library(name, CPU, [SHAPE])


def test_what_is_not_installed_is_refused(
    base: stand_in.TritonInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    for name in LIBRARIES if VERSION_HAS_PAGES else ("flash_attention_3",):
        with pytest.raises(LibraryUnavailableError, match="flash_attn_interface"):
            open_library(name, CPU, [SHAPE])


def test_another_implementation_of_the_program_is_left_alone(
    base: stand_in.TritonInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = import_module("torch.nn.attention")
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    if not VERSION_HAS_PAGES:
        reason = "another version, without .*block_table"
    else:
        reason = "needs FA3 .* taken FA4"
    with pytest.raises(LibraryUnavailableError, match=reason):
        open_library("torch_varlen", CPU, [SHAPE])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER_GPU, reason="FlashAttention-3 is for Hopper")
@pytest.mark.parametrize("name", PAGED_LIBRARIES)
def test_a_library_on_its_device_equals_the_reference(name: str) -> None:
    pytest.importorskip("flash_attn_interface", reason="FlashAttention-3 is not installed")
    run = import_module("src.ops.attention.paged_attention_triton").launch
    library = LIBRARIES[name](9)
    try:
        for case in HALF_CASES:
            args = PAGED_ATTENTION.build("cuda", **case)
            attention, _ = opened(library, args, run)
            attention_matches(PagedAttention.taking_flat(attention.run), args)
            again = copied(args)
            torch.cuda.set_sync_debug_mode("error")
            try:
                attention.run(PagedAttention.of_flat(*again))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        library.close()
