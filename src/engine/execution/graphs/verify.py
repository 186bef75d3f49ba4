"""Steps that verify drafts as one graph: draft, forward pass, head, draws, acceptance, scatter.

The host writes what the plan says of its rows into one buffer, and launches one graph. Where each
row begins, what is guessed of it, and how much of that is right is known to the device alone, until
the step's results arrive. The graph draws by temperature and seed. If rows ask for more, the
sampler draws again from the graph's logits, and those tokens are accepted in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.compile.graphs import CaptureBackend, Captured
from src.engine.devices.transfer import upload_into
from src.engine.execution.drafted_inputs import (
    NUM_KINDS,
    Drafts,
    Propose,
    StepShape,
    accept,
    draft,
)
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler


class VerifyOutput(NamedTuple):
    """A replay's output, valid until the next replay of any graph; E = rows * width entries.

    Attributes
    ----------
    hidden
        [E, hidden_size], of the tokens that are sampled from.
    logits
        [E, V] float32.
    token_ids
        [E] int64, drawn by temperature and seed only.
    kept_b
        [B] int32: how many of a row's entries hold.
    drafts
        What was guessed.
    """

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor
    kept_b: Tensor
    drafts: Drafts


class VerifyGraph:
    """One captured step of ``num_rows`` rows that sample up to ``width`` tokens each."""

    def __init__(
        self,
        buffer: Tensor,
        width: int,
        captured: Captured,
        output: VerifyOutput,
        flush: Callable[[], None],
    ) -> None:
        self.num_rows = len(buffer) // NUM_KINDS
        self.width = width
        self._buffer = buffer
        self._captured = captured
        self._output = output
        self._flush = flush

    def run(
        self, numbers: np.ndarray, computes: Callable[[], object] = lambda: None
    ) -> VerifyOutput:
        """Launch a step with the host's [7, num_rows] int64, see `drafted_inputs.host_numbers`.

        ``computes`` is called just before the graph is launched.
        """
        self._flush()
        upload_into(self._buffer, numbers.reshape(-1))
        computes()
        self._captured.replay()
        return self._output


class VerifyCapture:
    """Captures steps with drafts of up to ``max_rows`` rows.

    Parameters
    ----------
    proposing
        Number of drafts, at most -> what guesses them.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        forward: ForwardPass,
        code: Code,
        rows: RowState,
        sampler: Sampler,
        max_rows: int,
        proposing: Callable[[int], Propose],
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._code = code
        self._rows = rows
        self._sampler = sampler
        self._proposing = proposing
        # [7 * max_rows] int64: a graph uses its beginning, [7, rows]
        self.buffer = torch.zeros(NUM_KINDS * max_rows, dtype=torch.int64, device=rows.device)

    def capture(self, num_rows: int, width: int, *, adapts: bool = False) -> VerifyGraph:
        """Capture one size, after a run on padding, so that no kernel is compiled in a capture."""
        buffer = self.buffer[: NUM_KINDS * num_rows]
        buffer.zero_()
        buffer[:num_rows] = self._rows.padding_row
        self._sampler.state.flush()
        self._compute(buffer, width, adapts=adapts)
        self._backend.begin_series()
        self._backend.begin()
        output = self._compute(buffer, width, adapts=adapts)
        captured = self._backend.end()
        lent = self._backend.borrowed
        borrowed = VerifyOutput(
            lent(output.hidden),
            lent(output.logits),
            lent(output.token_ids),
            lent(output.kept_b),
            Drafts(*map(lent, output.drafts)),
        )
        return VerifyGraph(buffer, width, captured, borrowed, self._sampler.state.flush)

    def _compute(self, buffer: Tensor, width: int, *, adapts: bool) -> VerifyOutput:
        rows, numbers = self._rows, buffer.view(NUM_KINDS, -1)
        num_rows = numbers.shape[1]
        # Whole tables, because the lengths of the rows are not known at capture.
        shape = StepShape(num_rows, width, num_rows * width, width, rows.max_model_len)
        inputs, drafts = draft(numbers, shape, rows, self._proposing(width - 1), adapts=adapts)
        functions = self._code.serving(adapts=adapts).functions
        hidden = self._forward(inputs, functions)[inputs.sample_index_s]
        logits = self._forward.model.logits(functions, hidden)
        given = drafts.sampled_rows_e, drafts.sampled_positions_e
        token_ids = self._sampler.draw(logits, *given)
        return VerifyOutput(hidden, logits, token_ids, accept(drafts, token_ids, rows), drafts)
