"""What ends thinking, by the tag that closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from src.core.thinking import Thinking
from src.engine.requests.text_work import TextWork
from src.text.thinking import ThinkingGuide, endings_of

if TYPE_CHECKING:
    from src.text import Tokenizer

# Models have one; programs may ask for any.
_MAX_KEPT: Final = 16


class ThinkingGuides:
    """Finds the tokens that write a closing tag, once.

    Parameters
    ----------
    vocab_size
        Tokens that the model has.
    work
        Where the whole vocabulary is looked at.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, work: TextWork) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._work = work
        self._endings: dict[str, list[int]] = {}

    async def guide(self, thinking: Thinking, tenant: str) -> ThinkingGuide:
        """What bounds the thinking of one request of ``tenant``.

        Raises
        ------
        InvalidRequestError
            No tokens of the model spell the tag.
        """
        closing = thinking.closings[0]
        endings = self._endings.get(closing)
        if endings is None:
            # It may look at the whole vocabulary.
            endings = await self._work.run(
                tenant, self._vocab_size, endings_of, self._tokenizer, closing, self._vocab_size
            )
            if len(self._endings) >= _MAX_KEPT:
                self._endings.clear()
            self._endings[closing] = endings
        return ThinkingGuide(thinking, endings, self._tokenizer.token_bytes)
