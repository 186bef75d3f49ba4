"""Texts of others within a template: their words are text, whatever special token they spell.

A tokenizer makes a special token wherever its text stands. In a template that is wanted of the
template's own text, and not of what is put into it: a document that spells the end of a turn would
end it. Texts without the text of a special token are not concerned: the whole is tokenized as it
is, and has exactly the tokens of the published template.

For the others there is a second tokenizer, in which each special token is spelled by an alias that
nobody can guess. What is put into the template has aliases in place of special tokens' texts
(`quoted`). Then both are exchanged in the whole (`exchanged`): the template's own become aliases,
which the second tokenizer knows, and the others get their text back, which it does not know.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from src.core.errors import InvalidRequestError

# In no text by chance, and no longer than most special tokens.
_ALIAS: Final = "\ue000{nonce}{number:x}\ue001"


class QuotingTokenizer:
    """Of a tokenizer, what a template with texts of others in it needs. Threads may share it.

    Parameters
    ----------
    backend
        The tokenizer proper.
    special
        Id -> text of each special token.
    """

    def __init__(self, backend: Backend, special: Mapping[int, str]) -> None:
        self._own = backend
        self._special = {text: token_id for token_id, text in special.items() if text}
        nonce = secrets.token_hex(4)
        self._aliases = {
            text: _ALIAS.format(nonce=nonce, number=number)
            for number, text in enumerate(self._special)
        }
        self._exchanged = self._aliases | {alias: text for text, alias in self._aliases.items()}
        self._texts = _any_of(self._aliases)
        self._both = _any_of(self._exchanged)
        self._lock = threading.Lock()
        self._second: Backend | None = None
        normalized = [t.content for t in _added(backend) if t.normalized]
        self.is_for_all: bool = type(backend.model).__name__ == "Unigram" or any(
            text in self._special for text in normalized
        )
        """Whether texts that spell none may become special tokens too, once they are normalized."""

    def quoted(self, text: str) -> str:
        """A text whose special tokens are words; the same object if it spells none."""
        if self._texts is None or self._texts.search(text) is None:
            return text
        return self._texts.sub(lambda found: self._aliases[found[0]], text)

    def exchanged(self, whole: str) -> str:
        """What `second` is to tokenize of a template with quoted texts in it."""
        if self._both is None:
            return whole
        return self._both.sub(lambda found: self._exchanged[found[0]], whole)

    @property
    def second(self) -> Backend:
        """The tokenizer for `exchanged` texts. Making it takes a second or so, once.

        Raises
        ------
        InvalidRequestError
            None can be made of this tokenizer.
        """
        with self._lock:
            if self._second is None:
                self._second = self._made()
            return self._second

    def _made(self) -> Backend:
        described = json.loads(self._own.to_str())
        # It is for special tokens around a text, which a template has in it.
        described["post_processor"] = None
        for token in described.get("added_tokens", []):
            alias = self._aliases.get(token["content"])
            if alias is not None:
                # Normalizing could change it.
                token |= {"content": alias, "normalized": False}
        _rename(described["model"], self._aliases)
        try:
            made = Backend.from_str(json.dumps(described))
        except Exception as error:
            raise _impossible() from error
        if any(made.token_to_id(self._aliases[t]) != i for t, i in self._special.items()):
            raise _impossible()
        made.no_truncation()
        made.no_padding()
        return made


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens of a vocabulary, so that text is no such token either."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        # Text would be merged into one.
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]


def _any_of(texts: Mapping[str, str]) -> re.Pattern[str] | None:
    """An expression for any of these texts, the longest first; None: there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def _impossible() -> InvalidRequestError:
    return InvalidRequestError(
        "text: it spells a special token, which this model's tokenizer cannot take for text"
    )


def _added(backend: Backend) -> list[Any]:
    return list(backend.get_added_tokens_decoder().values())
