"""How the answer to one request is made and read: what the sampler is told, and which parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from src.core.structured_output import StructuredOutput
from src.text.answer import AnswerParser, PlainAnswer, ToolOffer

if TYPE_CHECKING:
    from src.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerPlan:
    """What follows from a model and a request.

    Attributes
    ----------
    structured_output
        For ``SamplingParams.structured_output``.
    """

    structured_output: StructuredOutput | None = None

    def parser(self) -> AnswerParser:
        """A fresh parser, for one choice."""
        return PlainAnswer()


def plan_answer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    offer: ToolOffer,
    *,
    structured_output: StructuredOutput | None = None,
) -> AnswerPlan:
    """Return the plan for the answer to a chat.

    Parameters
    ----------
    tokenizer
        The model's, whose chat template tells how the model writes calls and reasoning.
    prompt_token_ids
        The whole rendered prompt: templates may open the reasoning at its end.
    offer
        The request's tools.
    structured_output
        What the request itself asks for.
    """
    return AnswerPlan(structured_output=structured_output)
