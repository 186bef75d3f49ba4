"""Conversion between text and token ids: by a local tokenizer, by the server's, or an estimate."""

from __future__ import annotations

import functools
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from src.bench.errors import BenchError, error_message
from src.text.tokenizer import Tokenizer

_SECONDS: Final = 60.0
# Short, common words: most tokenizers have one token for each, including the preceding space.
_TEXT: Final = (
    "the of and to in is that it was for on are as with his they at be this from have or by "
    "one had not but what all were when we there can an your which their said if do will each "
    "about how up out them then she many some so these would other into has more her two like "
    "him see time could no make than first been its who now people my made over did down only "
    "way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look "
    "think also around another came come work three word must because does part even place "
    "well such here take why things help put years"
)
_WORDS: Final = tuple(_TEXT.split())


class Codec(Protocol):
    """Converts between text and token ids.

    Attributes
    ----------
    name
        Name of the tokenizer, for reports.
    ids
        Ordinary token ids, from which prompts are drawn.
    exact
        Whether the ids are those of the served model. If not, lengths are estimates, and only text
        is sent.
    """

    @property
    def name(self) -> str | None: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def exact(self) -> bool: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


class TokenizerCodec:
    """A tokenizer in this process."""

    exact = True

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        self.ids = [
            token_id
            for token_id in range(tokenizer.vocab_size)
            if token_id not in added and tokenizer.id_to_token(token_id) is not None
        ]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids)


class ServerCodec:
    """The tokenizer of a server that has ``/tokenize`` and ``/detokenize``, like vLLM and this one.

    Each call is a blocking request.

    Raises
    ------
    BenchError
        The server lacks these endpoints, or gives an invalid answer.
    """

    exact = True

    def __init__(
        self, base_url: str, model: str, headers: Mapping[str, str], verify: bool = True
    ) -> None:
        self.name = None
        self._base_url = base_url
        self._model = model
        self._context = None if verify else ssl._create_unverified_context()
        self._headers = {**headers, "Content-Type": "application/json"}
        # Tokens of ordinary text are ordinary tokens.
        self.ids = sorted(set(self.encode(_TEXT)))
        if not self.ids or not isinstance(self.decode(self.ids), str):
            raise BenchError(f"{base_url}: /tokenize and /detokenize answer something else")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids = self._post("/tokenize", {"prompt": text, "add_special_tokens": False}, "tokens")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        text: str = self._post("/detokenize", {"tokens": list(ids)}, "prompt")
        return text

    def _post(self, path: str, fields: dict[str, Any], wanted: str) -> Any:
        body = json.dumps({"model": self._model, **fields}).encode()
        request = urllib.request.Request(self._base_url + path, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=self._context) as answer:
                return json.load(answer)[wanted]
        except urllib.error.HTTPError as error:
            reason = error_message(error.read())
            raise BenchError(f"{self._base_url}{path}: HTTP {error.code}: {reason}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self._base_url}{path}: {error}") from error


class WordCodec:
    """Treats words as tokens, for servers with an unknown tokenizer. Lengths are estimates."""

    exact = False
    name = None

    def __init__(self) -> None:
        self.ids = range(len(_WORDS))

    def encode(self, text: str) -> list[int]:
        """A number per word; unknown words get one by their length."""
        known = _numbers()
        return [known.get(word, len(word) % len(_WORDS)) for word in re.findall(r"\S+", text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The words of these numbers."""
        return " ".join(_WORDS[number] for number in ids)


@functools.cache
def _numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(_WORDS)}
