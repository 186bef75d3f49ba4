"""The vocabulary in a GGUF file's metadata: its tokens, what kind each is, and which end a turn.

The list of kinds in a file is often wrong: converters and merging tools leave tags such as
``<|im_end|>`` as ordinary text. Then an answer runs on behind its end and shows the tag, and a
prompt splits it. As in llama.cpp (``llama-vocab.cpp``) the tokens that the metadata names, and
those whose text is known to end a turn, are control tokens whatever the list says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from src.core.errors import ModelLoadError

PREFIX: Final = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Kinds of tokens. There are also unused ones (5)."""

_ENDS: Final = ("eos", "eot", "eom")
# Tokens that end a turn, in the order of llama.cpp's list.
_TURN_ENDS: Final = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    )
)
# These end a turn only where the file itself says that they are control tokens: the first is a tag
# of HTML in the vocabularies of Gemma.
_TURN_ENDS_IF_CONTROL: Final = frozenset(("</s>", "<|end_of_role|>"))

# Far more than any vocabulary has. Some work grows with the square of a token's length.
_MOST_TOKEN_CHARACTERS: Final = 4096
_MOST_ADDED: Final = 65_536


class GGUFTokens:
    """The vocabulary of a file.

    Attributes
    ----------
    source
        The file, for errors.
    tokens
        The text of each token, by id.
    kinds
        The kind of each token; all are normal if the file has no list.
    scores
        Of each token, or nothing.
    merges
        Pairs of tokens with a space between, or nothing.
    ids
        Text -> id.

    Raises
    ------
    ModelLoadError
        A value is of the wrong type, out of range or larger than any model's; the message names
        its key.
    """

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.source, self._metadata = source, metadata
        self.tokens: Sequence[str] = self._list("tokens", str)
        longest = max(map(len, self.tokens), default=0)
        if longest > _MOST_TOKEN_CHARACTERS:
            raise self.error(
                "tokens",
                f"texts of at most {_MOST_TOKEN_CHARACTERS} characters, got one of {longest}",
            )
        listed = self._list("token_type", int, len(self.tokens))
        self.scores: Sequence[float] = self._list("scores", float, len(self.tokens))
        self.merges: Sequence[str] = self._list("merges", str)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.kinds: Sequence[int] = self._kinds(listed)
        added = sum(kind in (CONTROL, USER_DEFINED) for kind in self.kinds)
        if added > _MOST_ADDED:
            raise self.error("token_type", f"3 or 4 for at most {_MOST_ADDED} tokens, got {added}")

    def error(self, key: str, expected: str) -> ModelLoadError:
        """The error for a key behind `PREFIX`."""
        return ModelLoadError(f"{self.source}: {PREFIX}{key} must be {expected}")

    def id_of(self, name: str) -> int | None:
        """The id that ``<name>_token_id`` gives, or None."""
        key = f"{name}_token_id"
        index = self._metadata.get(PREFIX + key)
        if index is None:
            return None
        # A file without a vocabulary may name ids all the same.
        most = len(self.tokens) or 2**31
        if type(index) is not int or not 0 <= index < most:
            raise self.error(key, f"the id of one of {most} tokens, got {shown(index)}")
        return index

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """True or false; ``default`` if there is no such key."""
        value = self._metadata.get(PREFIX + key, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(key, f"true or false, got {shown(value)}")
        return value

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a turn: those that the metadata names, and those that are known."""
        named = [self.id_of(name) for name in _ENDS]
        known = [
            index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == CONTROL and (token in _TURN_ENDS or token in _TURN_ENDS_IF_CONTROL)
        ]
        return tuple(dict.fromkeys(each for each in (*named, *known) if each is not None))

    def _kinds(self, listed: Sequence[int]) -> list[int]:
        kinds = list(listed) or [NORMAL] * len(self.tokens)
        if not self.tokens:
            return kinds
        control = {self.ids[token] for token in _TURN_ENDS if token in self.ids}
        control |= {index for name in _ENDS if (index := self.id_of(name)) is not None}
        for name in ("bos", "padding"):
            index = self.id_of(name)
            if index is None or kinds[index] == UNKNOWN:
                continue  # Llama pads with the token of what has none, which stays that.
            # Some files pad with a word or a sign, which is text elsewhere.
            if _is_tag(self.tokens[index]):
                control.add(index)
        for index in control:
            if kinds[index] != BYTE:
                kinds[index] = CONTROL
        return kinds

    def _list(self, key: str, of: type, length: int | None = None) -> Sequence[Any]:
        values = self._metadata.get(PREFIX + key, ())
        if not isinstance(values, tuple) or (values and type(values[0]) is not of):
            raise self.error(key, f"a list of {of.__name__}, got {shown(values)}")
        if length is not None and values and len(values) != length:
            raise ModelLoadError(
                f"{self.source}: {PREFIX}{key} must have {length} entries, one for each of "
                f"{PREFIX}tokens, got {len(values)}"
            )
        return values


def _is_tag(token: str) -> bool:
    return len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]"))


def shown(value: object) -> str:
    """A value of metadata for an error, in a few characters."""
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
