"""Texts of others within a template: their words are text, whatever special token they spell.

A tokenizer makes a special token wherever its text stands. In a template that is wanted of the
template's own text, and not of what is put into it: a document that spells the end of a turn would
end it. Texts without the text of a special token are not concerned: the whole is tokenized as it
is, and has exactly the tokens of the published template.

For the others there is a second tokenizer, in which each special token is spelled by an alias that
nobody can guess. What is put into the template has aliases in place of special tokens' texts
(`quoted`). Then both are exchanged in the whole (`exchanged`): the template's own become aliases,
which the second tokenizer knows, and the others get their text back, which it does not know.

Texts are searched slice by slice, since a search lets no other thread run.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from src.core.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Characters of a slice: searching one takes about a millisecond at most.
SLICE_CHARS: Final = 16 * 1024
# Nested groups of an expression; `re` compiles each by a call within a call.
_MAX_NESTED: Final = 16
# In no text by chance, and no longer than most special tokens.
_ALIAS: Final = "\ue000{nonce}{number:x}\ue001"


class TextSearch:
    """Finds some texts in others: from left to right, of those that begin alike the longest.

    Parameters
    ----------
    texts
        What is searched for; none of them is empty.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = re.compile(_factored(texts)) if texts else None
        self._longest = max(map(len, texts), default=0)

    def found(self, text: str) -> Iterator[tuple[int, int]]:
        """Where they stand: the first character and the one behind the last.

        Other threads may run between slices, so that the time is theirs too.
        """
        if self._pattern is None:
            return
        at = 0
        for begin in range(0, len(text), SLICE_CHARS):
            if begin:
                time.sleep(0)
            end = begin + SLICE_CHARS
            at = max(at, begin)
            while at < end:
                # One that begins in this slice may end in the next.
                hit = self._pattern.search(text, at, end + self._longest - 1)
                if hit is None or hit.start() >= end:
                    break
                yield hit.span()
                at = hit.end()

    def replaced(self, text: str, others: Mapping[str, str]) -> str:
        """A text with ``others`` in their places; the same object if there is none."""
        pieces: list[str] = []
        done = 0
        for begin, end in self.found(text):
            pieces += (text[done:begin], others[text[begin:end]])
            done = end
        return "".join((*pieces, text[done:])) if done else text


class QuotingTokenizer:
    """Of a tokenizer, what a template with texts of others in it needs. Threads may share it.

    Making one takes a second or so, in which no other thread runs: it makes `second`.

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
        self._texts = TextSearch(self._aliases)
        self._both = TextSearch(self._exchanged)
        normalized = [t.content for t in _added(backend) if t.normalized]
        self.is_for_all: bool = type(backend.model).__name__ == "Unigram" or any(
            text in self._special for text in normalized
        )
        """Whether texts that spell none may become special tokens too, once they are normalized."""
        self._second = self._made()
        if self._second is None:
            logger.warning("a text that spells a special token is refused: %s", _impossible())

    def quoted(self, text: str) -> str:
        """A text whose special tokens are words; the same object if it spells none."""
        return self._texts.replaced(text, self._aliases)

    def exchanged(self, whole: str) -> str:
        """What `second` is to tokenize of a template with quoted texts in it."""
        return self._both.replaced(whole, self._exchanged)

    @property
    def second(self) -> Backend:
        """The tokenizer for `exchanged` texts.

        Raises
        ------
        InvalidRequestError
            None can be made of this tokenizer.
        """
        if self._second is None:
            raise _impossible()
        return self._second

    def _made(self) -> Backend | None:
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
        except Exception:
            logger.debug("no second tokenizer", exc_info=True)
            return None
        if any(made.token_to_id(self._aliases[t]) != i for t, i in self._special.items()):
            return None
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


def _factored(texts: Collection[str], depth: int = _MAX_NESTED) -> str:
    """An expression for any of these texts, the longest first.

    What texts have in common at their beginning is in it once, so that a character of a text is
    compared with few of them, however many there are.
    """
    if depth == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    branches = []
    for group in groups.values():
        common = _common_beginning(min(group), max(group))
        rests = [text[len(common) :] for text in group]
        longer = [rest for rest in rests if rest]
        branch = re.escape(common)
        if longer:
            branch += f"(?:{_factored(longer, depth - 1)})"
            if len(longer) < len(rests):
                branch += "?"
        branches.append(branch)
    return "|".join(branches)


def _common_beginning(first: str, last: str) -> str:
    """What two texts begin with, and all that are sorted between them."""
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((at for at, (one, other) in pairs if one != other), len(first))]


def _impossible() -> InvalidRequestError:
    return InvalidRequestError(
        "text: it spells a special token, which this model's tokenizer cannot take for text"
    )


def _added(backend: Backend) -> list[Any]:
    return list(backend.get_added_tokens_decoder().values())
