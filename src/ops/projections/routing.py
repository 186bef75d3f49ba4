"""Routing of a mixture of experts: which experts compute a token, and with what weights.

It is plain torch and treats each row alone: it compiles within a segment, and a token's choice does
not depend on the batch. Its weights have the same bits in every batch with `deterministic`. The
differences between model families are fields of `Routing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from src.ops.elementwise import by_token

Scoring: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_chosen"]

TOO_SMALL_TO_SHOW: Final = 1e-20
"""Changes no sum of softmax scores; a sum of sigmoids may be 0."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a family of models chooses experts.

    Attributes
    ----------
    chosen
        Number of experts per token, k.
    scoring
        `softmax` over all experts (Mixtral, Qwen3-MoE), `sigmoid` of each (DeepSeek V3), or
        `softmax_of_chosen`, over the k largest logits (gpt-oss).
    renormalize
        Divide a token's weights by their sum (Mixtral: always; Qwen3-MoE: `norm_topk_prob`).
    added
        What is added to that sum.
    scale
        Factor of all weights, applied last (`routed_scaling_factor`).
    groups
        Number of groups of consecutive experts (`n_group`).
    chosen_groups
        Number of groups from which experts may be chosen (`topk_group`).
    ranked_by
        How many of a group's best scores are summed to rank it: 2 (DeepSeek V3), or 1 (V2).
    """

    chosen: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    added: float = TOO_SMALL_TO_SHOW
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    ranked_by: int = 2


def route(
    logits: Tensor,
    routing: Routing,
    choice_bias: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Parameters
    ----------
    logits
        [T, E] float32. Compute them in float32: rounded to bfloat16, two experts' logits may become
        equal.
    routing
        How this model chooses.
    choice_bias
        [E] float32, added to the scores for the choice only; the weights do not include it
        (`e_score_correction_bias`). None for no bias.
    deterministic
        Whether a token's weights must have the same bits in every batch.

    Returns
    -------
    Weights [T, k] float32 and experts [T, k] int64, the best first.

    Raises
    ------
    ValueError
        The logits are not float32.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"expected router logits in float32, got {logits.dtype}")
    scores = _scores(logits, routing.scoring, deterministic)  # [T, E]
    # Sigmoids of large logits are equal where the logits are not.
    wanted = logits if routing.scoring == "sigmoid" and routing.groups == 1 else scores
    wanted = wanted if choice_bias is None else scores + choice_bias
    if routing.chosen_groups < routing.groups:
        wanted = _within_groups(wanted, routing)
    ids = _largest(wanted, routing.chosen)
    weights = scores.gather(1, ids)
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    elif routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.added)
    return (weights if routing.scale == 1.0 else weights * routing.scale), ids


def _scores(logits: Tensor, scoring: str, deterministic: bool) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(dim=-1)
    if scoring == "sigmoid":
        return by_token(torch.sigmoid, logits) if deterministic else logits.sigmoid()
    return logits


def _largest(wanted: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values along the last dimension, largest first: int64."""
    if not torch.compiler.is_compiling():
        return wanted.topk(count, dim=-1).indices
    # The compiler has no `topk` of its own. It would call torch's, and would have to materialise
    # the surrounding tensors for that call. `argmax` in a loop compiles to plain loops.
    numbers = torch.arange(wanted.shape[-1], device=wanted.device)
    found: list[Tensor] = []
    for _ in range(count):
        found.append(wanted.argmax(dim=-1, keepdim=True))
        wanted = torch.where(numbers == found[-1], -torch.inf, wanted)
    return torch.cat(found, dim=-1)


def _within_groups(wanted: Tensor, routing: Routing) -> Tensor:
    """Scores [T, E] in which experts outside of the best groups have -inf."""
    groups, count = routing.groups, routing.ranked_by
    by_group = wanted.unflatten(1, (groups, -1))  # [T, groups, E / groups]
    ranks = by_group.gather(2, _largest(by_group, count)).sum(dim=-1)
    best = _largest(ranks, routing.chosen_groups)
    is_open = torch.zeros_like(by_group[:, :, 0], dtype=torch.bool).scatter(1, best, True)
    within: Tensor = by_group.masked_fill(~is_open[:, :, None], -torch.inf)
    return within.flatten(1)
