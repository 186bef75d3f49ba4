"""Calls of the kernels that multiply by weights, for all layouts of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.ops.cpu.abi import ExpertsArgs, LinearArgs
from src.ops.cpu.calls import DTYPES, address_of, kernel_threads, raise_status
from src.ops.matrix import INT4_RUN, STRIP, Matrix, Tiling

_POWERS = 3  # kPowers
_VALUES_OF_A_SLICE = {torch.int8: 4, torch.uint8: 8, torch.bfloat16: 2}


def bind_linear(library: ctypes.CDLL) -> Callable[..., Tensor]:
    function: Any = library.slipstream_linear
    function.argtypes = (ctypes.POINTER(LinearArgs),)

    def linear(
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        kind: int,
        offsets: Tensor | None = None,
    ) -> Tensor:
        tokens, inputs = x.shape
        matrix = Matrix.of_kind(kind, weight, scales, offsets)
        outputs = matrix.outputs
        row_stride, stride = x.stride()
        _check_rows(matrix, inputs)
        if matrix.tiling is Tiling.TILES:
            _check_strips(weight, scales, inputs, outputs)
        group = matrix.encoding.group or 0
        if not (
            stride == 1
            and not matrix.is_stack
            and matrix.inputs == inputs
            and weight.is_contiguous()
            and (weight.dtype == x.dtype if scales is None else _fit(scales, matrix, ()))
            and (offsets is None or _are_of_groups(offsets, scales))
            and (
                bias is None
                or (bias.dtype == x.dtype and bias.shape == (outputs,) and bias.is_contiguous())
            )
        ):
            raise ValueError(
                "expected x with contiguous last dimension, contiguous weights of as many inputs, "
                "scales of all rows or groups, offsets of their shape and dtype and a bias of all "
                "outputs, and what is not quantized in x's dtype; got x "
                f"{tuple(x.shape)} {x.stride()} {x.dtype}, weight {tuple(weight.shape)} "
                f"{weight.dtype}, scales {_form(scales)}, offsets {_form(offsets)}, bias "
                f"{_form(bias)}"
            )
        out = x.new_empty((tokens, outputs))
        status = function(
            LinearArgs(
                x=x.data_ptr(),
                weight=weight.data_ptr(),
                scales=address_of(scales),
                bias=address_of(bias),
                out=out.data_ptr(),
                offsets=address_of(offsets),
                tokens=tokens,
                inputs=inputs,
                outputs=outputs,
                x_stride=row_stride,
                dtype=DTYPES[x.dtype],
                kind=kind,
                group=group,
                threads=kernel_threads(),
                group_dtype=_group_dtype(scales),
            )
        )
        if status:
            raise_status(status)
        return out

    return linear


def _check_rows(matrix: Matrix, inputs: int) -> None:
    """Loading a model decodes what this refuses.

    Raises
        ValueError: Inputs of quantized weights are no multiple of 32.
    """
    if matrix.scales is not None and inputs % INT4_RUN:
        raise ValueError(
            f"no kernel multiplies {matrix.encoding} with {inputs} inputs, no multiple of "
            f"{INT4_RUN}"
        )


def _fit(scales: Tensor, matrix: Matrix, count: tuple[int, ...]) -> bool:
    """Whether there is a scale for every row or group of so many matrices, `()` of one.

    Kernels read so many. That strips have the matrix's shape is checked elsewhere.
    """
    outputs, inputs, group = matrix.outputs, matrix.inputs, matrix.encoding.group
    if group is None:
        # Of rows, kernels read float32.
        return (
            scales.shape == (*count, outputs)
            and scales.dtype == torch.float32
            and scales.is_contiguous()
        )
    if group == 0 or inputs % group:
        return False
    if matrix.tiling is Tiling.ROWS:
        shape = (*count, outputs, inputs // group)
    else:
        shape = (*count, outputs // STRIP, inputs // group, STRIP)
    return scales.shape == shape and scales.is_contiguous()


def _form(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _group_dtype(scales: Tensor | None) -> int:
    if scales is None:
        return DTYPES[torch.float32]
    return _POWERS if scales.dtype == torch.uint8 else DTYPES[scales.dtype]


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
    function.argtypes = (ctypes.POINTER(ExpertsArgs),)

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
        gate_up_kind: int,
        down_kind: int,
        gate_up_offsets: Tensor | None = None,
        down_offsets: Tensor | None = None,
        gate_up_order: Tensor | None = None,
        down_order: Tensor | None = None,
    ) -> Tensor:
        (tokens, size), count = hidden.shape, len(gate_up)
        up = Matrix.of_kind(gate_up_kind, gate_up, gate_up_scales, gate_up_offsets)
        last = Matrix.of_kind(down_kind, down, down_scales, down_offsets)
        intermediate = up.outputs // 2
        _check_of_experts(gate_up_bias, (count, 2 * intermediate), hidden.dtype)
        _check_of_experts(down_bias, (count, size), hidden.dtype)
        _check_of_experts(gate_up_order, (count, size), torch.int32)
        _check_of_experts(down_order, (count, intermediate), torch.int32)
        _check_choices(hidden, weights, ids)
        _check_stack(up, size, 2 * intermediate, hidden.dtype)
        _check_stack(last, intermediate, size, hidden.dtype)
        _check_offsets_of_experts(gate_up_offsets, gate_up_scales)
        _check_offsets_of_experts(down_offsets, down_scales)
        if len(down) != count or last.outputs != size:
            raise ValueError(
                f"expected down of as many experts as gate_up, {count}, with {size} outputs; got "
                f"{tuple(down.shape)}"
            )
        out = hidden.new_empty((tokens, size))
        status = function(
            ExpertsArgs(
                x=hidden.data_ptr(),
                gate_up=gate_up.data_ptr(),
                down=down.data_ptr(),
                gate_up_scales=address_of(gate_up_scales),
                down_scales=address_of(down_scales),
                weights=weights.data_ptr(),
                ids=ids.data_ptr(),
                out=out.data_ptr(),
                tokens=tokens,
                hidden=size,
                intermediate=intermediate,
                experts=count,
                chosen=ids.shape[1],
                x_stride=hidden.stride()[0],
                dtype=DTYPES[hidden.dtype],
                gate_up_kind=gate_up_kind,
                gate_up_group=up.encoding.group or 0,
                down_kind=down_kind,
                down_group=last.encoding.group or 0,
                activation=activation,
                threads=kernel_threads(),
                gate_up_bias=address_of(gate_up_bias),
                down_bias=address_of(down_bias),
                alpha=alpha,
                limit=limit,
                weighs_inputs=weighs_inputs,
                gate_up_offsets=address_of(gate_up_offsets),
                down_offsets=address_of(down_offsets),
                gate_up_group_dtype=_group_dtype(gate_up_scales),
                down_group_dtype=_group_dtype(down_scales),
                gate_up_order=address_of(gate_up_order),
                down_order=address_of(down_order),
            )
        )
        if status:
            raise_status(status)
        return out

    return experts


def _check_offsets_of_experts(offsets: Tensor | None, scales: Tensor | None) -> None:
    if offsets is not None and not _are_of_groups(offsets, scales, 2):
        raise ValueError(
            "expected contiguous offsets of the shape and dtype of scales of groups, got "
            f"{tuple(offsets.shape)} of {offsets.dtype}"
        )


def _check_choices(hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
    if not (
        hidden.stride(1) == 1
        and weights.shape == ids.shape
        and len(weights) == len(hidden)
        and weights.dtype == torch.float32
        and ids.dtype == torch.int64
        and weights.is_contiguous()
        and ids.is_contiguous()
    ):
        raise ValueError(
            "expected hidden [T, H] with contiguous last dimension, and contiguous float32 weights "
            f"and int64 ids, both [T, k]; got hidden {tuple(hidden.shape)} {hidden.stride()}, "
            f"weights {tuple(weights.shape)} {weights.dtype}, ids {tuple(ids.shape)} {ids.dtype}"
        )


def _check_of_experts(given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a bias, or an order of columns."""
    if given is None or (given.shape == shape and given.dtype == dtype and given.is_contiguous()):
        return
    raise ValueError(
        f"expected contiguous rows {shape} of {dtype}, got {tuple(given.shape)} of {given.dtype}"
    )


def _check_stack(stack: Matrix, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Check a stack of matrices against its inputs.

    Raises
        ValueError: The weights do not fit this number of inputs or this dtype.
    """
    values, scales = stack.values, stack.scales
    _check_rows(stack, inputs)
    if stack.tiling is Tiling.TILES:
        _check_strips(values[0], None if scales is None else scales[0], inputs, outputs)
    if (
        not stack.is_stack
        or (stack.outputs, stack.inputs) != (outputs, inputs)
        or not values.is_contiguous()
        or (scales is None and values.dtype != dtype)
        or (scales is not None and not _fit(scales, stack, (len(values),)))
    ):
        raise ValueError(
            f"expected contiguous experts of {inputs} inputs and {outputs} outputs, with scales of "
            f"all rows or groups, and what is not quantized in {dtype}; got {_form(values)}, "
            f"scales {_form(scales)}"
        )


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
