"""What one token adds to the text, as bytes.

A Hugging Face decoder maps a list of tokens to a text. All the decoders of today's language models
are, but for the very beginning of the text, a mapping from each token alone to some bytes, whose
concatenation is then read as UTF-8. `PieceTable` is that mapping, read out of the tokenizer's
decoder once. With it a text grows by one token in constant time, and nothing is decoded again.

=========================================  ===================================================
decoder                                    a token's bytes
=========================================  ===================================================
ByteLevel                                  its characters through GPT-2's byte table
Replace, ByteFallback, Fuse, Strip         its text with U+2581 as space; ``<0xNN>`` is a byte;
(Llama 2)                                  a space is stripped from the text's beginning
Metaspace                                  its text with U+2581 as space, but none in the first
WordPiece                                  its text without ``##``, or with a space before it
none                                       its text, with a space before all but the first
=========================================  ===================================================
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError

TokenStep = Callable[[str, bool], str]
"""(token text, whether it is the first of the text) -> token text."""

EACH_BYTE = "slipstream.replace_each_byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class PieceTable:
    """The bytes of every token of one tokenizer, computed when first asked for.

    Parameters
    ----------
    backend
        The tokenizer. Its decoder and vocabulary must not change afterwards.

    Raises
    ------
    ModelLoadError
        The decoder is of a kind whose text cannot be streamed exactly.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._token_steps: list[TokenStep] = []
        self._to_bytes: Callable[[str], bytes] = _utf8
        self.first_differs = False
        """Whether a text's first token has other bytes than the same token further on."""
        self.strip: tuple[str, int] = ("", 0)
        """(character, n): up to n of it are removed from the beginning of the text."""
        self.errors = "replace"
        """The codec error handler by which invalid UTF-8 becomes U+FFFD: one for each maximal
        subpart (ByteLevel), or one for each byte (byte fallback)."""
        self._later: dict[int, bytes] = {}
        self._read_decoder()

    def later(self, token_id: int) -> bytes:
        """Return what the token adds after some other token; nothing for an unknown id."""
        piece = self._later.get(token_id)
        if piece is None:
            piece = self._later[token_id] = self._compute(token_id, first=False)
        return piece

    def first(self, token_id: int) -> bytes:
        """Return what the token adds as the first of a text, before ``strip`` is applied."""
        return self._compute(token_id, first=True) if self.first_differs else self.later(token_id)

    def exists(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id (a padded vocabulary has ids without)."""
        return self._backend.id_to_token(token_id) is not None

    def _compute(self, token_id: int, *, first: bool) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        for step in self._token_steps:
            token = step(token, first)
        return self._to_bytes(token)

    def _read_decoder(self) -> None:
        decoder = self._backend.decoder
        if decoder is None:
            self._token_steps.append(lambda token, first: token if first else " " + token)
            self.first_differs = True
            return
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        fused = False
        for step in steps:
            kind = step["type"]
            if kind == "Fuse":
                fused = True
            elif fused or self._to_bytes is not _utf8:
                # The whole text is one string by now, or a run of bytes is: only what touches its
                # beginning can still be streamed.
                if kind != "Strip" or step["stop"] or not fused:
                    raise self._refusal(state)
                self.strip = (step["content"], step["start"])
            elif kind == "ByteLevel":
                self._to_bytes = _byte_level
                fused = True
            elif kind == "ByteFallback":
                self._to_bytes = _byte_fallback
                self.errors = EACH_BYTE
            else:
                self._token_steps.append(self._token_step(step, state))

    def _token_step(self, step: dict[str, Any], state: dict[str, Any]) -> TokenStep:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                return lambda token, first: token.replace(old, new)
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                drops = scheme != "never"
                self.first_differs = self.first_differs or drops
                return lambda token, first: token.replace(mark, "" if first and drops else " ")
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
                self.first_differs = True
                return _word_piece(prefix, cleanup)
            case _:
                raise self._refusal(state)

    @staticmethod
    def _refusal(state: dict[str, Any]) -> ModelLoadError:
        kinds = [step["type"] for step in state.get("decoders", [state])]
        return ModelLoadError(
            "tokenizer.json: expected a decoder of type ByteLevel, Metaspace, WordPiece or a "
            f"sequence of Replace (of a string), ByteFallback, Fuse and Strip (left), got {kinds}: "
            "its text cannot be streamed"
        )


def _utf8(token: str) -> bytes:
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return (
            token.encode()
        )  # an added token with a character from outside the table, e.g. a space


def _gpt2_byte_table() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 bytes stand for themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _gpt2_byte_table()

CLEAN_UPS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""The replacements of ``clean_up_tokenization_spaces``, in order, as transformers applies them."""

_WORD_PIECE_CLEAN_UPS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" do not", " don't")),
    *((" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""Those of the WordPiece decoder, applied to each token by itself."""


def _word_piece(prefix: str, cleanup: bool) -> TokenStep:
    def step(token: str, first: bool) -> str:
        if not first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleanup:
            for old, new in _WORD_PIECE_CLEAN_UPS:
                token = token.replace(old, new)
        return token

    return step
