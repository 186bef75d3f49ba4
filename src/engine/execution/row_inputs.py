"""What requests bring of the step inputs that a model's family declares, by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from src.core.plan import StepPlan
from src.core.request import StepValues
from src.engine.devices.transfer import upload
from src.models.program import StepInput


class RowInputs:
    """Values on the host, from which the inputs of a step are gathered.

    Parameters
    ----------
    declared
        The model's own step inputs.
    num_rows
        Rows that requests may get.
    """

    def __init__(self, declared: Sequence[StepInput], num_rows: int) -> None:
        self._declared = tuple(declared)
        # Whether tokens for which nothing is brought have other values than zeros.
        self._counts = any(each.beyond == "onwards" for each in self._declared)
        # Row -> name -> [tokens, *shape]
        self._values: list[dict[str, np.ndarray]] = [{} for _ in range(num_rows)]

    def install(self, row: int, given: Mapping[str, StepValues]) -> None:
        """Give a row the values of its request."""
        self._values[row] = {
            each.tensor.name: _decoded(each, given[each.tensor.name])
            for each in self._declared
            if each.tensor.name in given
        }

    def clear(self, row: int) -> None:
        """Forget a row's values."""
        self._values[row] = {}

    def gather(self, plan: StepPlan, num_tokens: int, device: torch.device) -> dict[str, Tensor]:
        """The inputs [num_tokens, *shape] of a plan's tokens, followed by padding, by name."""
        return {
            each.tensor.name: self._gather(each, plan, num_tokens, device)
            for each in self._declared
        }

    def integers(self, plan: StepPlan) -> np.ndarray | None:
        """The inputs of a plan's tokens as one array, int64 [inputs, T]; ``None``: all are zeros.

        For models whose inputs are one integer for each token.
        """
        if not self._declared:
            return None
        if not self._counts and not any(self._values[step.row] for step in plan.rows):
            return None
        return np.stack([self._numbers(each, plan, plan.num_tokens) for each in self._declared])

    def padding(self, num_tokens: int, device: torch.device) -> dict[str, Tensor]:
        """The inputs of padding: zeros."""
        return {
            each.tensor.name: torch.zeros(
                (num_tokens, *each.tensor.shape), dtype=each.tensor.dtype, device=device
            )
            for each in self._declared
        }

    def _gather(
        self, own: StepInput, plan: StepPlan, num_tokens: int, device: torch.device
    ) -> Tensor:
        gathered = self._numbers(own, plan, num_tokens)
        # Cast on the device: numpy has no bfloat16.
        return upload(gathered, torch.from_numpy(gathered).dtype, device).to(own.tensor.dtype)

    def _numbers(self, own: StepInput, plan: StepPlan, num_tokens: int) -> np.ndarray:
        gathered = np.zeros((num_tokens, *own.tensor.shape), _kind_of(own))
        at = 0
        for step in plan.rows:
            values = self._values[step.row].get(own.tensor.name)
            brought = 0 if values is None else len(values)
            end = step.start + step.num_tokens
            # Tokens of the step for which the request brings values, and those beyond.
            count = max(0, min(end, brought) - step.start)
            if values is not None and count:
                gathered[at : at + count] = values[step.start : step.start + count]
            if own.beyond == "onwards" and count < step.num_tokens:
                first = 0 if values is None or not brought else int(values.max()) + 1
                onwards = np.arange(step.start + count, end) - brought + first
                shaped = onwards.reshape(-1, *(1,) * len(own.tensor.shape))
                gathered[at + count : at + step.num_tokens] = shaped
            at += step.num_tokens
        return gathered


def _kind_of(own: StepInput) -> type[np.generic]:
    return np.int64 if own.is_integer else np.float32


def _decoded(own: StepInput, given: StepValues) -> np.ndarray:
    if tuple(given.shape[1:]) != own.tensor.shape:
        raise ValueError(f"{own.tensor.name} has values {given.shape[1:]}, not {own.tensor.shape}")
    return np.frombuffer(given.data, _kind_of(own)).reshape(given.shape)
