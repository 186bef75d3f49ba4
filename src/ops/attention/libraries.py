"""External attention libraries for rows with several query tokens, behind the op's declaration.

The Triton kernels still write the cache and serve rows with one query token. So the kernel of a row
depends on that row alone. A library gets the arguments of the op: block tables and lengths on the
device, bounds on the host. No library call may wait for the device.

Libraries come in many builds, and a call without a compiled kernel only shows by its error. So
`open_library` finds out what a library supports by trying it.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from src.ops.attention.backend import AttentionKernel
from src.ops.attention.call import PagedAttention
from src.ops.attention.paged_attention import PAGED_ATTENTION
from src.ops.attention.spec import AttentionSpec

# Rows (query_len, seq_len) of the trial. The last has enough queries to select a path that copies
# whole blocks, and so also reads behind a row's end.
_TRIAL_ROWS = ((1, 1), (0, 5), (1, 700), (40, 40), (5, 33), (256, 900))
_TRIAL_WINDOW = 300
_TRIAL_CAP = 2.0
# Both accumulate in float32; the order of sums and the rounding of the result differ.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

_HOPPER, _BLACKWELL = 9, 10  # major compute capabilities


class LibraryUnavailableError(Exception):
    """A library is not there, or cannot do what is needed; the message says why."""


class NothingHonouredError(LibraryUnavailableError):
    """A library supports the model's score modifiers in no layer; other libraries may."""


class Prefill(Protocol):
    """Attends over keys and values that are in the cache already.

    Arguments are those of `paged_attention`. Block table entries before a window are negative. The
    output for rows with one query token is ignored. Padding tokens already have their output, which
    must not change.
    """

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        spec: AttentionSpec,
        max_query_len: int,
        max_seq_len: int,
    ) -> None: ...


class AttentionShape(NamedTuple):
    """Everything that may select another code path of a library and is constant for a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    features: frozenset[str] = frozenset()  # of its `AttentionSpec`


class LibraryAttention:
    """A kernel of paged attention that uses a library for the shapes on which it was tried.

    Parameters
    ----------
    prefill
        The library's function.
    shapes
        The shapes that it supports. The Triton kernels alone serve other shapes, decode steps and
        deterministic engines.
    base
        `launch` of the Triton kernels.
    """

    def __init__(
        self, prefill: Prefill, shapes: Iterable[AttentionShape], base: Callable[..., None]
    ) -> None:
        self._prefill = prefill
        self._shapes = frozenset(shapes)
        self._base = base

    def run(self, call: PagedAttention) -> None:
        """Compute a call."""
        able = False
        if call.max_query_len > 1 and not call.deterministic:
            block_size, num_kv_heads, head_dim = call.key_cache.shape[1:]
            shape = AttentionShape(
                num_heads=call.query.shape[1],
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                dtype=call.query.dtype,
                features=call.spec.features,
            )
            able = shape in self._shapes
        self._base(call, prefill=self._prefill if able else None)


class Library(NamedTuple):
    """An opened library.

    Attributes
    ----------
    honours
        Fields of `AttentionSpec` beside `scale` that `prefill` supports.
    close
        Undoes the process-wide changes of opening it.
    """

    prefill: Prefill
    honours: frozenset[str]
    close: Callable[[], None] = lambda: None


def flash_attention_3(capability: int) -> Library:
    """FlashAttention-3 by its own interface (J. Shah et al., 2024), package `flash_attn_3`.

    Parameters
    ----------
    capability
        Major compute capability of the device.

    Raises
    ------
    LibraryUnavailableError
        It is not installed, or does not support this device.
    """
    if capability != _HOPPER:
        # On another device, the library's own launch check would end the process.
        raise LibraryUnavailableError(f"is for compute capability 9, the device's is {capability}")
    attend = getattr(_imported("flash_attn_interface"), "flash_attn_with_kvcache", None)
    _require_parameters(
        attend, ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "num_splits")
    )
    assert attend is not None
    keys_of = _KeysOfLongerRows()

    def prefill(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        spec: AttentionSpec,
        max_query_len: int,
        max_seq_len: int,
    ) -> None:
        tables, lengths = keys_of(
            block_tables, query_start_loc, seq_lens, key_cache.shape[1], spec.window
        )
        attended = attend(
            query,
            key_cache,
            value_cache,
            cache_seqlens=lengths,
            page_table=tables,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            num_splits=1,
        )  # [T, heads, head_dim], a new tensor: padding tokens are not written
        tokens = torch.arange(len(out), device=out.device)
        is_real = (tokens < query_start_loc[-1])[:, None, None]  # [T, 1, 1] bool
        torch.where(is_real, attended, out, out=out)

    return Library(prefill, frozenset({"window"}))


def torch_varlen(capability: int) -> Library:
    """`varlen_attn_out` of torch; FlashAttention-3 (FlashAttention-4 on Blackwell) does the paging.

    Opening it also makes torch's own attention functions use that implementation, in the whole
    process.

    Parameters
    ----------
    capability
        Major compute capability of the device.

    Raises
    ------
    LibraryUnavailableError
        This torch lacks block tables, or an implementation of them.
    """
    wanted = {_HOPPER: "FA3", _BLACKWELL: "FA4"}.get(capability)
    if wanted is None:
        raise LibraryUnavailableError(
            f"has block tables on compute capability 9 and 10, the device's is {capability}"
        )
    attend = getattr(_imported("torch.nn.attention.varlen"), "varlen_attn_out", None)
    _require_parameters(attend, ("seqused_k", "block_table", "num_splits", "enable_gqa"))
    assert attend is not None
    close = _activate(wanted)
    keys_of = _KeysOfLongerRows()

    def prefill(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        spec: AttentionSpec,
        max_query_len: int,
        max_seq_len: int,
    ) -> None:
        tables, lengths = keys_of(
            block_tables, query_start_loc, seq_lens, key_cache.shape[1], spec.window
        )
        attend(
            out,
            query,
            key_cache,
            value_cache,
            query_start_loc,
            None,
            max_query_len,
            max_seq_len,
            scale=spec.scale,
            window_size=_window(spec),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=tables,
            num_splits=1,
        )

    return Library(prefill, frozenset({"window"}), close)


LIBRARIES: Mapping[str, Callable[[int], Library]] = {
    "flash_attention_3": flash_attention_3,
    "torch_varlen": torch_varlen,
}
"""Name -> the function that opens it, in order of preference."""


def open_library(
    name: str, device: torch.device, shapes: Iterable[AttentionShape]
) -> AttentionKernel:
    """The kernel of `LIBRARIES[name]`, after a trial on every one of `shapes`. Synchronizes.

    Shapes with features that the library does not support are left to other kernels and not tried.

    Raises
    ------
    LibraryUnavailableError
        It fails for one of the other shapes, or there are none.
    """
    shapes = frozenset(shapes)
    for shape in shapes:
        if shape.dtype not in _TOLERANCE:
            dtype = str(shape.dtype).removeprefix("torch.")
            raise LibraryUnavailableError(f"takes bfloat16 and float16, the model is in {dtype}")
    # A package built for another torch or CUDA may raise anything, when it is imported or when a
    # kernel is launched.
    try:
        base = importlib.import_module("src.ops.attention.paged_attention_triton").launch
        library = LIBRARIES[name](torch.cuda.get_device_capability(device)[0])
    except LibraryUnavailableError:
        raise
    except Exception as error:
        raise LibraryUnavailableError(f"cannot be opened: {_text(error)}") from error
    shapes = frozenset(shape for shape in shapes if shape.features <= library.honours)
    if not shapes:
        library.close()
        raise NothingHonouredError("does not do what becomes of the scores in any layer")
    attention = LibraryAttention(library.prefill, shapes, base)
    try:
        for shape in shapes:
            _try(attention.run, shape, device)
    except Exception as error:
        library.close()
        if device.type == "cuda":
            # If the device cannot recover from the error, the start ends here with the CUDA error.
            torch.cuda.synchronize(device)
        if isinstance(error, LibraryUnavailableError):
            raise
        raise LibraryUnavailableError(f"fails with {_words(shape)}: {_text(error)}") from error
    return AttentionKernel(name, PagedAttention.taking_flat(attention.run), library.honours)


def _try(run: Callable[..., None], shape: AttentionShape, device: torch.device) -> None:
    """Compare one call with the reference; everything that must not be read is NaN."""
    args = PAGED_ATTENTION.build(
        str(device),
        rows=_TRIAL_ROWS,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        sliding_window=_TRIAL_WINDOW if "window" in shape.features else 0,
        cap=_TRIAL_CAP if "cap" in shape.features else 0,
        has_sinks="sinks" in shape.features,
        padding=3,
    )
    call = PagedAttention.of_flat(*args)
    expected = call.replace(
        key_cache=call.key_cache.clone(), value_cache=call.value_cache.clone(), out=call.out.clone()
    )
    with torch.inference_mode():
        PAGED_ATTENTION.reference(*expected.flat())
        run(call)
    got, right = call.out, expected.out
    tolerance = _TOLERANCE[shape.dtype]
    if not torch.allclose(got, right, rtol=tolerance, atol=tolerance):
        difference = (got.float() - right.float()).abs().max().item()
        raise LibraryUnavailableError(
            f"gives other results than the reference with {_words(shape)}: "
            f"they differ by up to {difference:.3g}"
        )


class _KeysOfLongerRows:
    """Block tables and lengths for a library, which serves rows with several query tokens.

    Rows with one query token get length 0, because other kernels serve them. Whole blocks before a
    window are cut off; nothing else in a call depends on where a row begins. They must be, since a
    library's tile may begin before the window. The library would then look up masked blocks and
    multiply their contents by 0, and another request's contents might be NaN.

    In one step, all layers of a group pass the same tensors; each step has new ones. So the first
    layer's result is kept as long as its input tensors live.
    """

    def __init__(self) -> None:
        # Window -> (input tensors, result). Groups of layers differ in both.
        self._made: dict[int | None, tuple[tuple[weakref.ref[Tensor], ...], _Keys]] = {}

    def __call__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_size: int,
        window: int | None,
    ) -> _Keys:
        """Block tables [B, max_blocks] and lengths [B], both int32."""
        given = (block_tables, query_start_loc, seq_lens)
        made_of, made = self._made.get(window, ((), None))
        if made is None or any(of() is not one for of, one in zip(made_of, given, strict=True)):
            made = _keys_of_longer_rows(*given, block_size, window)
            self._made[window] = tuple(map(weakref.ref, given)), made
        return made


_Keys = tuple[Tensor, Tensor]


def _keys_of_longer_rows(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    window: int | None,
) -> _Keys:
    query_lens = query_start_loc.diff()
    if window is not None and block_tables.shape[1]:
        # [B] int32, row -> number of blocks before the first key that its first query sees.
        passed = (seq_lens - query_lens - window + 1).clamp(min=0) // block_size
        last = block_tables.shape[1] - 1
        columns = torch.arange(last + 1, device=block_tables.device) + passed[:, None]
        block_tables = block_tables.gather(1, columns.clamp(max=last))
        seq_lens = seq_lens - passed * block_size
    return block_tables, seq_lens * (query_lens > 1)


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Number of keys before and after its own position that a query sees; -1 means all."""
    return (spec.window or 0) - 1, 0


def _activate(wanted: str) -> Callable[[], None]:
    """Make `wanted` torch's flash attention; returns the function that undoes it."""
    attention = importlib.import_module("torch.nn.attention")
    active = attention.current_flash_attention_impl()
    if active == wanted:
        return lambda: None
    if active is not None:
        raise LibraryUnavailableError(
            f"needs {wanted} as torch's flash attention, for which this program has taken {active}"
        )
    try:
        attention.activate_flash_attention_impl(wanted)
    except ModuleNotFoundError as error:
        raise LibraryUnavailableError(
            f"needs {wanted} for block tables: no module named {error.name}"
        ) from error
    restore: Callable[[], None] = attention.restore_flash_attention_impl
    return restore


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise LibraryUnavailableError(f"is not installed: no module named {error.name}") from error


def _require_parameters(function: Callable[..., Any] | None, needed: Iterable[str]) -> None:
    there = () if function is None else inspect.signature(function).parameters
    missing = [name for name in needed if name not in there]
    if missing:
        raise LibraryUnavailableError(f"is another version, without {', '.join(missing)}")


def _words(shape: AttentionShape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    return (
        f"{shape.num_heads} heads over {shape.num_kv_heads} of {shape.head_dim} {dtype} in blocks "
        f"of {shape.block_size}{''.join(f', {name}' for name in sorted(shape.features))}"
    )


def _text(error: Exception) -> str:
    """The first line of the error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
