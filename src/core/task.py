"""What a request may ask of a model."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Task: TypeAlias = Literal["generate", "embed", "classify", "score", "token_embed", "token_classify"]
"""What a request asks for.

``generate``: text. ``embed``: a vector of the text. ``classify``: the probabilities of labels.
``score``: how well two texts match. ``token_embed``, ``token_classify``: a vector, or labels, of
each token.
"""

TASKS: Final[tuple[Task, ...]] = get_args(Task)

HEAD_TASKS: Final[frozenset[Task]] = frozenset({"classify", "score", "token_classify"})
"""Tasks whose results are what the model's head makes of hidden states."""
