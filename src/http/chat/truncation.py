"""Drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from src.core.errors import PromptTooLongError
from src.core.status import ModelInfo
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions


def tokens_of_answer(info: ModelInfo, max_tokens: int | None) -> int:
    """Tokens of the context that a prompt leaves to the answer: what it is to have at most.

    Where nobody says how many, or more than there are, a quarter.
    """
    most = max_tokens or info.default_max_tokens
    return most if most and most < info.max_model_len else info.max_model_len // 4


async def newest_turns(
    engine: AsyncEngine,
    messages: Sequence[dict[str, Any]],
    options: ChatOptions,
    max_tokens: int,
) -> tuple[list[dict[str, Any]], list[int] | None]:
    """The messages without their oldest turns, of which as few go as ``max_tokens`` ask for.

    Beside them their token ids, where it took these to know that they fit.

    A turn is a message of the user with all up to the next one. Messages of the system that lead
    stay, and so does the newest turn, whatever its length.
    """
    roles = [message["role"] for message in messages]
    lead = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    turns = [i for i, role in enumerate(roles) if i > lead and role == "user"]

    def since(start: int) -> list[dict[str, Any]]:
        return [*messages[:lead], *messages[start:]]

    # Of the longest part that fits, as far as is known: where it starts, and its token ids.
    fitting: tuple[int, list[int]] | None = None

    async def fit(start: int) -> bool:
        nonlocal fitting
        try:
            token_ids = await engine.tokenize(since(start), chat=options)
        except PromptTooLongError:
            return False
        if len(token_ids) > max_tokens:
            return False
        fitting = start, token_ids
        return True

    if not turns:
        return list(messages), None
    if await fit(lead):
        return list(messages), fitting[1] if fitting is not None else None
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if await fit(turns[middle]):
            high = middle
        else:
            low = middle + 1
    start = turns[low]
    return since(start), fitting[1] if fitting is not None and fitting[0] == start else None
