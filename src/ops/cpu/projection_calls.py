"""Calls of the kernels that multiply by weights, for all layouts of weights."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.ops.cpu.calls import DTYPES, kernel_threads, raise_status
from src.ops.experts import reference as reference_experts
from src.ops.linear import FLOAT8, INT4_RUN, STRIP, is_e2m1, num_outputs
from src.ops.linear import reference as reference_linear

_LINEAR = struct.Struct("@6P9q").pack  # LinearArgs
_EXPERTS = struct.Struct("@8P13q2P2dq2P2q2P").pack  # ExpertsArgs
KINDS = {torch.int8: 8, torch.uint8: 4, FLOAT8: 12} | DTYPES
_E2M1, _POWERS = 6, 3  # kE2M1, kPowers
STRIPS = {torch.int8: 9, torch.uint8: 5, torch.bfloat16: 17}
_VALUES_OF_A_SLICE = {torch.int8: 4, torch.uint8: 8, torch.bfloat16: 2}


def bind_linear(library: ctypes.CDLL) -> Callable[..., Tensor]:
    function: Any = library.slipstream_linear
    function.argtypes = (ctypes.c_char_p,)

    def linear(
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        tokens, inputs = x.shape
        outputs = num_outputs(weight, scales)
        row_stride, stride = x.stride()
        if scales is not None and inputs % INT4_RUN:
            return reference_linear(x, weight, scales, bias, offsets)
        if weight.dim() == 3:
            _check_strips(weight, scales, inputs, outputs)
        group = 0 if scales is None or scales.dim() == 1 else inputs // scales.shape[1]
        if not (
            stride == 1
            and weight.is_contiguous()
            and (weight.dtype == x.dtype if scales is None else scales.is_contiguous())
            and (offsets is None or _are_of_groups(offsets, scales))
            and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        ):
            raise ValueError(
                "expected x with contiguous last dimension, contiguous weights, scales, offsets of "
                f"their shape and dtype and bias, and what is not quantized in x's dtype; got x "
                f"{tuple(x.shape)} {x.stride()} {x.dtype}, weight {tuple(weight.shape)} "
                f"{weight.dtype}"
            )
        out = x.new_empty((tokens, outputs))
        status = function(
            _LINEAR(
                x.data_ptr(),
                weight.data_ptr(),
                0 if scales is None else scales.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                0 if offsets is None else offsets.data_ptr(),
                tokens,
                inputs,
                outputs,
                row_stride,
                DTYPES[x.dtype],
                _kind(weight, scales),
                group,
                kernel_threads(),
                _group_dtype(scales),
            )
        )
        if status:
            raise_status(status)
        return out

    return linear


def _kind(weight: Tensor, scales: Tensor | None) -> int:
    """LinearArgs' kind of a matrix."""
    if weight.dim() == 3:
        return STRIPS[weight.dtype]
    has_codes = weight.dtype == torch.uint8 and scales is not None and is_e2m1(scales)
    return _E2M1 if has_codes else KINDS[weight.dtype]


def _group_dtype(scales: Tensor | None) -> int:
    if scales is None:
        return DTYPES[torch.float32]
    return _POWERS if is_e2m1(scales) else DTYPES[scales.dtype]


def _are_of_groups(offsets: Tensor, scales: Tensor | None, dims: int = 1) -> bool:
    """``dims``: of the scales of whole rows."""
    return (
        scales is not None
        and offsets.shape == scales.shape
        and scales.dim() > dims
        and offsets.dtype == scales.dtype
        and offsets.is_contiguous()
    )


def bind_experts(library: ctypes.CDLL) -> Callable[..., Tensor]:
    function: Any = library.slipstream_experts
    function.argtypes = (ctypes.c_char_p,)

    def experts(
        hidden: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up_scales: Tensor | None,
        down_scales: Tensor | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: int,
        alpha: float,
        limit: float,
        weighs_inputs: bool,
        deterministic: bool,  # always true of this kernel
        gate_up_offsets: Tensor | None = None,
        down_offsets: Tensor | None = None,
        gate_up_order: Tensor | None = None,
        down_order: Tensor | None = None,
    ) -> Tensor:
        tokens, size = hidden.shape
        count, chosen = len(gate_up), ids.shape[1]
        intermediate = _outputs_of_experts(gate_up, gate_up_scales) // 2
        scales, biases = (gate_up_scales, down_scales), (gate_up_bias, down_bias)
        offsets, orders = (gate_up_offsets, down_offsets), (gate_up_order, down_order)
        if any(
            of_rows is not None and inputs % INT4_RUN
            for of_rows, inputs in zip(scales, (size, intermediate), strict=True)
        ):
            return reference_experts(
                *(hidden, gate_up, down, weights, ids, *scales, *biases),
                *(activation, alpha, limit, weighs_inputs, deterministic, *offsets, *orders),
            )
        for bias, outputs in ((gate_up_bias, 2 * intermediate), (down_bias, size)):
            _check_of_experts(bias, (count, outputs), hidden.dtype)
        for order, inputs in zip(orders, (size, intermediate), strict=True):
            _check_of_experts(order, (count, inputs), torch.int32)
        kinds = (
            *_kind_and_group(gate_up, gate_up_scales, size, 2 * intermediate, hidden.dtype),
            *_kind_and_group(down, down_scales, intermediate, size, hidden.dtype),
        )
        if not (
            hidden.stride()[1] == 1
            and len(down) == count
            and _outputs_of_experts(down, down_scales) == size
            and weights.shape == ids.shape == (tokens, chosen)
            and weights.dtype == torch.float32
            and ids.dtype == torch.int64
            and weights.is_contiguous()
            and ids.is_contiguous()
            and all(
                each is None or _are_of_groups(each, of_rows, 2)
                for each, of_rows in zip(offsets, scales, strict=True)
            )
        ):
            raise ValueError(
                "expected hidden [T, H] with contiguous last dimension, down of as many experts as "
                "gate_up, offsets as scales of groups, and contiguous float32 weights and int64 "
                "ids, both [T, k]; got hidden "
                f"{tuple(hidden.shape)} {hidden.stride()}, gate_up {tuple(gate_up.shape)}, down "
                f"{tuple(down.shape)}, weights {tuple(weights.shape)} {weights.dtype}, ids "
                f"{tuple(ids.shape)} {ids.dtype}"
            )
        out = hidden.new_empty((tokens, size))
        status = function(
            _EXPERTS(
                *(hidden.data_ptr(), gate_up.data_ptr(), down.data_ptr()),
                *(0 if each is None else each.data_ptr() for each in scales),
                *(weights.data_ptr(), ids.data_ptr(), out.data_ptr()),
                *(tokens, size, intermediate, count, chosen, hidden.stride()[0]),
                *(DTYPES[hidden.dtype], *kinds, activation, kernel_threads()),
                *(0 if each is None else each.data_ptr() for each in biases),
                *(alpha, limit, weighs_inputs),
                *(0 if each is None else each.data_ptr() for each in offsets),
                *map(_group_dtype, scales),
                *(0 if each is None else each.data_ptr() for each in orders),
            )
        )
        if status:
            raise_status(status)
        return out

    return experts


def _check_of_experts(given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a bias, or an order of columns."""
    if given is None or (given.shape == shape and given.dtype == dtype and given.is_contiguous()):
        return
    raise ValueError(
        f"expected contiguous rows {shape} of {dtype}, got {tuple(given.shape)} of {given.dtype}"
    )


def _outputs_of_experts(weight: Tensor, scales: Tensor | None) -> int:
    return num_outputs(weight[0], None if scales is None else scales[0])


def _kind_and_group(
    weight: Tensor, scales: Tensor | None, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Kind and group of experts' weights [E, ...], as LinearArgs has them for one expert.

    Raises
        ValueError: The weights do not fit this number of inputs or this dtype.
    """
    one = weight[0]
    if one.dim() == 3:
        _check_strips(one, None if scales is None else scales[0], inputs, outputs)
        expected = one.shape
    else:
        expected = torch.Size((outputs, inputs // 2 if one.dtype == torch.uint8 else inputs))
    if (
        one.shape != expected
        or not weight.is_contiguous()
        or (scales is None and one.dtype != dtype)
        or (scales is not None and not scales.is_contiguous())
    ):
        raise ValueError(
            f"expected contiguous experts of {inputs} inputs and {outputs} outputs, and what is "
            f"not quantized in {dtype}; got {tuple(weight.shape)} of {weight.dtype}"
        )
    kind = _kind(one, scales)
    return kind, 0 if scales is None or scales.dim() == 2 else inputs // scales.shape[2]


def _check_strips(weight: Tensor, scales: Tensor | None, inputs: int, outputs: int) -> None:
    values = _VALUES_OF_A_SLICE.get(weight.dtype, 0)
    if not values or inputs % values or (scales is None) != (weight.dtype == torch.bfloat16):
        raise ValueError(f"no strips are of {weight.dtype}, {inputs} inputs, and scales {scales}")
    expected = (-(-outputs // STRIP), inputs // values, STRIP * 4 // weight.element_size())
    if weight.shape != expected:
        raise ValueError(
            f"expected weights in strips {expected} for {inputs} inputs and {outputs} outputs, got "
            f"{tuple(weight.shape)}"
        )
