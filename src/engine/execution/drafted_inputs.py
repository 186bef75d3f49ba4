"""Inputs of a step that verifies drafts, computed on the device from the rows' own lengths.

The host launches such a step before it knows how many drafts of the step before were right, and so
neither positions nor lengths nor what is guessed. It says bounds, and how much room there is:
``num_tokens`` tokens, and ``width`` sampled tokens a row. Everything else is computed here, without
the host, so that it can be captured.

The tokens of the step are packed: a row's known tokens, its drafts, then those of the next row.
Padding comes last. What is sampled is not packed, so that the host knows whose each entry is: entry
(row, j) is sampled behind j drafts of the row, and is not read if the row has fewer.

Suffixes: ``_b`` one entry per row of the plan, ``_t`` per token, ``_e`` per entry, B * W of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.core.plan import StepPlan
from src.engine.execution.inputs import StepInputs
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import SampleBatch
from src.ops import accept_drafts
from src.ops.drafts.accept_drafts import IDLE

# Rows of the host's numbers.
ROW, START, CERTAIN, DRAFTS, SLACK, LIMIT, SAMPLES = range(7)
NUM_KINDS: Final = 7
# The limit of a row that has none: its plan is exact.
_UNLIMITED: Final = (1 << 31) - 1


class StepShape(NamedTuple):
    """What is fixed where a step with drafts is captured.

    Attributes
    ----------
    num_rows
        B, padding included.
    width
        W: the most tokens that a row samples, its drafts and one.
    num_tokens
        T: tokens of the step, padding included.
    max_query_len, max_seq_len
        The most tokens of a row in this step, and in all.
    """

    num_rows: int
    width: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


Propose = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Guesses for all rows: of the rows' tokens [R, L] int32, rows [B] int64, lengths and wanted
numbers [B] int32, what `look_up` returns with ``most = width - 1``."""


class Drafts(NamedTuple):
    """The drafts of a step, on the device, and what is sampled to verify them.

    Attributes
    ----------
    rows_b
        [B] int64.
    found_b
        [B, 1 + W] int32: as `look_up` returns it.
    counts_b
        [B] int32: how many drafts are verified; -1 for a row that gives no token.
    known_b
        [B] int32: tokens of the row before the step, without drafts.
    sampled_rows_e, sampled_positions_e
        [B * W] int64: the row, and the position of what is sampled.
    """

    rows_b: Tensor
    found_b: Tensor
    counts_b: Tensor
    known_b: Tensor
    sampled_rows_e: Tensor
    sampled_positions_e: Tensor

    @property
    def width(self) -> int:
        """W: entries of a row."""
        return self.found_b.shape[1] - 1


def host_numbers(plan: StepPlan, padded_rows: int, padding_row: int) -> np.ndarray:
    """What the host says of a plan's rows: [7, padded_rows] int64, padding last.

    A row of padding has no tokens.
    """
    numbers = np.zeros((NUM_KINDS, padded_rows), np.int64)
    numbers[ROW] = padding_row
    for number, step in zip(numbers.T, plan.rows, strict=False):
        has_bounds = step.drafts or step.slack
        number[:] = (
            step.row,
            step.start,
            step.num_tokens - step.drafts,
            step.drafts,
            step.slack,
            step.limit if has_bounds else _UNLIMITED,
            step.samples,
        )
    return numbers


def only_decodes(plan: StepPlan) -> bool:
    """Whether every row computes one known token and drafts, and samples behind each of them."""
    return all(step.samples and step.num_tokens == 1 + step.drafts for step in plan.rows)


def has_bounds(plan: StepPlan) -> bool:
    """Whether a plan may have drafts, or begins rows where the host does not know yet."""
    return any(step.drafts or step.slack for step in plan.rows)


def shape_of(plan: StepPlan) -> StepShape:
    """The smallest shape for a plan."""
    rows = plan.rows
    return StepShape(
        num_rows=len(rows),
        width=max(1, *(step.num_sampled for step in rows)),
        num_tokens=plan.num_tokens,
        max_query_len=max(step.num_tokens for step in rows),
        max_seq_len=max(step.start + step.slack + step.num_tokens for step in rows),
    )


def draft(
    numbers: Tensor,
    shape: StepShape,
    state: RowState,
    propose: Propose,
    *,
    adapts: bool = False,
) -> tuple[StepInputs, Drafts]:
    """Guess the rows' next tokens, write them behind the rows' tokens, and gather the inputs.

    Parameters
    ----------
    numbers
        [7, B] int64: see `host_numbers`.

    Returns
    -------
    What the forward pass reads, whose samples are the entries; and the drafts.
    """
    device = numbers.device
    rows_b, starts_b, certain_b, drafts_b, slack_b, limits_b, samples_b = numbers.unbind()
    least_b = starts_b + certain_b
    # The plan's bounds hold. They are enforced because the length of a failed step's row may be
    # that of an owner before it, whose blocks the row does not have.
    known_b = torch.minimum(torch.maximum(state.lengths[rows_b], least_b), least_b + slack_b)
    computes_b = (known_b < limits_b) & (certain_b > 0)
    wanted_b = torch.minimum(drafts_b, limits_b - known_b - 1).clamp(min=0)
    wanted_b = torch.where(computes_b, wanted_b, 0)
    found_b = propose(state.tokens, rows_b, known_b.int(), wanted_b.int())
    counts_b = torch.minimum(found_b[:, 1].long(), wanted_b)

    begins_b, ends_b = _bounds(torch.where(computes_b, certain_b + counts_b, 0))
    places = torch.arange(shape.width, device=device)
    _write_drafts(found_b[:, 2:], rows_b, known_b, counts_b, places[:-1], state)

    places_t = torch.arange(shape.num_tokens, device=device)
    of_t = torch.searchsorted(ends_b, places_t, right=True)
    is_padding_t = of_t == len(rows_b)
    of_t = of_t.clamp(max=len(rows_b) - 1)
    positions_t = (known_b - certain_b - begins_b)[of_t] + places_t
    positions_t = positions_t.masked_fill(is_padding_t, 0)
    rows_t = rows_b[of_t].masked_fill(is_padding_t, state.padding_row)
    input_ids_t, slots_t = state.gather(rows_t, positions_t)

    behind_be = torch.minimum(places, counts_b[:, None])  # [B, W]
    index_be = (begins_b + certain_b - 1)[:, None] + behind_be
    sampled_be = known_b[:, None] + behind_be
    drafts = Drafts(
        rows_b=rows_b,
        found_b=found_b,
        counts_b=torch.where(computes_b & (samples_b > 0), counts_b, IDLE).int(),
        known_b=known_b.int(),
        sampled_rows_e=rows_b[:, None].expand(-1, shape.width).flatten(),
        sampled_positions_e=sampled_be.flatten(),
    )
    lengths_b = torch.where(computes_b, known_b + counts_b, 0)
    inputs = StepInputs(
        input_ids_t=input_ids_t,
        positions_t=positions_t,
        slot_mappings_t=slots_t.clamp(min=POISON).unbind(),
        query_start_loc=torch.cat((begins_b[:1], ends_b)).int(),
        seq_lens_b=lengths_b.int(),
        block_tables_b=state.tables_of(rows_b, -(-shape.max_seq_len // state.block_size)),
        sample_index_s=index_be.clamp(min=0, max=shape.num_tokens - 1).flatten(),
        # The host has one of its own, `sampled_batch`.
        samplers=SampleBatch([], [], places[:0]),
        sampled_rows_s=drafts.sampled_rows_e,
        sampled_positions_s=drafts.sampled_positions_e,
        rows_b=rows_b,
        adapter_slots_t=state.adapters_of(rows_t) if adapts else None,
        max_query_len=shape.max_query_len,
        max_seq_len=shape.max_seq_len,
    )
    return inputs, drafts


def _bounds(counts_b: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end of each row's tokens among those of the step."""
    ends_b = counts_b.cumsum(0)
    return ends_b - counts_b, ends_b


def _write_drafts(
    token_ids: Tensor,
    rows_b: Tensor,
    known_b: Tensor,
    counts_b: Tensor,
    places: Tensor,
    state: RowState,
) -> None:
    """Write drafts [B, W - 1] int32 behind the rows' tokens, for steps and penalties to read."""
    is_draft = places < counts_b[:, None]
    # What is none is written to the padding row, where a 0 is.
    rows = torch.where(is_draft, rows_b[:, None], state.padding_row)
    positions = torch.where(is_draft, known_b[:, None] + places, 0)
    state.tokens[rows, positions] = token_ids.masked_fill(~is_draft, 0)


def restore_drafts(drafts: Drafts, state: RowState) -> None:
    """Write the drafts behind the rows' tokens once more, so that they can be sampled again."""
    token_ids = drafts.found_b[:, 2:]
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    known_b, counts_b = drafts.known_b.long(), drafts.counts_b.long()
    _write_drafts(token_ids, drafts.rows_b, known_b, counts_b, places, state)


def accept(drafts: Drafts, token_ids_e: Tensor, state: RowState) -> Tensor:
    """End the rows behind what holds of the sampled tokens [B * W] int64: how many, [B] int32.

    The tokens of rows that give none are not read. It may be called again with others.
    """
    kept_b = torch.empty_like(drafts.counts_b)
    accept_drafts(
        token_ids_e.view(-1, drafts.width),
        drafts.found_b[:, 2:],
        drafts.counts_b,
        drafts.known_b,
        drafts.rows_b,
        state.tokens,
        state.lengths,
        kept_b,
    )
    return kept_b


def sampled_batch(plan: StepPlan, width: int, positions_e: Tensor) -> SampleBatch:
    """What the host knows of the entries of a step: whose each is, and its last position."""
    rows: list[int] = []
    positions: list[int] = []
    for step in plan.rows:
        known = step.start + step.slack + step.num_tokens - step.drafts
        rows += [step.row] * width
        positions += [known + min(place, step.drafts) for place in range(width)]
    return SampleBatch(rows, positions, positions_e)


def kept_tokens(token_ids: Sequence[int], kept: Sequence[int], width: int) -> list[Sequence[int]]:
    """Per row, those of the entries' tokens on the host that hold."""
    return [token_ids[at * width : at * width + count] for at, count in enumerate(kept)]
