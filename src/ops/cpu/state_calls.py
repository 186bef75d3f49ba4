"""Calls of the kernels of recurrent states: packing their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.ops.cpu.abi import ConvolutionArgs, RecurrenceArgs
from src.ops.cpu.calls import DTYPES, address_of, kernel_threads, raise_status


def bind_convolution(library: ctypes.CDLL) -> Callable[..., None]:
    """The kernel of `causal_convolution`."""
    function: Any = library.slipstream_convolution
    function.argtypes = (ctypes.POINTER(ConvolutionArgs),)

    def causal_convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
    ) -> None:
        (tokens, channels), taps = x.shape, len(weight)
        same = [x, weight, states, out] if bias is None else [x, weight, states, out, bias]
        if not (
            all(each.dtype == x.dtype for each in same)
            and weight.shape == (taps, channels)
            and states.shape[1:] == (taps - 1, channels)
            and out.shape == x.shape
            and (bias is None or bias.shape == (channels,))
            and _is_packed(x, 1)
            and _is_packed(states, 2)
            and weight.is_contiguous()
            and out.is_contiguous()
            and _are_rows(slots, query_start_loc)
        ):
            raise ValueError(
                "expected x [T, C], weight [K, C], states [slots, K - 1, C] and out [T, C] of one "
                f"dtype, and rows' slots and starts; got x {tuple(x.shape)} {x.dtype}, weight "
                f"{tuple(weight.shape)} {weight.dtype}, states {tuple(states.shape)} "
                f"{states.dtype}, out {tuple(out.shape)} {out.dtype}"
            )
        status = function(
            ConvolutionArgs(
                x=x.data_ptr(),
                weight=weight.data_ptr(),
                bias=address_of(bias),
                states=states.data_ptr(),
                slots=slots.data_ptr(),
                starts=query_start_loc.data_ptr(),
                out=out.data_ptr(),
                x_stride=x.stride(0),
                state_stride=states.stride(0),
                tokens=tokens,
                rows=len(slots),
                channels=channels,
                taps=taps,
                num_slots=len(states),
                dtype=DTYPES[x.dtype],
                threads=kernel_threads(),
            )
        )
        if status:
            raise_status(status)

    return causal_convolution


def bind_recurrence(library: ctypes.CDLL) -> Callable[..., None]:
    """The kernel of `linear_recurrence`."""
    function: Any = library.slipstream_recurrence
    function.argtypes = (ctypes.POINTER(RecurrenceArgs),)

    def linear_recurrence(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        factor: Tensor,
        skip: Tensor | None,
        states: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
        delta: bool,
        normalizes: bool,
    ) -> None:
        (tokens, key_heads, key_dim), (_, heads, dim) = query.shape, value.shape
        wide = [decay, factor, states] if skip is None else [decay, factor, states, skip]
        if not (
            query.dtype == key.dtype == value.dtype == out.dtype
            and all(each.dtype == torch.float32 for each in wide)
            and key.shape == query.shape
            and value.shape == out.shape == (tokens, heads, dim)
            and decay.shape == factor.shape == (tokens, heads)
            and (skip is None or skip.shape == (heads,))
            and states.shape[1:] == (heads, key_dim, dim)
            and all(_is_packed(each, 2) for each in (query, key, value))
            and _is_packed(states, 3)
            and decay.is_contiguous()
            and factor.is_contiguous()
            and (skip is None or skip.is_contiguous())
            and out.is_contiguous()
            and _are_rows(slots, query_start_loc)
        ):
            raise ValueError(
                "expected query and key [T, K, N], value and out [T, H, P] of one dtype, decay and "
                "factor [T, H], skip [H] and states [slots, H, N, P] in float32, and rows' slots "
                f"and starts; got query {tuple(query.shape)} {query.dtype}, key "
                f"{tuple(key.shape)} {key.dtype}, value {tuple(value.shape)} {value.dtype}, decay "
                f"{tuple(decay.shape)} {decay.dtype}, states {tuple(states.shape)} {states.dtype}"
            )
        status = function(
            RecurrenceArgs(
                query=query.data_ptr(),
                key=key.data_ptr(),
                value=value.data_ptr(),
                decay=decay.data_ptr(),
                factor=factor.data_ptr(),
                skip=address_of(skip),
                states=states.data_ptr(),
                slots=slots.data_ptr(),
                starts=query_start_loc.data_ptr(),
                out=out.data_ptr(),
                query_stride=query.stride(0),
                key_stride=key.stride(0),
                value_stride=value.stride(0),
                state_stride=states.stride(0),
                tokens=tokens,
                rows=len(slots),
                key_heads=key_heads,
                heads=heads,
                key_dim=key_dim,
                dim=dim,
                num_slots=len(states),
                dtype=DTYPES[query.dtype],
                delta=delta,
                normalizes=normalizes,
                threads=kernel_threads(),
            )
        )
        if status:
            raise_status(status)

    return linear_recurrence


def _is_packed(tensor: Tensor, dims: int) -> bool:
    """Whether the last dimensions are contiguous; those of size 1 or 0 always are."""
    expected = 1
    for size, stride in zip(
        reversed(tensor.shape[-dims:]), reversed(tensor.stride()[-dims:]), strict=True
    ):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _are_rows(slots: Tensor, query_start_loc: Tensor) -> bool:
    return (
        slots.dtype == torch.int64
        and query_start_loc.dtype == torch.int32
        and query_start_loc.shape == (len(slots) + 1,)
        and slots.is_contiguous()
        and query_start_loc.is_contiguous()
    )
