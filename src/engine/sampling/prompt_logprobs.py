"""Log-probabilities of prompt tokens, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from src.core.outputs import TokenLogprobs
from src.core.plan import RowInstall, RowStep, StepPlan
from src.core.step_message import DeviceRequest
from src.engine.sampling import LogprobTensors, gather_logprobs

# Positions scored at a time, which bounds the [positions, vocab_size] logits.
_SLICE = 128


class PromptLogprobs:
    """The scores of one step: index of the row in the plan -> its slices, in order."""

    def __init__(self, slices: dict[int, list[LogprobTensors]]) -> None:
        self.slices = slices

    def to_host(self) -> PromptLogprobs:
        """Begin the copy to host memory, without waiting for it."""
        return PromptLogprobs(
            {index: [part.to_host() for part in parts] for index, parts in self.slices.items()}
        )

    def of_row(self, index: int) -> list[TokenLogprobs] | None:
        """The log-probabilities of the plan's row at ``index``; ``None`` if it has none."""
        parts = self.slices.get(index)
        if parts is None:
            return None
        return [entry for part in parts for entry in part.to_lists()]


def are_sound(scores: Sequence[TokenLogprobs]) -> bool:
    """Whether all are numbers. Invalid logits (a NaN, a +inf, or only -inf) give NaN."""
    return not any(math.isnan(score.logprob) for score in scores)


def still_unscored(request: DeviceRequest, install: RowInstall) -> DeviceRequest | None:
    """The request, if it still waits for log-probabilities of its prompt when it is installed.

    They are delivered with its first token, so a request that resumes with output has them already.
    """
    has_output = len(install.token_ids) > install.prompt_len
    return None if has_output or request.params.prompt_logprobs is None else request


def asks_for_scores(plan: StepPlan, unscored: Sequence[DeviceRequest | None]) -> bool:
    """Whether the step computes prompt log-probabilities that one of its requests waits for."""
    return any(_num_scored(step, unscored[step.row]) for step in plan.rows)


def score_prompts(
    plan: StepPlan,
    unscored: Sequence[DeviceRequest | None],
    hidden: Tensor,
    tokens: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> PromptLogprobs | None:
    """Score the prompt tokens that follow each position of this step.

    Parameters
    ----------
    unscored
        Row -> the request that still waits for log-probabilities of its prompt, or ``None``.
    hidden
        [T, hidden_size], the step's tokens in the plan's order.
    tokens
        [max_num_seqs + 1, max_model_len] int32, the token buffer; the last row is for padding.
    logits
        Hidden states [P, hidden_size] to float32 [P, vocab_size].
    """
    slices: dict[int, list[LogprobTensors]] = {}
    first_token = 0
    for index, step in enumerate(plan.rows):
        request = unscored[step.row]
        top = None if request is None else request.params.prompt_logprobs
        count = _num_scored(step, request)
        if top is not None and count:
            slices[index] = []
            for begin in range(0, count, _SLICE):
                end = min(begin + _SLICE, count)
                targets = tokens[step.row, step.start + begin + 1 : step.start + end + 1]
                scores = logits(hidden[first_token + begin : first_token + end])
                slices[index].append(gather_logprobs(scores, targets.to(torch.int64), top))
        first_token += step.num_tokens
    return PromptLogprobs(slices) if slices else None


def _num_scored(step: RowStep, request: DeviceRequest | None) -> int:
    """Number of the step's positions that predict a prompt token to be scored."""
    if request is None or request.params.prompt_logprobs is None:
        return 0
    # The last prompt position predicts the first output token, which is not a prompt token.
    return max(0, min(step.num_tokens, request.prompt_len - 1 - step.start))
