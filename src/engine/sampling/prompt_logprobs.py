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

# Positions scored at once: bounds the [positions, vocab_size] logits that exist at a time.
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
        """What the row at ``index`` of the plan asked for; ``None`` if it did not ask."""
        parts = self.slices.get(index)
        if parts is None:
            return None
        return [entry for part in parts for entry in part.to_lists()]


def are_sound(scores: Sequence[TokenLogprobs]) -> bool:
    """Whether all are numbers: of logits with a NaN or +inf, or of -inf alone, none is."""
    return not any(math.isnan(score.logprob) for score in scores)


def still_unscored(request: DeviceRequest, install: RowInstall) -> DeviceRequest | None:
    """The request, if it waits for scores of its prompt when it is installed like this.

    They are delivered with its first token, so one that resumes with output has got them.
    """
    has_output = len(install.token_ids) > install.prompt_len
    return None if has_output or request.params.prompt_logprobs is None else request


def asks_for_scores(plan: StepPlan, unscored: Sequence[DeviceRequest | None]) -> bool:
    """Whether the step computes what the request of a row, if it is ``unscored``, waits for."""
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
        By row, whoever waits for scores.
    hidden
        [T, hidden_size], the step's tokens in the plan's order.
    tokens
        [max_num_seqs + 1, max_model_len] int32, the token buffer; the last row is padding's.
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
    """Positions of the step that predict a prompt token which its request wants scored."""
    if request is None or request.params.prompt_logprobs is None:
        return 0
    # The last prompt position predicts the first output token: that is no prompt score.
    return max(0, min(step.num_tokens, request.prompt_len - 1 - step.start))
