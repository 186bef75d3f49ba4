"""Turns a step plan into the device inputs of one step.

Suffixes: ``_t`` one entry per token of the step, ``_b`` per row of the plan, ``_s`` per row that
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from src.core.plan import StepPlan
from src.engine.devices.transfer import upload
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import SampleBatch


@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """The metadata of attention calls: tokens, and the rows that they belong to.

    Attributes
    ----------
    slot_mappings_t
        Per group of layers [T] int64: the cache slot of each token's key and value, block *
        block_size + offset. -1 for padding, which is not written.
    query_start_loc
        [B + 1] int32: first token of each row.
    seq_lens_b
        [B] int32: context length of each row, this step's tokens included.
    block_tables_b
        Per group of layers [B, max blocks of these rows] int32.
    max_query_len, max_seq_len
        Upper bounds known on the host, so that no kernel launch waits for a device value.
    verifies_b
        [B] int32: 1 for a row that verifies drafts (`RowStep.verifies`), else 0; ``None``: no row
        does.
    """

    slot_mappings_t: tuple[Tensor, ...]
    query_start_loc: Tensor
    seq_lens_b: Tensor
    block_tables_b: tuple[Tensor, ...]
    max_query_len: int
    max_seq_len: int
    verifies_b: Tensor | None = None

    def without_rows(self) -> AttentionRows:
        """The same tokens without rows: their KV is written, and no attention is computed."""
        return AttentionRows(
            slot_mappings_t=self.slot_mappings_t,
            query_start_loc=self.query_start_loc[:1],
            seq_lens_b=self.seq_lens_b[:0],
            block_tables_b=tuple(table[:0] for table in self.block_tables_b),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )


@dataclass(frozen=True, kw_only=True)
class StepInputs(AttentionRows):
    """Device inputs of one step.

    Attributes
    ----------
    input_ids_t, positions_t
        [T] int64; padding tokens come last.
    sample_index_s
        [S] int64: index of the token whose hidden state is sampled from.
    samplers
        The rows that sample, once for each token: rows with drafts sample several.
    sampled_rows_s, sampled_positions_s
        [S] int64: their rows, and the positions of the tokens to be sampled.
    rows_b
        [B] int64: the rows of the plan, which are also the slots of their recurrent states.
    lengths_b
        On the host: query lengths and context lengths of the rows, [2, B]; ``None``: no row has
        more than one query token.
    own_t
        The model's own step inputs by name, [T, ...].
    adapter_slots_t
        [T] int64: the slot of each token's adapter, -1 for none; ``None`` if no row has one.
    last
        The sampled tokens as rows of one token each, whose KV is written already. The last layer
        then computes attention for these only. ``None``: it computes every token.
    """

    input_ids_t: Tensor
    positions_t: Tensor
    sample_index_s: Tensor
    samplers: SampleBatch
    sampled_rows_s: Tensor
    sampled_positions_s: Tensor
    rows_b: Tensor
    lengths_b: np.ndarray | None = None
    own_t: Mapping[str, Tensor] = field(default_factory=dict)
    adapter_slots_t: Tensor | None = None
    last: AttentionRows | None = None


def build_inputs(plan: StepPlan, state: RowState, padded_tokens: int = 0) -> StepInputs:
    """Gather the inputs of ``plan`` from the rows.

    Fewer tokens than ``padded_tokens`` are followed by padding, which uses the padding row.
    """
    rows_b = np.fromiter((step.row for step in plan.rows), np.int64, len(plan.rows))
    starts_b = np.fromiter((step.start for step in plan.rows), np.int64, len(plan.rows))
    counts_b = np.fromiter((step.num_tokens for step in plan.rows), np.int64, len(plan.rows))
    samples_b = np.fromiter((step.num_sampled for step in plan.rows), np.int64, len(plan.rows))
    ends_b = np.cumsum(counts_b)
    seq_lens_b = starts_b + counts_b
    num_tokens, num_rows = int(ends_b[-1]), len(rows_b)

    rows_t = np.repeat(rows_b, counts_b)
    positions_t = np.arange(num_tokens) + np.repeat(starts_b - (ends_b - counts_b), counts_b)
    padding = max(0, padded_tokens - num_tokens)
    if padding:
        rows_t = np.concatenate((rows_t, np.full(padding, state.padding_row)))
        positions_t = np.concatenate((positions_t, np.zeros(padding, np.int64)))
    num_padded = num_tokens + padding
    sampled_rows_s = np.repeat(rows_b, samples_b)
    num_samples = len(sampled_rows_s)
    # How many of its row's sampled tokens come after each, [S].
    behind_s = np.repeat(np.cumsum(samples_b), samples_b) - np.arange(num_samples) - 1
    sample_index_s = np.repeat(ends_b, samples_b) - 1 - behind_s
    sampled_positions_s = np.repeat(seq_lens_b, samples_b) - behind_s

    packed = upload(
        np.concatenate(
            (rows_t, positions_t, rows_b, sample_index_s, sampled_rows_s, sampled_positions_s)
        ),
        torch.int64,
        state.device,
    )
    (
        device_rows_t,
        device_positions_t,
        device_rows_b,
        device_sample_index_s,
        device_sampled_rows_s,
        device_sampled_positions_s,
    ) = packed.split((num_padded, num_padded, num_rows, num_samples, num_samples, num_samples))
    verifying = num_tokens > num_rows and any(step.verifies for step in plan.rows)
    verifies_b = np.array([step.verifies for step in plan.rows] if verifying else [], np.int64)
    lengths = upload(
        np.concatenate(((0,), ends_b, seq_lens_b, verifies_b)),
        torch.int32,
        state.device,
    )

    max_seq_len = int(seq_lens_b.max())
    input_ids_t, slots_t = state.gather(device_rows_t, device_positions_t)
    if padding:
        slots_t.clamp_(min=POISON)
    return StepInputs(
        input_ids_t=input_ids_t,
        positions_t=device_positions_t,
        slot_mappings_t=slots_t.unbind(),
        query_start_loc=lengths[: num_rows + 1],
        seq_lens_b=lengths[num_rows + 1 : 2 * num_rows + 1],
        verifies_b=lengths[2 * num_rows + 1 :] if verifying else None,
        block_tables_b=state.tables_of(device_rows_b, -(-max_seq_len // state.block_size)),
        sample_index_s=device_sample_index_s,
        samplers=SampleBatch(
            sampled_rows_s.tolist(), sampled_positions_s.tolist(), device_sampled_positions_s
        ),
        sampled_rows_s=device_sampled_rows_s,
        sampled_positions_s=device_sampled_positions_s,
        rows_b=device_rows_b,
        own_t=state.own_inputs.gather(plan, num_padded, state.device),
        adapter_slots_t=state.adapters_of(device_rows_t) if state.uses_adapters(plan) else None,
        max_query_len=int(counts_b.max()),
        max_seq_len=max_seq_len,
        lengths_b=np.stack((counts_b, seq_lens_b)) if num_tokens > num_rows else None,
    )


def only_sampled(inputs: StepInputs, state: RowState) -> StepInputs:
    """Inputs whose last layer computes only the hidden states that are sampled from.

    For steps that score no prompt, since scores need the hidden state of every token.
    """
    count = len(inputs.samplers.rows)
    if count == len(inputs.input_ids_t):
        return inputs
    device = state.device
    nowhere = torch.full((count,), POISON, dtype=torch.int64, device=device)
    last = AttentionRows(
        slot_mappings_t=(nowhere,) * len(inputs.slot_mappings_t),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens_b=inputs.sampled_positions_s.to(torch.int32),
        block_tables_b=state.tables_of(inputs.sampled_rows_s, inputs.block_tables_b[0].shape[1]),
        max_query_len=1,
        max_seq_len=inputs.max_seq_len,
    )
    return replace(inputs, last=last)


def padding_inputs(num_tokens: int, state: RowState, *, adapts: bool = False) -> StepInputs:
    """Inputs of a step of padding: one empty row, and tokens whose KV is not written.

    If it ``adapts``, it is computed as a step with adapters is, but no token has one.

    With the row, and with bounds of more than one query token, every attention kernel is launched
    that a request's step may launch.
    """
    device = state.device
    zeros_t = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return StepInputs(
        input_ids_t=zeros_t,
        positions_t=zeros_t.clone(),
        slot_mappings_t=(zeros_t - 1,) * len(state.block_tables),
        query_start_loc=torch.zeros(2, dtype=torch.int32, device=device),
        seq_lens_b=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables_b=state.block_tables[:, state.padding_row :].unbind(),
        sample_index_s=none,
        samplers=SampleBatch([], [], none),
        sampled_rows_s=none,
        sampled_positions_s=none,
        # A row without tokens touches no state.
        rows_b=zeros_t.new_zeros(1),
        own_t=state.own_inputs.padding(num_tokens, device),
        adapter_slots_t=zeros_t - 1 if adapts else None,
        max_query_len=2,
        max_seq_len=1,
        lengths_b=np.zeros((2, 1), np.int64),
    )


def is_decode(plan: StepPlan) -> bool:
    """Whether every row of the step computes one token and samples the next."""
    return all(step.samples and step.num_tokens == 1 for step in plan.rows)


def sampled_tokens(plan: StepPlan) -> SampleBatch:
    """What the step samples: for each row in turn the positions of its tokens, in order."""
    rows: list[int] = []
    positions: list[int] = []
    # On the way of every step, so without a call for each row.
    for step in plan.rows:
        if not step.samples:
            continue
        end = step.start + step.num_tokens
        if step.drafts:
            for position in range(end - step.drafts, end):
                rows.append(step.row)
                positions.append(position)
        rows.append(step.row)
        positions.append(end)
    return SampleBatch(rows, positions)


def sampled_indices(plan: StepPlan) -> list[int]:
    """Index among the step's tokens of each one behind which it samples, in order."""
    indices: list[int] = []
    end = 0
    for step in plan.rows:
        end += step.num_tokens
        indices.extend(range(end - step.num_sampled, end))
    return indices


def decode_rows(plan: StepPlan, padded_rows: int, padding_row: int) -> np.ndarray:
    """The host input of a captured decode step of B rows, padding last: [4 B + 1] int64.

    The first B + 1 entries are int32 pairs: `query_start_loc` [B + 1], `seq_lens` [B], and one
    unused. Then three arrays [B] follow: rows; positions of their tokens; positions of the tokens
    to be sampled, 0 for padding.
    All of it is computed on the host to save small kernels. `query_start_loc` comes first, so that
    its alignment is the same for every B: the pointer's alignment selects a kernel's variant.
    """
    count = len(plan.rows)
    packed = np.zeros(4 * padded_rows + 1, np.int64)
    pairs, rows, positions, sampled = np.split(packed, np.arange(1, 4) * padded_rows + 1)
    rows[:] = padding_row
    rows[:count] = [step.row for step in plan.rows]
    positions[:count] = [step.start for step in plan.rows]
    sampled[:count] = positions[:count] + 1
    lengths = pairs.view(np.int32)
    lengths[: padded_rows + 1] = np.minimum(np.arange(padded_rows + 1), count)
    lengths[padded_rows + 1 : -1] = sampled
    return packed


def decode_samplers(plan: StepPlan, positions_s: Tensor) -> SampleBatch:
    """The sample batch of a decode step; ``positions_s`` [B] int64 is on the device."""
    return SampleBatch(
        [step.row for step in plan.rows], [step.start + 1 for step in plan.rows], positions_s
    )
