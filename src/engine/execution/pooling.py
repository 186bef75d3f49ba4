"""One vector for each sequence that is pooled, from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from src.core.plan import RowResult, StepPlan, StepResult
from src.core.request import Pooling
from src.models.vector_modules import VectorModules

# Positions that are added one by one, beside other groups of as many.
GROUP: Final = 32


@dataclass(frozen=True)
class Vectors:
    """The vectors of a step.

    Attributes
    ----------
    rows
        The rows that end.
    values
        [S, N] float32, one for each.
    """

    rows: Sequence[int]
    values: Tensor

    def to_host(self) -> Vectors:
        """Begin the copy to host memory, without waiting for it."""
        return Vectors(self.rows, self.values.to("cpu", non_blocking=True))

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with the vectors; those that are no numbers make a row unsound."""
        of_row = dict(zip(self.rows, self.values, strict=True))
        rows: list[RowResult] = []
        unsound = list(result.unsound)
        for index, row in enumerate(result.rows):
            vector = of_row.get(row.row)
            if vector is None:
                rows.append(row)
                continue
            if not bool(vector.isfinite().all()):
                unsound.append(index)
            rows.append(msgspec.structs.replace(row, vector=vector.numpy().tobytes()))
        return msgspec.structs.replace(result, rows=rows, unsound=unsound)


class RowPooling:
    """Pools the rows whose requests ask for a vector. Use it on the device thread only.

    A sequence may be computed in several steps. What its vector needs of the earlier ones is kept
    for each row, in float32: its first token's hidden state, or their sum.

    Parameters
    ----------
    of_rows
        Row -> how its request is pooled, or None; kept up to date by their owner.
    deterministic
        Add the tokens in an order that does not depend on the steps in which they are computed.
    modules
        What the checkpoint makes of pooled vectors.
    """

    def __init__(
        self,
        of_rows: Sequence[Pooling | None],
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

    def wants(self, plan: StepPlan) -> bool:
        """Whether the hidden state of every token of the step is needed."""
        return any(self._of_rows[step.row] is not None for step in plan.rows)

    def pool(self, plan: StepPlan, hidden: Tensor) -> Vectors | None:
        """The vectors of the sequences that end in this step; None if there are none.

        Parameters
        ----------
        hidden
            [T, hidden_size] of the step's tokens in the plan's order; padding may follow.
        """
        rows, values = [], []
        begin = 0
        for step in plan.rows:
            end = begin + step.num_tokens
            kind = self._of_rows[step.row]
            if kind is not None:
                vector = self._vector(kind, step.row, step.start, hidden[begin:end], step.pools)
                if step.pools:
                    rows.append(step.row)
                    values.append(vector)
            begin = end
        if not rows:
            return None
        pooled = torch.stack(values)
        return Vectors(rows, pooled if self._modules is None else self._modules(pooled))

    def _vector(self, kind: Pooling, row: int, start: int, hidden: Tensor, is_last: bool) -> Tensor:
        """What the tokens of a row up to here come to, [hidden_size] float32."""
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
        total = hidden.float().sum(0)
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
