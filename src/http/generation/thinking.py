"""How requests bound the thinking of their answers."""

from __future__ import annotations

from typing import Final

from src.core.config import ChatSection
from src.core.errors import InvalidRequestError
from src.core.sampling_params import THINKING_BUDGET
from src.core.thinking import Thinking
from src.http.protocol.generation import GenerationRequest
from src.text.answer_plan import reasoning_of
from src.text.tokenizer import Tokenizer

# Tokens at the end of a text prompt in which thinking may have been opened.
_END_TOKENS: Final = 1024


def thinking_budget(request: GenerationRequest) -> int | None:
    """Tokens of thinking at most; -1 is any number, as nothing is."""
    budget = request.thinking_token_budget
    return None if budget == -1 else budget


def no_thinking() -> InvalidRequestError:
    """The refusal of a budget where nobody could tell what it is spent on."""
    return InvalidRequestError(
        f"{THINKING_BUDGET}: it is not known how this model marks its thinking "
        "(chat.reasoning_parser says it)",
        param=THINKING_BUDGET,
        code="unsupported_parameter",
    )


def thinking_behind(
    tokenizer: Tokenizer, settings: ChatSection, prompt_token_ids: list[int], budget: int
) -> tuple[Thinking, tuple[int, ...]]:
    """The thinking of what follows a prompt that no chat template has made.

    Beside it the special tokens that mark it. They have to be part of the text: without them nobody
    can tell where the answer begins.

    Raises
    ------
    InvalidRequestError
        It is not known how the model marks its thinking.
    """
    syntax = reasoning_of(tokenizer, settings)
    if syntax is None:
        raise no_thinking()
    end = tokenizer.decode(prompt_token_ids[-_END_TOKENS:], False)
    opened = max(end.rfind(tag) for tag in syntax.openings)
    closed = max(end.rfind(tag) for tag in syntax.closings)
    is_open = opened > closed if max(opened, closed) >= 0 else syntax.implied
    special = tokenizer.special_ids
    marks = (tokenizer.token_to_id(tag) for tag in syntax.tags)
    kept = tuple(token_id for token_id in marks if token_id in special and token_id is not None)
    return syntax.thinking(is_open=is_open, budget=budget), kept
