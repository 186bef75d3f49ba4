"""Steps of any rows as a series of graphs, with attention launched between them.

The real forward pass is captured: at each attention call the capture ends, and behind it the next
one begins. A replay launches piece, attention, piece, ... with the step's own rows, whose number
and lengths are thus free; only the number of tokens is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, Captured
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.inputs import StepInputs, padding_inputs
from src.engine.execution.row_state import RowState
from src.models import Mixer


class MixerCall(NamedTuple):
    """A mixer between two pieces; its tensors are the pieces' memory, ``out`` as it takes it."""

    mixer: Mixer
    given: tuple[Tensor, ...]
    out: Tensor


class MixedGraph:
    """The captured pieces of a forward pass over ``num_tokens`` tokens."""

    def __init__(
        self,
        forward: ForwardPass,
        input_ids: Tensor,
        positions: Tensor,
        pieces: list[Captured],
        calls: list[MixerCall],
        hidden: Tensor,
    ) -> None:
        self.num_tokens = len(input_ids)
        self._forward = forward
        self._input_ids = input_ids
        self._positions = positions
        self._pieces = pieces
        self._calls = calls
        self._hidden = hidden

    def run(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden_size], until the next replay of anything.

        ``inputs`` are padded to ``num_tokens``.
        """
        self._input_ids.copy_(inputs.input_ids_t)
        self._positions.copy_(inputs.positions_t)
        first, *others = self._pieces
        first.replay()
        for call, piece in zip(self._calls, others, strict=True):
            self._forward.mix(inputs, *call)
            piece.replay()
        return self._hidden


class MixedCapture:
    """Captures forward passes over up to ``max_tokens`` tokens."""

    def __init__(
        self,
        backend: CaptureBackend,
        forward: ForwardPass,
        code: Code,
        rows: RowState,
        max_tokens: int,
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._code = code
        self._rows = rows
        # [2, max_tokens] int64: token ids and positions
        self.buffer = torch.zeros((2, max_tokens), dtype=torch.int64, device=rows.device)
        writes = [mixer.writes for mixer in forward.model.mixers]
        widest = max((math.prod(each.shape) for each in writes), default=0)
        # [max_tokens * widest]: what every mixer leaves, read by the next piece
        self.mixed = torch.zeros(
            max_tokens * widest, dtype=forward.model.spec.dtype, device=rows.device
        )

    def capture(self, num_tokens: int) -> MixedGraph:
        """Capture one size; it runs once on padding before, so that nothing is new to a kernel."""
        self._forward(padding_inputs(num_tokens, self._rows), self._code.functions)
        input_ids, positions = self.buffer[:, :num_tokens]
        input_ids.zero_()
        positions.zero_()
        pieces: list[Captured] = []
        calls: list[MixerCall] = []

        def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
            pieces.append(self._backend.end())
            # The next piece needs them no more, nor does anybody behind it.
            borrowed = tuple(self._backend.borrowed(each) for each in given)
            shape = (num_tokens, *mixer.writes.shape)
            out = self.mixed[: math.prod(shape)].view(shape)
            calls.append(MixerCall(mixer, borrowed, self._forward.view_of(mixer, out, borrowed)))
            self._backend.begin()
            return out

        self._backend.begin_series()
        self._backend.begin()
        hidden = self._forward.run(self._code.functions, input_ids, positions, mix)
        pieces.append(self._backend.end())
        return MixedGraph(
            self._forward, input_ids, positions, pieces, calls, self._backend.borrowed(hidden)
        )
