"""A compiled kernel library, called through ctypes (which releases the GIL).

The C++ side has a plain C interface: arguments travel as one packed struct of pointers, strides
and sizes (`abi.h`), so a call costs a few microseconds of Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.ops.attention.cached_rows import is_coded, kind_of, row_size
from src.ops.attention.spec import AttentionSpec
from src.ops.host_memory import lazy_zeros
from src.ops.matrix import NUMBERS, STRIP, Encoding, Matrix, Tiling, fits_strips
from src.ops.runtime import abi
from src.ops.runtime.calls import DTYPES as DTYPES
from src.ops.runtime.calls import address_of, kernel_threads, raise_status
from src.ops.runtime.packing import bind
from src.ops.runtime.way_calls import LibraryWays

WAKE_COST = 50.0
"""Microseconds to wake a thread, as a library assumes at first."""

_DOUBLES = ctypes.POINTER(ctypes.c_double)
# Calls with more words of masks take long enough to release the GIL.
_QUICK_WORDS = 1 << 15


class UnusableLibraryError(Exception):
    """The file cannot be loaded, or is not a kernel library of this version."""


class AttentionItems(NamedTuple):
    """How an attention call is cut. Shares are relative to an equal share per thread."""

    items: int
    busiest: float  # load of the busiest thread; 1.0 is perfectly even
    one_head: float  # largest cost of one kv head of an item


class KernelLibrary:
    """One built instruction set level.

    The kernels are `paged_attention`, `latent_attention`, `gumbel_argmax`, `streamed_linear`,
    `experts`, `causal_convolution`, `linear_recurrence` and `lora`. Other compiled functions are
    `send`, which sends to many sockets without the GIL, and the results of `bind_masks` and
    `bind_grammar_steps`. `ways` chooses how quantized weights are multiplied.

    Attributes
    ----------
    has_measured_ways
        Whether the choice of ways is the one that the builder measured, or a fixed table.
    """

    has_measured_ways = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # AttributeError: the library lacks our symbols.
            self._library = ctypes.CDLL(str(path))
            built_from = self._library.slipstream_abi()
            self._philox = self._library.slipstream_philox
        except (OSError, AttributeError) as error:
            raise UnusableLibraryError(f"{path}: {error}") from error
        if built_from != abi.ABI:
            raise UnusableLibraryError(f"{path}: expected interface {abi.ABI}, got {built_from}")
        self._philox.argtypes = (ctypes.c_uint64,) * 3 + (ctypes.c_void_p,)
        self.paged_attention = bind_attention(self._library.slipstream_paged_attention)
        self.latent_attention = bind(
            self._library.slipstream_latent_attention,
            abi.LatentArgs,
            computed={"spec": lambda scale: abi.AttentionSpec.of(AttentionSpec(scale))},
        )
        self._items: Any = self._library.slipstream_attention_items
        self._items.argtypes, self._items.restype = (
            (ctypes.POINTER(abi.AttentionArgs), _DOUBLES),
            ctypes.c_int64,
        )
        self.gumbel_argmax = bind(self._library.slipstream_gumbel_argmax, abi.GumbelArgs)
        self.streamed_linear = bind(self._library.slipstream_linear, abi.LinearArgs)
        self.ways = LibraryWays(self._library)
        self.experts = bind(self._library.slipstream_experts, abi.ExpertsArgs)
        self.lora = bind(self._library.slipstream_lora, abi.LoraArgs)
        self.causal_convolution = bind(self._library.slipstream_convolution, abi.ConvolutionArgs)
        self.linear_recurrence = bind(self._library.slipstream_recurrence, abi.RecurrenceArgs)
        self.send = _bind_send(self._library)

    def attention_items(self, *arguments: Any) -> AttentionItems:
        """How a call of `paged_attention` with these arguments would be cut into items."""
        items, shares = 0, (ctypes.c_double * 2)()

        def ask(call: Any) -> int:
            nonlocal items
            items = int(self._items(call, shares))
            return max(0, -items)

        bind_attention(ask)(*arguments)
        return AttentionItems(items, *shares)

    def share_prefixes(self, share: bool) -> None:
        """Set whether decoding rows read shared prefixes together; off only for measurements."""
        function: Any = self._library.slipstream_share_prefixes
        function.argtypes, function.restype = (ctypes.c_int,), None
        function(share)

    def lay_out(self, weight: Tensor) -> Tensor:
        """`ops.matrix.to_strips` in place: the result uses the memory of ``weight``.

        Parameters
        ----------
        weight
            [N, K] bfloat16, contiguous; no other view of it may be in use.

        Raises
        ------
        ValueError
            It does not fit strips, or is not contiguous.
        """
        is_laid_out = weight.is_cpu and weight.is_contiguous()
        if not (fits_strips(weight) and weight.dtype == torch.bfloat16 and is_laid_out):
            raise ValueError(f"{tuple(weight.shape)} of {weight.dtype} cannot be cut into strips")
        strips, words = weight.shape[0] // STRIP, weight.shape[1] // 2
        function: Any = self._library.slipstream_lay_out
        function.argtypes = (ctypes.POINTER(abi.LayOutArgs),)
        status = function(
            abi.LayOutArgs(
                weight=weight.data_ptr(), strips=strips, words=words, threads=kernel_threads()
            )
        )
        if status:
            raise_status(status)
        return weight.view(strips, words, 2 * STRIP)

    def quantize(self, weight: Tensor, number: str, group_size: int, *, tiled: bool) -> Matrix:
        """`projections.rounding.quantize`, with identical bits.

        Parameters
        ----------
        weight
            [N, K] float32, bfloat16 or float16, contiguous and finite.
        number
            `int8`, by row; or `int4`, by `group_size` weights of a row.
        tiled
            Whether to pack in tiles, if the shape fits.

        Raises
        ------
        ValueError
            K is not a multiple of 32, or of the group size.
        """
        rows, inputs = weight.shape
        traits, in_groups = NUMBERS[number], number == "int4"
        if not (weight.is_cpu and weight.is_contiguous()):
            raise ValueError("expected contiguous weights in host memory")
        groups = inputs // group_size if in_groups else 1
        columns, tiles = inputs * traits.bits // 8, -(-rows // STRIP)
        # Tiles are as large as rows, except for the padding of a last tile.
        values = lazy_zeros((tiles * STRIP, columns), traits.dtype)
        dtype = torch.bfloat16 if in_groups else torch.float32
        scales = torch.empty((rows, groups) if in_groups else rows, dtype=dtype)
        offsets = torch.empty_like(scales) if in_groups else None
        tiling = Tiling.TILES if tiled and fits_strips(values[:rows]) else Tiling.ROWS
        is_tiled = tiling is Tiling.TILES
        values = values.view(tiles, columns // 4, -1) if is_tiled else values[:rows]
        encoding = Encoding(number, group_size if in_groups else None, dtype, in_groups)
        matrix = Matrix(values, encoding, scales, offsets, tiling=tiling)
        function: Any = self._library.slipstream_quantize
        function.argtypes = (ctypes.POINTER(abi.QuantizeArgs),)
        status = function(
            abi.QuantizeArgs(
                weight=weight.data_ptr(),
                values=values.data_ptr(),
                scales=scales.data_ptr(),
                offsets=address_of(offsets),
                rows=rows,
                inputs=inputs,
                dtype=DTYPES[weight.dtype],
                kind=matrix.kind,
                group=group_size,
                threads=kernel_threads(),
            )
        )
        if status:
            raise_status(status)
        if offsets is None or not is_tiled:
            return matrix
        by_row = (each.view(tiles, STRIP, groups).transpose(1, 2) for each in (scales, offsets))
        scales, offsets = (lazy_zeros(each.shape, each.dtype).copy_(each) for each in by_row)
        return matrix._replace(scales=scales, offsets=offsets)

    def bind_masks(
        self, masks: np.ndarray, ends: np.ndarray, allowed: np.ndarray, constraints: np.ndarray
    ) -> Callable[[Sequence[int]], Sequence[int] | None]:
        """A function that applies the requests' own constraints to masks of rows, in place.

        `masks`, `ends` and `allowed` are int32 [R, W], `constraints` is uint8 [R]; see MaskArgs in
        `abi.h`. The function takes rows. It returns a list with 1 for each row that has a possible
        token and 0 for others, or None if all rows have one.
        """
        packed = _pack_masks(masks, ends, allowed, constraints)
        words = masks.shape[1]
        # Small calls keep the GIL: re-acquiring it can take longer than the call.
        quick: Any = ctypes.PyDLL(str(self.path)).slipstream_restrict_masks
        patient: Any = self._library.slipstream_restrict_masks
        for function in (quick, patient):
            function.restype = ctypes.c_int64
            function.argtypes = (
                ctypes.POINTER(abi.MaskArgs),
                ctypes.c_void_p,
                ctypes.c_int64,
                ctypes.c_void_p,
            )
        held = (masks, ends, allowed, constraints)

        def restrict(rows: Sequence[int]) -> Sequence[int] | None:
            numbers = array("q", rows)
            address, count = numbers.buffer_info()
            possible = array("B", bytes(count))
            function = quick if count * words <= _QUICK_WORDS else patient
            impossible = function(packed, address, count, possible.buffer_info()[0])
            if impossible < 0:
                raise ValueError(f"expected rows below {len(held[0])}, got {list(rows)}")
            return possible if impossible else None

        return restrict

    def bind_grammar_steps(
        self,
        functions: tuple[int, int],
        tables: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        ordinary: float,
    ) -> Callable[[np.ndarray], tuple[int, int, float]]:
        """A function that makes grammar steps: it runs matchers of llguidance and writes masks.

        `functions` are the addresses of MatcherFunctions, see `abi.h`; `tables` are masks, ends,
        allowed and constraints as in `bind_masks`. The function takes int64 [M, 3], contiguous:
        address, row and token (negative for none) of each step. It makes them in order, and stops
        after the first that has another Outcome than kAdvanced or takes longer than `ordinary`
        seconds. It returns how many it made, and the Outcome and the CPU time in seconds of the
        last one. Any thread may call it, for rows and matchers that no other thread is using.
        """
        packed = _pack_masks(*tables)
        addresses = (ctypes.c_void_p * 2)(*functions)
        function: Any = self._library.slipstream_grammar_steps
        function.restype = ctypes.c_int64
        function.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(abi.MaskArgs),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_double,
            ctypes.POINTER(abi.LastGrammarStep),
        )

        def advance(steps: np.ndarray) -> tuple[int, int, float]:
            if not (steps.dtype == np.int64 and steps.flags.c_contiguous and steps.shape[1] == 3):
                raise ValueError("expected int64 [M, 3] for steps")
            last = abi.LastGrammarStep(outcome=0, seconds=0.0)
            made = function(addresses, packed, steps.ctypes.data, len(steps), ordinary, last)
            if made < 0:
                shape = tables[0].shape
                raise ValueError(f"expected rows and tokens of masks {shape}, got {steps.tolist()}")
            return made, last.outcome, last.seconds

        return advance

    def assume_wake_cost(self, microseconds: float = WAKE_COST) -> None:
        """Set the estimated time to wake a thread; work is cut only if it takes longer."""
        assume: Any = self._library.slipstream_assume_wake_cost
        assume.argtypes, assume.restype = (ctypes.c_double,), None
        assume(microseconds)

    def philox(self, seed: int, position: int, group: int) -> tuple[int, int, int, int]:
        """The four random words of counter (position, group) under key `seed`."""
        words = (ctypes.c_uint32 * 4)()
        self._philox(seed, position, group, words)
        return words[0], words[1], words[2], words[3]


def _pack_masks(
    masks: np.ndarray, ends: np.ndarray, allowed: np.ndarray, constraints: np.ndarray
) -> abi.MaskArgs:
    """MaskArgs of arrays, which must live as long as it is used."""
    given = (masks, ends, allowed)
    num_rows, words = masks.shape
    for each in given:
        fits = each.shape == masks.shape and each.dtype == np.int32 and each.flags.c_contiguous
        if not fits or constraints.shape != (num_rows,) or constraints.dtype != np.uint8:
            raise ValueError("expected int32 [R, W] and uint8 [R] for masks of rows")
    return abi.MaskArgs(
        masks=masks.ctypes.data,
        ends=ends.ctypes.data,
        allowed=allowed.ctypes.data,
        constraints=constraints.ctypes.data,
        rows=num_rows,
        words=words,
    )


def bind_attention(function: Any) -> Callable[..., None]:
    """Paged attention; `function` takes AttentionArgs and returns a status, as of `bind`."""
    return bind(
        function,
        abi.AttentionArgs,
        computed={
            "spec": lambda sinks, scalars: abi.AttentionSpec.of(AttentionSpec.of(sinks, scalars)),
            "cache_kind": lambda key_cache: kind_of(key_cache.dtype),
            # Keys and values are in caches of their own.
            "value_dim": lambda: 0,
        },
        check=_check_attention,
    )


def _check_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor | None,
) -> None:
    if key is None or value is None:
        raise ValueError("expected key and value: the kernel itself writes them to the cache")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(f"expected sinks [{query.shape[1]}], got {tuple(sinks.shape)}")
    kept = key_cache.dtype
    if (
        kept != value_cache.dtype
        or not (kept == query.dtype or is_coded(kept))
        or not (key_cache.shape[3] == value_cache.shape[3] == row_size(query.shape[2], kept))
    ):
        raise ValueError(
            "expected caches of query's dtype, or in 8 bits, with a row for each head; got "
            f"query {tuple(query.shape)} {query.dtype}, "
            f"key_cache {tuple(key_cache.shape)} {kept}, "
            f"value_cache {tuple(value_cache.shape)} {value_cache.dtype}"
        )


def _bind_send(library: ctypes.CDLL) -> Callable[[Sequence[int], Sequence[bytes]], list[int]]:
    function: Any = library.slipstream_send
    function.argtypes = (ctypes.c_int64,) + (ctypes.c_void_p,) * 4
    function.restype = None

    def send(sockets: Sequence[int], data: Sequence[bytes]) -> list[int]:
        """Send data[i] to sockets[i]; returns the bytes that each took, or a negated errno."""
        count = len(sockets)
        sent = (ctypes.c_int64 * count)()
        function(
            count,
            (ctypes.c_int32 * count)(*sockets),
            (ctypes.c_char_p * count)(*data),
            (ctypes.c_int64 * count)(*map(len, data)),
            sent,
        )
        return list(sent)

    return send
