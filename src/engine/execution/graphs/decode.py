"""Decode steps as one graph: gather, forward pass, head, draw, and scatter of the tokens.

The host writes rows, positions and lengths into one buffer and launches one graph. The graph reads
everything else from the rows on the device. It draws by temperature and seed for every row. If rows
ask for more, the sampler draws again from the graph's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, Captured
from src.engine.devices.transfer import upload_into
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.inputs import StepInputs
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import SampleBatch, Sampler


class DecodeOutput(NamedTuple):
    """A replay's output, valid until the next replay of any graph; B rows, padding last.

    Attributes
    ----------
    hidden
        [B, hidden_size].
    logits
        [B, V] float32.
    token_ids
        [B] int64, drawn by temperature and seed only.
    rows, positions
        [B] int64: the rows and positions where ``token_ids`` were written.
    """

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor
    rows: Tensor
    positions: Tensor


class DecodeGraph:
    """One captured decode step of ``num_rows`` rows."""

    def __init__(
        self,
        buffer: Tensor,
        captured: Captured,
        output: DecodeOutput,
        flush: Callable[[], None],
    ) -> None:
        self.num_rows = len(buffer) // 4
        self._buffer = buffer
        self._captured = captured
        self._output = output
        self._flush = flush

    def run(
        self, numbers: np.ndarray, computes: Callable[[], object] = lambda: None
    ) -> DecodeOutput:
        """Launch a step with host input [4 * num_rows + 1] int64, see `inputs.decode_rows`.

        ``computes`` is called just before the graph is launched.
        """
        self._flush()
        upload_into(self._buffer, numbers)
        computes()
        self._captured.replay()
        return self._output


class DecodeCapture:
    """Captures decode steps of up to ``max_rows`` rows."""

    def __init__(
        self,
        backend: CaptureBackend,
        forward: ForwardPass,
        code: Code,
        rows: RowState,
        sampler: Sampler,
        max_rows: int,
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._code = code
        self._rows = rows
        self._sampler = sampler
        # [4 * max_rows + 1] int64: a graph uses its beginning, laid out as by `inputs.decode_rows`
        self.buffer = torch.zeros(4 * max_rows + 1, dtype=torch.int64, device=rows.device)

    def capture(self, num_rows: int, *, adapts: bool = False) -> DecodeGraph:
        """Capture one size, after a run on padding, so that no kernel is compiled in a capture."""
        buffer = self.buffer[: 4 * num_rows + 1]
        buffer.zero_()
        buffer[num_rows + 1 : 2 * num_rows + 1] = self._rows.padding_row
        self._sampler.state.flush()
        self._compute(buffer, adapts=adapts)
        self._backend.begin_series()
        self._backend.begin()
        output = self._compute(buffer, adapts=adapts)
        captured = self._backend.end()
        borrowed = DecodeOutput(*(self._backend.borrowed(tensor) for tensor in output))
        return DecodeGraph(buffer, captured, borrowed, self._sampler.state.flush)

    def _compute(self, buffer: Tensor, *, adapts: bool) -> DecodeOutput:
        count = len(buffer) // 4
        pairs, rows_b, positions_b, sampled_positions_b = buffer.split((count + 1, *3 * (count,)))
        lengths = pairs.view(torch.int32)
        input_ids_b, slots_b = self._rows.gather(rows_b, positions_b)
        none = buffer[:0]
        inputs = StepInputs(
            input_ids_t=input_ids_b,
            positions_t=positions_b,
            slot_mappings_t=slots_b.clamp(min=POISON).unbind(),
            query_start_loc=lengths[: count + 1],
            seq_lens_b=lengths[count + 1 : -1],
            # Whole tables, because the lengths of the rows are not known at capture.
            block_tables_b=self._rows.tables_of(rows_b),
            sample_index_s=none,
            samplers=SampleBatch([], [], none),
            sampled_rows_s=rows_b,
            sampled_positions_s=sampled_positions_b,
            rows_b=rows_b,
            adapter_slots_t=self._rows.adapters_of(rows_b) if adapts else None,
            max_query_len=1,
            max_seq_len=self._rows.max_model_len,
        )
        functions = self._code.serving(adapts=adapts).functions
        hidden = self._forward(inputs, functions)
        logits = self._forward.model.logits(functions, hidden)
        token_ids = self._sampler.draw(logits, rows_b, sampled_positions_b)
        self._rows.scatter_tokens(rows_b, sampled_positions_b, token_ids)
        return DecodeOutput(hidden, logits, token_ids, rows_b, sampled_positions_b)
