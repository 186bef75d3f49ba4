"""A vector or scores for each sequence that is pooled, from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Pooling
from src.core.scoring import ScoreTokens
from src.core.step_message import DeviceRequest
from src.core.task import HEAD_TASKS
from src.models import ServedModel
from src.models.program import Function
from src.models.vector_modules import VectorModules

# Positions that are added one by one, beside other groups of as many.
GROUP: Final = 32


Head: TypeAlias = Callable[[Tensor], Tensor]
"""From hidden states [S, hidden_size] in the model's dtype to scores, float32 [S, labels]."""


class Piece(NamedTuple):
    """What a step gives of a sequence whose every token has a result.

    Attributes
    ----------
    start
        Position of its first token.
    ends
        Whether it is the last.
    """

    start: int
    ends: bool


@dataclass(frozen=True)
class Vectors:
    """What a step gives of the rows that are pooled.

    Attributes
    ----------
    rows
        The rows that end, and those of which it gives a piece.
    values
        One for each: of a vector or of scores float32 [N], of a piece [T, N]. Hidden states of a
        piece have the model's dtype, and are those of the step itself: a copy in float32 of each
        token would be the largest tensor of many a step.
    pieces
        For each row, `Piece` or None.
    known
        Row -> the bytes of its pieces so far. Used on the host, in the order of the steps.
    """

    rows: Sequence[int]
    values: Sequence[Tensor]
    pieces: Sequence[Piece | None]
    known: dict[int, list[bytes]]

    def to_host(self) -> Vectors:
        """Begin the copy to host memory, without waiting for it."""
        if not self.values or self.values[0].device.type == "cpu":
            return self
        return self.copied(lambda flat: flat.to("cpu", non_blocking=True))

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Vectors:
        """The same in the memory to which ``copy`` brings numbers, in one call for each dtype."""
        made = list(self.values)
        for dtype in dict.fromkeys(value.dtype for value in made):
            chosen = [index for index, value in enumerate(made) if value.dtype == dtype]
            copies = in_one_copy([made[index] for index in chosen], copy)
            for index, value in zip(chosen, copies, strict=True):
                made[index] = value
        return replace(self, values=made)

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with the vectors; those that are no numbers make a row unsound."""
        of_row = dict(zip(self.rows, zip(self.values, self.pieces, strict=True), strict=True))
        rows: list[RowResult] = []
        unsound = list(result.unsound)
        for index, row in enumerate(result.rows):
            found = of_row.get(row.row)
            numbers = None if found is None else self._numbers(row.row, *found)
            if numbers is None:
                rows.append(row)
                continue
            if not np.isfinite(np.frombuffer(numbers, np.float32)).all():
                unsound.append(index)
            rows.append(msgspec.structs.replace(row, vector=numbers))
        return msgspec.structs.replace(result, rows=rows, unsound=unsound)

    def _numbers(self, row: int, value: Tensor, piece: Piece | None) -> bytes | None:
        """The numbers of a row that ends; None: more pieces will come."""
        own: bytes = value.float().numpy().tobytes()
        if piece is None:
            return own
        # A row that was preempted, or that another request has got, begins again.
        before = [] if piece.start == 0 else self.known.pop(row, [])
        before.append(own)
        if piece.ends:
            return b"".join(before)
        self.known[row] = before
        return None


class RowPooling:
    """Pools the rows whose requests ask for a vector or for scores. For the device thread only.

    A sequence may be computed in several steps. What its vector needs of the earlier ones is kept
    for each row, in float32: its first token's hidden state, or their sum.

    Parameters
    ----------
    of_rows
        Row -> its request, if that is pooled, or None; kept up to date by their owner.
    deterministic
        Add the tokens in an order that does not depend on the steps in which they are computed.
    modules
        What the checkpoint makes of pooled vectors.
    """

    def __init__(
        self,
        of_rows: Sequence[DeviceRequest | None],
        hidden_size: int,
        device: torch.device,
        *,
        deterministic: bool = False,
        modules: VectorModules | None = None,
    ) -> None:
        self._of_rows = of_rows
        self._modules = modules
        self._hidden_size = hidden_size
        self._device = device
        self._deterministic = deterministic
        # Row -> [2, hidden_size] float32: the state or the sum; the sum of a group of positions
        # that is not complete yet, see `add_in_order`. Made when the first request needs it.
        self._kept: Tensor | None = None
        self._known: dict[int, list[bytes]] = {}

    def wants(self, plan: StepPlan) -> bool:
        """Whether the hidden state of every token of the step is needed."""
        return any(self._of_rows[step.row] is not None for step in plan.rows)

    def pool(self, plan: StepPlan, hidden: Tensor) -> Vectors | None:
        """Hidden states, or their means, of the sequences that end in this step.

        None if there are none. Sequences whose every token has a result give those of this step.

        Parameters
        ----------
        hidden
            [T, hidden_size] of the step's tokens in the plan's order; padding may follow.
        """
        self._forget_pieces()
        rows: list[int] = []
        values: list[Tensor] = []
        pieces: list[Piece | None] = []
        begin = 0
        for step in plan.rows:
            end = begin + step.num_tokens
            request = self._of_rows[step.row]
            if request is not None and request.pooling is not None:
                # What is not pooled is left out as if the sequence began behind it.
                start = step.start - request.num_unpooled
                own, is_all = hidden[begin + max(-start, 0) : end], request.pooling == "all"
                if step.pools or len(own):
                    start = max(start, 0)
                    vector = self._vector(request.pooling, step.row, start, own, step.pools)
                    if step.pools or is_all:
                        rows.append(step.row)
                        values.append(vector)
                        pieces.append(Piece(start, step.pools) if is_all else None)
            begin = end
        if not rows:
            return None
        return self._through_modules(Vectors(rows, values, pieces, self._known))

    def _through_modules(self, vectors: Vectors) -> Vectors:
        """The same, with what the checkpoint's modules make of vectors of texts."""
        chosen = [
            index
            for index, row in enumerate(vectors.rows)
            if vectors.pieces[index] is None and not self._asks_for_scores(row)
        ]
        if self._modules is None or not chosen:
            return vectors
        made = list(vectors.values)
        pooled = torch.stack([made[index] for index in chosen])
        for index, vector in zip(chosen, self._modules(pooled), strict=True):
            made[index] = vector
        return replace(vectors, values=made)

    def through_head(self, vectors: Vectors, head: Head, dtype: torch.dtype) -> Vectors:
        """The same, where scores stand for the hidden states of rows that ask for them.

        Parameters
        ----------
        head
            Called at most once.
        dtype
            The model's.
        """
        asks = [self._asks_for_scores(row) for row in vectors.rows]
        if not any(asks):
            return vectors
        given = [
            value.reshape(-1, self._hidden_size).to(dtype)
            for value, is_asked in zip(vectors.values, asks, strict=True)
            if is_asked
        ]
        scores = head(torch.cat(given)).split([len(each) for each in given])
        made, left = list(vectors.values), iter(scores)
        for index, is_asked in enumerate(asks):
            if is_asked:
                own = next(left)
                made[index] = own[0] if vectors.pieces[index] is None else own
        return replace(vectors, values=made)

    def _asks_for_scores(self, row: int) -> bool:
        request = self._of_rows[row]
        return request is not None and request.task in HEAD_TASKS

    def _forget_pieces(self) -> None:
        """Drop the pieces of rows that were taken from their requests."""
        for row in list(self._known):
            request = self._of_rows[row]
            if request is None or request.pooling != "all":
                self._known.pop(row, None)

    def _vector(self, kind: Pooling, row: int, start: int, hidden: Tensor, is_last: bool) -> Tensor:
        """What a row's tokens up to here come to, float32 [hidden_size]; or these, [T, ...]."""
        if kind == "all":
            return hidden
        if kind == "last":
            return hidden[-1].float()
        if kind == "first":
            own = hidden[0].float()
            if start == 0 and is_last:
                return own
            kept = self._rows_kept()[row, 0]
            if start == 0:
                kept.copy_(own)
            return kept.clone()
        count = start + len(hidden)
        if self._deterministic:
            sums = self._rows_kept()[row]
            if start == 0:
                sums.zero_()
            add_in_order(sums[0], sums[1], start, hidden.float())
            return (sums[0] + sums[1]) / count
        total = hidden.sum(0, dtype=torch.float32)
        if start or not is_last:
            kept = self._rows_kept()[row, 0]
            total = total + kept if start else total
            kept.copy_(total)
        return total / count

    def _rows_kept(self) -> Tensor:
        if self._kept is None:
            shape = (len(self._of_rows), 2, self._hidden_size)
            self._kept = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return self._kept


def pooled_by(
    pooling: RowPooling,
    plan: StepPlan,
    hidden: Tensor,
    model: ServedModel,
    functions: Sequence[Function],
    score_tokens: ScoreTokens | None,
) -> Vectors | None:
    """Vectors of the rows that are pooled, or what the head makes of them; None: there are none.

    Parameters
    ----------
    hidden
        [T, ...] in the model's dtype. Behind hidden states may stand what was tapped of layers; the
        head does not read it.
    functions
        What runs the model.
    score_tokens
        Whose logits make a score; None: the head gives scores.
    """
    size, whole = model.spec.hidden_size, hidden.shape[1]
    vectors = pooling.pool(plan, hidden[:, :size])
    if vectors is None:
        return None

    def head(states: Tensor) -> Tensor:
        states = functional.pad(states, (0, whole - size))
        return score_of(model.logits(functions, states), score_tokens)

    return pooling.through_head(vectors, head, hidden.dtype)


def in_one_copy(values: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Tensors of any shapes in the memory to which ``copy`` brings their numbers, in one call."""
    flat = copy(torch.cat([each.reshape(-1) for each in values]))
    parts = flat.split([each.numel() for each in values])
    return [part.view(each.shape) for part, each in zip(parts, values, strict=True)]


def score_of(logits: Tensor, tokens: ScoreTokens | None) -> Tensor:
    """Scores [S, 1] by the logits [S, V] of these tokens; without tokens the logits themselves."""
    if tokens is None:
        return logits
    score = logits[:, tokens.true_id]
    if tokens.false_id is not None:
        score = score - logits[:, tokens.false_id]
    return score[:, None]


def add_in_order(total: Tensor, group: Tensor, start: int, values: Tensor) -> None:
    """Add further tokens' values to a sum, to the same bits however many come at a time.

    Positions are added in groups of `GROUP` by their place in the sequence: within a group one by
    one, and each complete group to the total, in their order. Groups are added beside each other,
    number by number, so that a call takes few operations.

    Parameters
    ----------
    total
        [H] float32, the sum of the complete groups; changed in place.
    group
        [H] float32, the sum of the group that has begun; changed in place.
    start
        Position of the first value.
    values
        [n, H] float32.
    """
    head = min(-start % GROUP, len(values))
    for value in values[:head]:
        group += value
    if head and (start + head) % GROUP == 0:
        total += group
        group.zero_()
    complete = (len(values) - head) // GROUP
    end = head + complete * GROUP
    if complete:
        groups = values[head:end].view(complete, GROUP, -1)
        sums = torch.zeros_like(groups[:, 0])
        for place in range(GROUP):
            sums += groups[:, place]
        for each in sums:
            total += each
    for value in values[end:]:
        group += value
