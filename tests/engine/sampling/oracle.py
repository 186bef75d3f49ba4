"""The same semantics the slow way: one row, python loops, float64, a full sort."""

from __future__ import annotations

import math

import numpy as np

from src.engine.sampling.logits import BANNED
from tests.engine.sampling.harness import Owner


def adjusted(owner: Owner, logits: np.ndarray) -> np.ndarray:
    """Raw logits [V] to logits before truncation, float64."""
    request, params = owner.request, owner.request.params
    values = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        values = np.array(
            [x if v in params.allowed_token_ids else -math.inf for v, x in enumerate(values)]
        )
    banned = set()
    for word in request.bad_words_token_ids:
        prefix = list(word[:-1])
        if prefix == owner.output[len(owner.output) - len(prefix) :] or not prefix:
            banned.add(word[-1])
    if len(owner.output) < params.min_tokens:
        banned |= request.end_token_ids
    for token_id in banned:
        values[token_id] = min(values[token_id], BANNED)
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    for token_id in np.flatnonzero(values > BANNED):
        if token_id in owner.token_ids:
            factor = params.repetition_penalty
            values[token_id] *= 1 / factor if values[token_id] > 0 else factor
        count = owner.output.count(token_id)
        values[token_id] -= params.frequency_penalty * count
        values[token_id] -= params.presence_penalty * (count > 0)
    return values


def typical(probabilities: np.ndarray, mass: float) -> np.ndarray:
    """Which tokens the set of "Locally Typical Sampling", equation 8, has; [V] bool.

    The smallest set of tokens with the least | H + log p | that has at least this mass.
    """
    possible = np.flatnonzero(probabilities)
    surprises = -np.log(probabilities[possible])
    entropy = float((probabilities[possible] * surprises).sum())
    order = possible[np.argsort(np.abs(surprises - entropy), kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(probabilities), bool)
    kept[order[before < mass]] = True
    return kept


def probabilities(owner: Owner, logits: np.ndarray) -> np.ndarray:
    """The exact distribution that the row's token is drawn from; no ties at any threshold."""
    params = owner.request.params
    values = adjusted(owner, logits)
    scaled = values / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.top_n_sigma:
        # Of "Top-n-sigma: Not All Logits Are You Need", algorithm 1, on the logits before the
        # temperature; what is banned is no logit of the model's.
        real = values[values > BANNED / 10]
        weights[values < real.max() - params.top_n_sigma * real.std()] = 0.0
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    if params.typical_p < 1.0:
        weights[~typical(weights / weights.sum(), params.typical_p)] = 0.0
        order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return weights / weights.sum()
