"""Steps of any rows as a series of graphs, with attention launched between them.

The real forward pass is captured: at each attention call the capture ends, and behind it the next
one begins. A replay launches piece, attention, piece, ... with the step's own rows, whose number
and lengths are thus free; only the number of tokens is padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, Captured
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.inputs import StepInputs, padding_inputs
from src.engine.execution.row_state import RowState


class AttentionCall(NamedTuple):
    """One attention call between two pieces; its tensors are the pieces' memory."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


class MixedGraph:
    """The captured pieces of a forward pass over ``num_tokens`` tokens."""

    def __init__(
        self,
        forward: ForwardPass,
        input_ids: Tensor,
        positions: Tensor,
        pieces: list[Captured],
        calls: list[AttentionCall],
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
            self._forward.attend(inputs, *call)
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
        spec = forward.decoder.spec
        heads = forward.decoder.region_spec.num_heads
        # [max_tokens, num_heads, head_dim]: every attention call's output, read by the next piece
        self.attended = torch.zeros(
            (max_tokens, heads, spec.head_dim), dtype=spec.dtype, device=rows.device
        )

    def capture(self, num_tokens: int) -> MixedGraph:
        """Capture one size; it runs once on padding before, so that nothing is new to a kernel."""
        self._forward(padding_inputs(num_tokens, self._rows), self._code.regions)
        input_ids, positions = self.buffer[:, :num_tokens]
        input_ids.zero_()
        positions.zero_()
        pieces: list[Captured] = []
        calls: list[AttentionCall] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pieces.append(self._backend.end())
            # The next piece needs them no more, nor does anybody behind it.
            query, key, value = (self._backend.borrowed(each) for each in (query, key, value))
            out = self.attended[:num_tokens]
            calls.append(AttentionCall(layer, query, key, value, out))
            self._backend.begin()
            return out.flatten(1)

        self._backend.begin_series()
        self._backend.begin()
        hidden = self._forward.regions(self._code.regions, input_ids, positions, attend)
        pieces.append(self._backend.end())
        return MixedGraph(
            self._forward, input_ids, positions, pieces, calls, self._backend.borrowed(hidden)
        )
