"""A layer on the model's hidden states says the next tokens, and goes on from its own output.

Its inputs at a position are known once the model has computed that position and the token behind it
is there. So it reads a step's tokens at the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.core.config import Config
from src.core.plan import RowStep, StepPlan
from src.engine.drafters.draws import GuessWriter
from src.engine.drafters.largest_pass import run_largest_pass
from src.engine.drafters.reading import Reading, seen_from
from src.engine.drafters.source import DraftPlace
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import build_inputs, only_sampled
from src.engine.speculation import SURE, BatchDrafter, Guess
from src.models import Model
from src.models.eagle import CARRIED, EMBEDDED, FEATURE

# Positions of a decoding row without guesses that may be computed by the model and not read yet.
_LAG: Final = 16


class Pending(NamedTuple):
    """Hidden states [N, W] of a row's positions from ``start`` on, which were not read yet."""

    start: int
    hidden: Tensor

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.hidden)


def run_largest(
    model: Model,
    config: Config,
    features: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
) -> Tensor:
    """See `DraftMemory.largest`, of a layer with these features and scores."""
    lagging = hidden.new_zeros(config.scheduler.max_num_seqs * (_LAG - 1), hidden.shape[1])
    pending = torch.cat((hidden.clone(), lagging))
    feature = features(pending)
    own_t = {FEATURE: feature, EMBEDDED: torch.zeros_like(feature)}
    run_largest_pass(model, config, len(pending), logits, own_t)
    return lagging


class OnwardDrafter(BatchDrafter):
    """Reads hidden states of all rows a step behind the model, and goes on from the last.

    The layer's program reads `FEATURE` and `EMBEDDED`. What stands for the model's hidden states
    where it has computed none is its output `CARRIED`, or else its own hidden states.

    Parameters
    ----------
    model
        The layer.
    target
        The model that it drafts for.
    embedding
        The layer's own; None: it reads the model's.
    most
        The most guesses of a row; None: as many as are wanted.

    Notes
    -----
    Its keys and values stand in blocks that requests share. So what a request leaves unread is read
    before its blocks are given to others, and where something is missing a row begins behind it
    (`Reading`).
    """

    wants_hidden = "all"

    def __init__(
        self,
        model: Model,
        target: Model,
        place: DraftPlace,
        embedding: Any = None,
        most: int | None = None,
    ) -> None:
        super().__init__()
        self._rows, self._sampler = place.rows, place.sampler
        self._model, self._most = model, most
        self._forward_pass = ForwardPass(model, place.kv_cache)
        chosen = target.weights["embedding"] if embedding is None else embedding
        assert isinstance(chosen, Tensor)
        self._embedding = chosen
        self._pending: dict[int, Pending] = {}
        self._reading = Reading(place)

    def features(self, hidden: Tensor) -> Tensor:
        """What the layer reads, [N, H], of the model's hidden states [N, W]."""
        return hidden[:, : self._model.spec.hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, V] float32 of the layer's hidden states [S, H]."""
        raise NotImplementedError

    def vacate(self, row: int) -> None:
        """See `BatchDrafter`."""
        self._pending.pop(row, None)
        self._reading.vacate(row)

    def rest(self) -> None:
        """See `BatchDrafter`."""
        self._pending.clear()
        self._reading.forget()

    def keep_all(self, computed: Mapping[int, tuple[int, int, int]], hidden_t: Tensor) -> None:
        """See `BatchDrafter`."""
        for row, (index, start, count) in computed.items():
            hidden = hidden_t[index : index + count].clone()
            self._reading.write(row, start, start + count)
            before = self._pending.get(row)
            # Some may have been computed again.
            if before is not None and before.start < start <= before.end:
                kept = before.hidden[: start - before.start]
                start, hidden = before.start, torch.cat((kept, hidden))
            self._pending[row] = Pending(start, hidden)

    @torch.inference_mode()
    def finish(self, ends: Callable[[int], bool]) -> None:
        """See `BatchDrafter`. Only whole blocks are ever shared."""
        size, chunks = self._rows.block_size, []
        features: list[Tensor] = []
        for row in [row for row in self._pending if ends(row)]:
            pending = self._readable(row)
            if pending is None:
                continue
            count = pending.end // size * size - pending.start
            if count <= 0:
                continue
            chunks.append(RowStep(row, 0, pending.start, count, False))
            features.append(pending.hidden[:count])
            self._pending[row] = Pending(pending.start + count, pending.hidden[count:])
        if chunks:
            self._read(chunks, torch.cat(features))

    def _readable(self, row: int) -> Pending | None:
        """What is pending of a row, without positions that are of no use."""
        pending = self._pending.get(row)
        if pending is None:
            return None
        skipped = self._reading.begin(row, pending.start) - pending.start
        if skipped:
            pending = Pending(pending.start + skipped, pending.hidden[skipped:])
            self._pending[row] = pending
        return pending if len(pending.hidden) else None

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """See `BatchDrafter`."""
        if self._most is not None:
            asked = {row: min(count, self._most) for row, count in asked.items()}
        chunks: list[RowStep] = []
        features: list[Tensor] = []
        known: dict[int, int] = {}
        size = self._rows.block_size
        for step in rows:
            pending = self._readable(step.row)
            if pending is None:
                continue
            end = step.start + step.num_tokens
            # The feature of a position is read with the token behind it.
            is_asked = step.row in asked and pending.end == end - 1
            # Others may begin behind a whole block in the next step.
            is_whole = pending.end // size > pending.start // size
            if not (is_asked or is_whole or len(pending.hidden) >= _LAG or step.num_tokens > 1):
                continue
            if is_asked:
                known[step.row] = end
            count = len(pending.hidden)
            chunks.append(RowStep(step.row, step.generation, pending.start, count, is_asked))
            features.append(pending.hidden)
            del self._pending[step.row]
        self.guesses = {}
        if chunks:
            self._draft(chunks, torch.cat(features), known, asked)

    def _draft(
        self,
        chunks: Sequence[RowStep],
        hidden: Tensor,
        known: dict[int, int],
        asked: Mapping[int, int],
    ) -> None:
        generations = {step.row: step.generation for step in chunks}
        feature, logits = self._read(chunks, hidden)
        if not known:
            return
        with GuessWriter(self._rows, self._sampler, known) as writer:
            place_of = {row: place for place, row in enumerate(known)}
            for count in range(1, max(asked[row] for row in known) + 1):
                drawn = writer.draw(list(place_of), logits)
                going_on = [row for row in drawn if asked[row] > count]
                if not going_on:
                    break
                steps = [
                    RowStep(row, generations[row], known[row] + count - 2, 1, True)
                    for row in going_on
                ]
                carried = feature[[place_of[row] for row in going_on]]
                feature, logits = self._run(steps, carried)
                place_of = {row: place for place, row in enumerate(going_on)}
        self.guesses = {row: Guess(each, SURE, self.source) for row, each in writer.guesses.items()}

    def _read(self, chunks: Sequence[RowStep], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `_run`, of hidden states [T, W] that the model has computed."""
        found = self._run(chunks, self.features(hidden))
        for step in chunks:
            self._reading.read(step.row, step.start, step.start + step.num_tokens)
        return found

    def _run(self, steps: Sequence[RowStep], feature: Tensor) -> tuple[Tensor, Tensor]:
        """Features and scores, [S, H] and [S, V] float32, behind the rows that sample."""
        inputs = build_inputs(StepPlan(0, [], [], list(steps)), self._rows)
        counts = torch.tensor([step.num_tokens for step in steps])
        rows_t = torch.repeat_interleave(torch.tensor([step.row for step in steps]), counts)
        # The tokens behind the positions.
        ids = self._rows.tokens[rows_t, inputs.positions_t + 1].to(torch.int64)
        embedded = functional.embedding(ids.clamp(0, len(self._embedding) - 1), self._embedding)
        inputs = replace(
            only_sampled(inputs, self._rows),
            adapter_slots_t=None,
            own_t={FEATURE: feature, EMBEDDED: embedded.to(feature.dtype)},
        )
        numbers = [step.row for step in steps]
        inputs = seen_from(inputs, numbers, self._reading.first, self._rows.block_size)
        outputs: dict[str, Tensor] = {}
        hidden = self._forward_pass(inputs, self._model.functions, outputs)
        if not inputs.samplers.rows:
            return hidden, hidden
        return outputs.get(CARRIED, hidden), self.logits(hidden)
