"""How the numbers of a model's head become probabilities of labels, and scores of two texts."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from src.core.request import Pooling

ResultActivation: TypeAlias = Literal["sigmoid", "softmax", "tanh", "none"]
"""What makes a result of the head's numbers."""


class ScoreTokens(msgspec.Struct, frozen=True):
    """Tokens whose logits, at a text's end, make its score.

    Attributes
    ----------
    true_id
        The token of "yes": its logit is the score.
    false_id
        The token of "no", whose logit is taken off it; ``None``: nothing is.
    """

    true_id: int
    false_id: int | None = None


class LabelRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's head says of a text, or of each token.

    Attributes
    ----------
    labels
        Their names, in the order of the head's numbers.
    activation
        What makes probabilities of the head's numbers.
    pooling
        Whose hidden states the head reads; ``all``: those of each token.
    max_tokens
        The most tokens of a text, special ones included.
    """

    labels: tuple[str, ...]
    activation: ResultActivation
    pooling: Pooling
    max_tokens: int


class ScoringRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """From two texts to how well they match.

    Attributes
    ----------
    joins
        What makes one text of both: the ``tokenizer``, as pairs of sequences; the checkpoint's chat
        ``template``, by its roles query and document; or the template ``built_in`` for this kind of
        model. ``apart``: each has a vector, and the score is their cosine.
    activation
        What makes the score of the head's number. It is not used for a cosine.
    pooling
        Whose hidden state makes the head's number.
    max_tokens
        The most tokens of both, special ones included.
    tokens
        Whose logits make the number; ``None``: the head gives it.
    instruction
        What the chat template gets as the system's message.
    built_in
        The template, if it is built in: what stands before, between and behind the two texts.
    """

    joins: Literal["tokenizer", "template", "built_in", "apart"]
    activation: ResultActivation
    pooling: Pooling
    max_tokens: int
    tokens: ScoreTokens | None = None
    instruction: str | None = None
    built_in: tuple[str, str, str] | None = None
