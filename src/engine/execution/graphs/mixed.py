"""Steps with any rows as a series of graphs, with attention launched between them.

The real forward pass is captured. A capture ends before each attention call, and the next begins
behind it. A replay launches piece, attention, piece, and so on. Attention is launched with the
step's own rows, so any number and lengths of rows are possible. Only the tokens are padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, Captured
from src.core.adapter import NO_SLOT
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.inputs import StepInputs, padding_inputs
from src.engine.execution.row_state import RowState
from src.models import Mixer


class MixerCall(NamedTuple):
    """A mixer call between two pieces; ``given`` and ``out`` are views of the pieces' memory."""

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
        adapter_slots: Tensor | None = None,
    ) -> None:
        self._adapter_slots = adapter_slots
        self.num_tokens = len(input_ids)
        self._forward = forward
        self._input_ids = input_ids
        self._positions = positions
        self._pieces = pieces
        self._calls = calls
        self._hidden = hidden

    def run(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_tokens, hidden_size], valid until the next replay of any graph.

        ``inputs`` are padded to ``num_tokens``.
        """
        self._input_ids.copy_(inputs.input_ids_t)
        self._positions.copy_(inputs.positions_t)
        if self._adapter_slots is not None:
            assert inputs.adapter_slots_t is not None
            self._adapter_slots.copy_(inputs.adapter_slots_t)
        first, *others = self._pieces
        first.replay()
        metadata = self._forward.prepare(inputs)
        for call, piece in zip(self._calls, others, strict=True):
            self._forward.mix(inputs, metadata, *call)
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
        # [3, max_tokens] int64: token ids, positions and slots of adapters
        self.buffer = torch.zeros((3, max_tokens), dtype=torch.int64, device=rows.device)
        writes = [mixer.writes for mixer in forward.model.mixers]
        widest = max((math.prod(each.shape) for each in writes), default=0)
        # [max_tokens * widest]: output of every mixer in turn, read by the piece behind it
        self.mixed = torch.zeros(
            max_tokens * widest, dtype=forward.model.spec.dtype, device=rows.device
        )

    def capture(self, num_tokens: int, *, adapts: bool = False) -> MixedGraph:
        """Capture one size, after a run on padding, so that no kernel is compiled in a capture."""
        functions = self._code.serving(adapts=adapts).functions
        self._forward(padding_inputs(num_tokens, self._rows, adapts=adapts), functions)
        input_ids, positions, slots = self.buffer[:, :num_tokens]
        input_ids.zero_()
        positions.zero_()
        slots.fill_(NO_SLOT)
        adapter_slots = slots if adapts else None
        pieces: list[Captured] = []
        calls: list[MixerCall] = []

        def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
            pieces.append(self._backend.end())
            # Later pieces do not need these tensors, so the pool may reuse their memory.
            borrowed = tuple(self._backend.borrowed(each) for each in given)
            shape = (num_tokens, *mixer.writes.shape)
            out = self.mixed[: math.prod(shape)].view(shape)
            calls.append(MixerCall(mixer, borrowed, self._forward.view_of(mixer, out, borrowed)))
            self._backend.begin()
            return out

        self._backend.begin_series()
        self._backend.begin()
        hidden = self._forward.run(
            functions, input_ids, positions, mix, adapter_slots=adapter_slots
        )
        pieces.append(self._backend.end())
        borrowed = self._backend.borrowed(hidden)
        return MixedGraph(
            *(self._forward, input_ids, positions, pieces, calls, borrowed, adapter_slots)
        )
