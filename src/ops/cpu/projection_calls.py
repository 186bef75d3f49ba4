"""Calls of the kernels that multiply by weights, for all layouts of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.ops.cpu.abi import ExpertsArgs, LinearArgs
from src.ops.cpu.calls import DTYPES, address_of, kernel_threads, raise_status
from src.ops.experts import reference as reference_experts
from src.ops.linear import FLOAT8, INT4_RUN, STRIP, is_e2m1, num_outputs
from src.ops.linear import reference as reference_linear

KINDS = {torch.int8: 8, torch.uint8: 4, FLOAT8: 12} | DTYPES
_E2M1, _POWERS = 6, 3  # kE2M1, kPowers
STRIPS = {torch.int8: 9, torch.uint8: 5, torch.bfloat16: 17}
_VALUES_OF_A_SLICE = {torch.int8: 4, torch.uint8: 8, torch.bfloat16: 2}


def bind_linear(library: ctypes.CDLL) -> Callable[..., Tensor]:
    function: Any = library.slipstream_linear
    function.argtypes = (ctypes.POINTER(LinearArgs),)

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
                kind=_kind(weight, scales),
                group=group,
                threads=kernel_threads(),
                group_dtype=_group_dtype(scales),
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
        gate_up_offsets: Tensor | None = None,
        down_offsets: Tensor | None = None,
        gate_up_order: Tensor | None = None,
        down_order: Tensor | None = None,
    ) -> Tensor:
        tokens, size = hidden.shape
        count, chosen = len(gate_up), ids.shape[1]
        intermediate = _outputs_of_experts(gate_up, gate_up_scales) // 2
        _check_of_experts(gate_up_bias, (count, 2 * intermediate), hidden.dtype)
        _check_of_experts(down_bias, (count, size), hidden.dtype)
        _check_of_experts(gate_up_order, (count, size), torch.int32)
        _check_of_experts(down_order, (count, intermediate), torch.int32)
        _check_choices(hidden, weights, ids)
        gate_up_kind, gate_up_group = _kind_and_group(
            gate_up, gate_up_scales, size, 2 * intermediate, hidden.dtype
        )
        down_kind, down_group = _kind_and_group(down, down_scales, intermediate, size, hidden.dtype)
        _check_offsets_of_experts(gate_up_offsets, gate_up_scales)
        _check_offsets_of_experts(down_offsets, down_scales)
        if len(down) != count or _outputs_of_experts(down, down_scales) != size:
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
                chosen=chosen,
                x_stride=hidden.stride()[0],
                dtype=DTYPES[hidden.dtype],
                gate_up_kind=gate_up_kind,
                gate_up_group=gate_up_group,
                down_kind=down_kind,
                down_group=down_group,
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

    def experts_or_reference(*call: Any) -> Tensor:
        """The op, with its arguments in order; rows that no kernel takes go to the reference."""
        hidden, gate_up, gate_up_scales, down_scales = call[0], call[1], call[5], call[6]
        intermediate = _outputs_of_experts(gate_up, gate_up_scales) // 2
        is_ragged = (gate_up_scales is not None and hidden.shape[1] % INT4_RUN) or (
            down_scales is not None and intermediate % INT4_RUN
        )
        return reference_experts(*call) if is_ragged else experts(*call)

    return experts_or_reference


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
