"""How many characters of a text one token can stand for.

A text that is longer than this times the context cannot fit, and need not be tokenized to be
refused.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

UNBOUNDED = sys.maxsize
"""For tokenizers that may drop or merge any number of characters."""

_MOST_CHARACTERS_COMPOSED = 4
"""No character's canonical decomposition is longer (Unicode 16)."""


def max_token_chars(backend: Backend) -> int:
    """Return a bound on the characters of a text for each token of its encoding.

    Only BPE that spells every byte has one: others turn a whole run of unknown characters into one
    token. Nor is there one where the normalizer, the pre-tokenizer or an added token (``lstrip``,
    ``rstrip``) swallows white space.
    """
    if not _spells_every_byte(backend):
        return UNBOUNDED
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return UNBOUNDED
    if not all(map(_keeps_characters, _steps(backend.pre_tokenizer, "pretokenizers"))):
        return UNBOUNDED
    composed = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            composed = _MOST_CHARACTERS_COMPOSED
        elif not _keeps_length(step):
            return UNBOUNDED
    longest: int = max(map(len, backend.get_vocab()))
    return longest * composed


def _spells_every_byte(backend: Backend) -> bool:
    if type(backend.model).__name__ != "BPE":
        return False
    if backend.model.byte_fallback:
        spellings = [f"<0x{byte:02X}>" for byte in range(256)]
    elif any(
        step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer, "pretokenizers")
    ):
        spellings = pre_tokenizers.ByteLevel.alphabet()
    else:
        return False
    return all(backend.token_to_id(spelling) is not None for spelling in spellings)


def _steps(component: Any, key: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = state[key] if state["type"] == "Sequence" else [state]
    return steps


def _keeps_characters(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _keeps_length(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
        case _:
            return False
