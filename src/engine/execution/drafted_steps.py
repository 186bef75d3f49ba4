"""Computes steps whose drafts and lengths only the device knows, captured or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from src.core.plan import RowResult, RowStep, StepPlan, StepResult
from src.engine.devices.transfer import upload
from src.engine.execution.drafted_inputs import (
    Drafts,
    Propose,
    accept,
    draft,
    host_numbers,
    restore_drafts,
    sampled_batch,
    shape_of,
)
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs.verify import VerifyGraph, VerifyOutput
from src.engine.execution.row_state import RowState
from src.engine.grammar.masks import RowMasks
from src.engine.sampling import SampleBatch, SampleOutput, Sampler
from src.ops import accept_drafts
from src.ops.drafts.accept_drafts import IDLE


class RowVerdict(NamedTuple):
    """What came of one row: tokens that hold, drafts that were verified, length of their match.

    ``kept`` is 0 of a row that computed nothing, or did not sample.
    """

    kept: int
    drafted: int
    match: int


@dataclass(frozen=True)
class Verdicts:
    """What came of a step's drafts, on the device until `to_host`.

    Attributes
    ----------
    numbers
        [3, B] int32: tokens that hold, drafts (-1 if the row gives no token), length of the match.
    width
        Entries of a row among the sampled ones.
    """

    numbers: Tensor
    width: int

    def to_host(self) -> Verdicts:
        """Start the copy to (pinned) host memory; on CUDA it is complete after a later event."""
        return replace(self, numbers=self.numbers.to("cpu", non_blocking=True))

    def rows(self) -> list[RowVerdict]:
        """Of each row of the plan, and of padding behind them; after the copy-out."""
        return [RowVerdict(*each) for each in zip(*self.numbers.tolist(), strict=True)]


class DraftedOutput(NamedTuple):
    """The device results of a step with drafts.

    Attributes
    ----------
    samples
        One token for each entry, E = B * W.
    verdicts
        Which of them count.
    hidden
        [T, hidden_size]: of all tokens, rows without bounds first if the plan has them first;
        ``None`` if the step was captured.
    masks
        Those that were awaited.
    """

    samples: SampleOutput
    verdicts: Verdicts
    hidden: Tensor | None
    masks: RowMasks | None


class DraftedSteps:
    """Call it on the device thread only.

    Parameters
    ----------
    proposing
        Number of drafts, at most -> what guesses them.
    """

    def __init__(
        self,
        forward: ForwardPass,
        rows: RowState,
        sampler: Sampler,
        proposing: Callable[[int], Propose],
    ) -> None:
        self._forward = forward
        self._rows = rows
        self._sampler = sampler
        self._proposing = proposing

    def compute(
        self,
        plan: StepPlan,
        code: Code,
        graph: VerifyGraph | None = None,
        computes: Callable[[], object] = lambda: None,
        awaited: Future[RowMasks] | None = None,
    ) -> DraftedOutput:
        """Compute a plan with bounds, which has been applied to its rows.

        Parameters
        ----------
        computes
            Called when the step's inputs, but nothing else, have been enqueued.
        awaited
            Masks of the plan's rows that sample, one each. A row that has one has no bounds.

        Raises
        ------
        ValueError
            A row has bounds, and parameters for which the host must know its positions.
        """
        self._check(plan)
        self._rows.flush()
        hidden = None
        if graph is None:
            out, hidden = self._uncaptured(plan, code, computes)
        else:
            out = graph.run(host_numbers(plan, graph.num_rows, self._rows.padding_row), computes)
        drafts = out.drafts
        num_entries = len(plan.rows) * drafts.width
        batch = sampled_batch(plan, drafts.width, drafts.sampled_positions_e[:num_entries])
        masks = None if awaited is None else awaited.result()
        samples, kept_b = SampleOutput(out.token_ids[:num_entries], None, (), ()), out.kept_b
        if masks is not None or not self._sampler.only_draws(batch):
            samples = self._sample_again(plan, out, batch, masks)
            kept_b = self._accept_again(drafts, samples.token_ids)
        numbers = torch.stack((kept_b, drafts.counts_b, drafts.found_b[:, 0]))
        return DraftedOutput(samples, Verdicts(numbers, drafts.width), hidden, masks)

    def warm_up(self, most: int) -> None:
        """Compile the kernels of none and up to ``most`` drafts. Nothing is changed.

        Triton makes other code for the number 1 and for what 16 divides, and acceptance has some
        for each power of two.
        """
        rows = self._rows
        row = torch.full((1,), rows.padding_row, device=rows.device)
        one = torch.ones(1, dtype=torch.int32, device=rows.device)
        powers = (1 << exponent for exponent in range(most.bit_length()))
        for number in sorted({0, *powers, most}):
            found = self._proposing(number)(rows.tokens, row, one, one)
            sampled = torch.zeros((1, 1 + number), dtype=torch.int64, device=rows.device)
            idle, kept = torch.full_like(one, IDLE), torch.empty_like(one)
            accept_drafts(sampled, found[:, 2:], idle, one, row, rows.tokens, rows.lengths, kept)

    def _check(self, plan: StepPlan) -> None:
        params = self._sampler.state.params([step.row for step in plan.rows])
        for step, row in zip(plan.rows, params, strict=True):
            least = step.start + step.num_tokens - step.drafts
            if (step.drafts or step.slack) and row.goes_by_positions(least):
                raise ValueError(
                    f"row {step.row} has bounds, and parameters for which its positions, from "
                    f"{least} on, must be known"
                )

    def _uncaptured(
        self, plan: StepPlan, code: Code, computes: Callable[[], object]
    ) -> tuple[VerifyOutput, Tensor]:
        """What a graph would give, and the hidden states of all tokens."""
        rows, shape = self._rows, shape_of(plan)
        adapts = rows.uses_adapters(plan)
        given = host_numbers(plan, shape.num_rows, rows.padding_row)
        # Flat, so that what is said of all rows lies side by side.
        flat = upload(given.reshape(-1), torch.int64, rows.device)
        numbers = flat.view(given.shape)
        computes()
        propose = self._proposing(shape.width - 1)
        inputs, drafts = draft(numbers, shape, rows, propose, adapts=adapts)
        functions = code.serving(adapts=adapts).functions
        hidden_t = self._forward(inputs, functions)
        hidden = hidden_t[inputs.sample_index_s]
        logits = self._forward.model.logits(functions, hidden)
        token_ids = self._sampler.draw(logits, drafts.sampled_rows_e, drafts.sampled_positions_e)
        kept_b = accept(drafts, token_ids, rows)
        return VerifyOutput(hidden, logits, token_ids, kept_b, drafts), hidden_t

    def _sample_again(
        self, plan: StepPlan, out: VerifyOutput, batch: SampleBatch, masks: RowMasks | None
    ) -> SampleOutput:
        """Sample by all that the rows ask for, in place of what was drawn."""
        restore_drafts(out.drafts, self._rows)
        logits = out.logits[: len(batch.rows)]
        if masks is not None:
            spread = spread_masks(plan, masks, out.drafts.width)
            mask = spread.to(self._rows.device, logits.shape[1])
            batch = replace(batch, mask=mask, forced=spread.forced)
        return self._sampler.sample(logits, batch, self._rows.tokens)

    def _accept_again(self, drafts: Drafts, token_ids: Tensor) -> Tensor:
        """Accept the tokens of the plan's rows; those of padding behind them are never read."""
        missing = drafts.sampled_rows_e.numel() - len(token_ids)
        if missing:
            token_ids = torch.cat((token_ids, token_ids.new_zeros(missing)))
        return accept(drafts, token_ids, self._rows)


def spread_masks(plan: StepPlan, masks: RowMasks, width: int) -> RowMasks:
    """Masks of the rows that sample as those of entries.

    A row with a mask has no drafts, so it is for its first entry.
    """
    sampling = [width * at for at, step in enumerate(plan.rows) if step.samples]
    rows = [-1] * (width * len(plan.rows))
    for entry, row in zip(sampling, masks.rows, strict=True):
        rows[entry] = row
    # What is added on a CPU is made anew, for other entries.
    return replace(masks, rows=rows, added=None, forced=[sampling[at] for at in masks.forced])


def read_rows(
    plan: StepPlan, samples: SampleOutput, verdicts: Verdicts, source: str
) -> tuple[list[RowResult], list[int]]:
    """The results of a plan's rows once they are on the host, and indices of unsound ones.

    Parameters
    ----------
    source
        Who has guessed.
    """
    width = verdicts.width
    token_ids: Sequence[int] = samples.token_ids.tolist()
    logprobs = samples.logprob_lists()
    rows: list[RowResult] = []
    unsound: list[int] = []
    for index, (step, verdict) in enumerate(zip(plan.rows, verdicts.rows(), strict=False)):
        own = slice(index * width, index * width + verdict.kept)
        mine = list(token_ids[own])
        scored = [entry for entry in logprobs[own] if entry is not None]
        has_drafts = verdict.drafted > 0
        rows.append(
            RowResult(
                step.row,
                step.generation,
                mine,
                scored or None,
                drafted=max(0, verdict.drafted),
                accepted=verdict.kept - 1 if has_drafts else 0,
                source=source if has_drafts else "",
            )
        )
        if min(mine, default=0) < 0:
            unsound.append(index)
    return rows, unsound


def in_order(
    plan: StepPlan, launched: StepPlan, result: StepResult, rests: Callable[[RowStep], int]
) -> StepResult:
    """A result with rows in the plan's order, and what the device expects of their next steps.

    Parameters
    ----------
    launched
        The plan in whose order they are.
    """
    place_of = {step.row: place for place, step in enumerate(launched.rows)}
    places = [place_of[step.row] for step in plan.rows]
    rows = [
        msgspec.structs.replace(result.rows[place], rests=rests(step))
        if step.samples
        else result.rows[place]
        for step, place in zip(plan.rows, places, strict=True)
    ]
    unsound = [at for at, place in enumerate(places) if place in result.unsound]
    return msgspec.structs.replace(result, rows=rows, unsound=unsound)
