"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from src.core.outputs import TokenLogprobs
from src.http.protocol.logprobs import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TopLogprob,
)
from src.text.detokenizer import IncrementalDetokenizer
from src.text.tokenizer import Tokenizer

# JSON has no infinity; a token that cannot be chosen gets this, as in vLLM.
MIN_LOGPROB = -9999.0


class TokenNames:
    r"""How tokens are spelt in an answer: as their text, or as ``token_id:<id>``.

    A token that is no whole text, such as a part of a character, is spelt by its bytes, as OpenAI
    does: ``\xe2\x82``, behind ``prefix``. So no two of them have one name.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._prefix = prefix

    def __call__(self, token_id: int) -> str:
        """The name of one token."""
        if self._as_ids:
            return f"token_id:{token_id}"
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in piece)

    def length(self, token_id: int) -> int:
        """The characters that begin and end within one token, and one that began before it."""
        piece = self._tokenizer.token_bytes(token_id)
        return len(codecs.getincrementaldecoder("utf-8")("replace").decode(piece))

    def utf8(self, token_id: int) -> list[int]:
        """The bytes of one token, possibly a part of a character."""
        return list(self._tokenizer.token_bytes(token_id))


class LegacyLogprobs:
    """Builds the parallel lists of ``/v1/completions`` piece by piece for one choice.

    ``text_offset`` is where each token begins, in characters of the choice's text. It is counted in
    what the tokens add to the text and not in their names: a token that ends within a character
    adds nothing, and neither does a special token that the text leaves out.

    Parameters
    ----------
    text
        Grows with the tokens as the choice's own text does.
    """

    def __init__(self, names: TokenNames, text: IncrementalDetokenizer) -> None:
        self._names = names
        self._text = text
        self._offset = 0

    def at(self, offset: int) -> None:
        """The next token begins at this character."""
        self._offset = offset

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The entries of the next tokens; ``None`` for the very first of a prompt."""
        shape = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            shape.tokens.append(self._names(token_id))
            grown = len(self._text.push([token_id]))
            # It may first grow by U+FFFD for earlier bytes, now known to be no character.
            own = self._names.length(token_id)
            shape.text_offset.append(self._offset + max(0, grown - own))
            self._offset += grown
            if entry is None:
                shape.token_logprobs.append(None)
                shape.top_logprobs.append(None)
                continue
            shape.token_logprobs.append(_finite(entry.logprob))
            top: dict[str, float] = {}
            # The chosen token is always there. Of several with one name the likeliest stays.
            for other, value in (*entry.top, (token_id, entry.logprob)):
                top.setdefault(self._names(other), _finite(value))
            shape.top_logprobs.append(top)
        return shape


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both, one after the other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The shape of ``/v1/chat/completions``."""
    return ChatLogprobs(
        [
            ChatLogprob(
                names(entry.token_id),
                _finite(entry.logprob),
                names.utf8(entry.token_id),
                [
                    TopLogprob(names(other), _finite(value), names.utf8(other))
                    for other, value in entry.top
                ],
            )
            for entry in logprobs
        ]
    )


def prompt_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """The shape that vLLM gives to a prompt's log-probabilities; the first token has none."""
    return [None if entry is None else _by_token_id(names, entry) for entry in logprobs]


def _by_token_id(names: TokenNames, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
    ranked = {token_id: (rank, value) for rank, (token_id, value) in enumerate(entry.top, start=1)}
    ranked.setdefault(entry.token_id, (entry.rank, entry.logprob))
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": names(token_id),
        }
        for token_id, (rank, value) in ranked.items()
    }


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
