"""Calls of the kernel of low-rank updates: packing its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from src.ops.cpu.abi import AdaptArgs
from src.ops.cpu.calls import DTYPES, kernel_threads, raise_status


def bind_adapt(library: ctypes.CDLL) -> Callable[..., Tensor]:
    """The kernel of `adapt`."""
    function: Any = library.slipstream_adapt
    function.argtypes = (ctypes.POINTER(AdaptArgs),)

    def adapt(
        base: Tensor,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        ranks: Tensor,
        starts: Tensor,
        slots: Tensor,
    ) -> Tensor:
        (tokens, outputs), inputs = base.shape, x.shape[1]
        (count, parts), room = ranks.shape, up.shape[1]
        whole = (base, down, up, ranks, starts, slots)
        if not (
            all(each.is_contiguous() for each in whole)
            and x.stride(1) == 1
            and all(each.dtype == base.dtype for each in (x, down, up))
            and ranks.dtype == starts.dtype == torch.int32
            and slots.dtype == torch.int64
            and len(x) == len(slots) == tokens
            and down.shape == (count, parts * room, inputs)
            and up.shape == (count, room, outputs)
            and starts.shape == (parts + 1,)
        ):
            raise ValueError(
                "expected base [T, N], x [T, K], down [S, P * R, K], up [S, R, N], int32 ranks "
                "[S, P] and starts [P + 1], and int64 slots [T], of one dtype and contiguous; got "
                f"base {tuple(base.shape)} {base.dtype}, x {tuple(x.shape)} {x.dtype}, down "
                f"{tuple(down.shape)} {down.dtype}, up {tuple(up.shape)} {up.dtype}"
            )
        out = torch.empty_like(base)
        status = function(
            AdaptArgs(
                base=base.data_ptr(),
                x=x.data_ptr(),
                down=down.data_ptr(),
                up=up.data_ptr(),
                ranks=ranks.data_ptr(),
                starts=starts.data_ptr(),
                chosen=slots.data_ptr(),
                out=out.data_ptr(),
                tokens=tokens,
                inputs=inputs,
                outputs=outputs,
                x_stride=x.stride(0),
                slots=count,
                parts=parts,
                room=room,
                dtype=DTYPES[base.dtype],
                threads=kernel_threads(),
            )
        )
        if status:
            raise_status(status)
        return out

    return adapt
