"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError
from src.core.outputs import TokenLogprobs
from src.http.generation.json_chunks import SLICE, apart, json_array, json_chunks, sliced
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

_encode: Final = msgspec.json.Encoder().encode


def check_number(count: int, most: int, param: str) -> None:
    """Refuse an answer that would hold more log-probabilities than ``most``.

    Raises
    ------
    InvalidRequestError
        Naming ``param``, the field that asks for them.
    """
    if count > most:
        raise InvalidRequestError(
            f"{param}: an answer may hold at most {most} log-probabilities, this one would have "
            f"{count} or more; ask for fewer of them, for fewer tokens or for fewer choices",
            param=param,
        )


class TokenNames:
    r"""How tokens are written in an answer: as their text, or as ``token_id:<id>``.

    A token that is no whole text, such as a part of a character, is written by its bytes, as OpenAI
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
    begin
        The character at which the first of them begins.
    num_added
        How many of the first are no part of the text.
    """

    def __init__(
        self,
        names: TokenNames,
        text: IncrementalDetokenizer,
        begin: int = 0,
        *,
        num_added: int = 0,
    ) -> None:
        self._names = names
        self._text = text
        self._offset = begin
        self._num_added = num_added

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The entries of the next tokens; ``None`` for the very first of a prompt."""
        shape = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            shape.tokens.append(self._names(token_id))
            grown = 0
            if self._num_added:
                self._num_added -= 1
            else:
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


class LegacyColumns:
    """The parallel lists of ``/v1/completions`` as JSON, each by itself."""

    NAMES: Final = CompletionLogprobs.__struct_fields__

    def __init__(self) -> None:
        self.pieces: dict[str, list[bytes]] = {name: [] for name in self.NAMES}

    def grow(
        self,
        legacy: LegacyLogprobs,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> Iterator[bytes]:
        """Take the next tokens. The pieces are empty: others get their turn between them."""
        for begin in range(0, len(logprobs), SLICE):
            end = begin + SLICE
            shape = legacy.entries(token_ids[begin:end], logprobs[begin:end])
            for name, pieces in self.pieces.items():
                pieces.append(_encode(getattr(shape, name))[1:-1])
            yield b""


def legacy_pieces(parts: Sequence[LegacyColumns]) -> Iterator[bytes]:
    """The JSON, in pieces, of what is in all parts, one after the other."""
    lists = {
        name: apart(json_array([[piece] for part in parts for piece in part.pieces[name]]))
        for name in LegacyColumns.NAMES
    }
    return json_chunks(lists)


def chat_entries(names: TokenNames, logprobs: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
    """The entries of ``/v1/chat/completions``."""
    return [
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


def chat_pieces(names: TokenNames, logprobs: Sequence[TokenLogprobs]) -> Iterator[bytes]:
    """The JSON of a `ChatLogprobs`, in pieces."""
    entries = sliced(logprobs, functools.partial(chat_entries, names))
    return json_chunks(ChatLogprobs(apart(entries)))


def prompt_pieces(names: TokenNames, logprobs: Sequence[TokenLogprobs | None]) -> Iterator[bytes]:
    """The JSON, in pieces, of a prompt's log-probabilities in vLLM's shape."""
    return sliced(logprobs, functools.partial(_prompt_logprobs, names))


def _prompt_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    # The first token has none.
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
