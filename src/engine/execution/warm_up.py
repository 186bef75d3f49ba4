"""How many tokens the steps have that compile every kernel before a request waits for it."""

from __future__ import annotations

from src.models import Model, ServedModel
from src.models.layers.experts import ExpertsSpec
from src.ops.projections.experts import PAIRS_OF_A_CROWD

KERNEL_WARM_UP_TOKENS = (8, 1040)
"""On a GPU: one small step, and one for kernels that have a variant for large steps."""


def warm_up_tokens(model: ServedModel, most_tokens: int) -> tuple[int, ...]:
    """The sizes of the warm-up steps of a model on a GPU, in tokens.

    The kernels of experts have a variant for many tokens per expert. The last step is large enough
    for that, if a step of ``most_tokens`` tokens is. None is larger than that: so much memory may
    be there.
    """
    needed = max(_tokens_of_a_crowd(model), default=0)
    few, many = KERNEL_WARM_UP_TOKENS
    return tuple(min(tokens, most_tokens) for tokens in (few, max(many, needed)))


def _tokens_of_a_crowd(model: ServedModel) -> list[int]:
    """Per layer of experts: how many tokens give an expert more pairs than a small tile takes."""
    if not isinstance(model, Model):
        return []
    found = []
    for call in model.program.calls:
        for link, weights in zip(call.chain.links, model.bound[call.slot], strict=True):
            if isinstance(link.spec, ExpertsSpec):
                pairs = PAIRS_OF_A_CROWD * len(weights.router)
                found.append(pairs // link.spec.routing.chosen + 1)
    return found
