"""What mixers with a causal convolution tell the step that runs in one call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from src.ops.runtime.abi import ConvolutionArgs
from src.ops.runtime.calls import address_of
from src.ops.runtime.step import constants


class ConvolutionSpec(Protocol):
    """The sizes of a layer's convolution."""

    @property
    def channels(self) -> int: ...
    @property
    def taps(self) -> int: ...


def convolution_constants(
    spec: ConvolutionSpec, weight: Tensor, bias: Tensor | None, inputs: Tensor, *, silu: bool
) -> ConvolutionArgs:
    """The struct of a layer's convolution without what each step adds. Keep its tensors.

    Parameters
    ----------
    weight, bias
        [taps, channels] and [channels], contiguous.
    inputs
        [slots, taps - 1, channels]: the last inputs of each slot's row.
    silu
        Whether SiLU follows.
    """
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    return constants(
        ConvolutionArgs,
        weight=weight.data_ptr(),
        bias=address_of(bias),
        states=inputs.data_ptr(),
        state_stride=inputs.stride(0),
        channels=spec.channels,
        taps=spec.taps,
        num_slots=len(inputs),
        silu=silu,
    )
