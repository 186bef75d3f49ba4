"""A layer on the model's hidden states says the next tokens, and goes on from its own output.

Its inputs at a position are known once the model has computed that position and the token behind it
is there. So it reads a step's tokens at the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.core.plan import RowStep, StepPlan
from src.engine.drafters.draws import GuessWriter
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

    Attributes
    ----------
    source
        Who guesses.
    """

    wants_hidden = "all"
    source: ClassVar[str]

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

    def features(self, hidden: Tensor) -> Tensor:
        """What the layer reads, [N, H], of the model's hidden states [N, W]."""
        return hidden[:, : self._model.spec.hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [S, V] float32 of the layer's hidden states [S, H]."""
        raise NotImplementedError

    def vacate(self, row: int) -> None:
        """See `BatchDrafter`."""
        self._pending.pop(row, None)

    def keep_all(self, computed: Mapping[int, tuple[int, int, int]], hidden_t: Tensor) -> None:
        """See `BatchDrafter`."""
        for row, (index, start, count) in computed.items():
            hidden = hidden_t[index : index + count].clone()
            before = self._pending.get(row)
            if before is not None and before.end == start:
                start, hidden = before.start, torch.cat((before.hidden, hidden))
            self._pending[row] = Pending(start, hidden)

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        """See `BatchDrafter`."""
        if self._most is not None:
            asked = {row: min(count, self._most) for row, count in asked.items()}
        chunks: list[RowStep] = []
        features: list[Tensor] = []
        known: dict[int, int] = {}
        for step in rows:
            pending = self._pending.get(step.row)
            if pending is None:
                continue
            end = step.start + step.num_tokens
            # The feature of a position is read with the token behind it.
            is_asked = step.row in asked and pending.end == end - 1
            if not (is_asked or len(pending.hidden) >= _LAG or step.num_tokens > 1):
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
        feature, logits = self._run(chunks, self.features(hidden))
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
        outputs: dict[str, Tensor] = {}
        hidden = self._forward_pass(inputs, self._model.functions, outputs)
        if not inputs.samplers.rows:
            return hidden, hidden
        return outputs.get(CARRIED, hidden), self.logits(hidden)
