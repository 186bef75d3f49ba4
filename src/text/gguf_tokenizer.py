"""Builds the tokenizer that the metadata of a GGUF file describes.

A file has the vocabulary, its kinds of tokens, and merges (byte-level BPE, ``gpt2``) or scores
(SentencePiece, ``llama``). It names the pattern by which text is split before merging, but does
not contain it: the patterns are here, as the checkpoints' own ``tokenizer.json`` have them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError
from src.core.gguf import open_gguf
from src.core.gguf_tokens import (
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    GGUFTokens,
    shown,
)

logger = logging.getLogger(__name__)

_TEMPLATE: Final = "tokenizer.chat_template"
_SPACE: Final = "\u2581"
_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Far more than any vocabulary has, whose merges follow from its tokens: Gemma 3 has 262,144 tokens
# of at most 32 characters, and 0.6 million merges. A token of n characters is cut n - 1 times, and
# every cut into two tokens is a merge, so small files could ask for hours and for gigabytes.
_MOST_PIECE_CHARACTERS: Final = 256
_MOST_CUTS: Final = 8_388_608
_MOST_MERGES: Final = 1_048_576
_MOST_MERGED_CHARACTERS: Final = 33_554_432
# Of Phi-3: tokens behind which white space stays.
_KEEPS_SPACE: Final = ("<unk>", "<s>", "<|endoftext|>")

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)
_LLAMA_3: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(ending: str, digits: str) -> str:
    """Splits words where small letters are followed by capitals."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"
    )


_TEKKEN: Final = _by_case("", r"\p{N}")
_GPT_4O: Final = _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")

# Name of a pattern in files -> the pattern. None is that of GPT-2, which `ByteLevel` has; "" is the
# same behind single digits.
_PATTERNS: Final[dict[str, str | None]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2", "exaone4"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), ""),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "smaug-bpe", "falcon3", "dbrx"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": _TEKKEN,
}
# Those that take a whole word as a token if there is one, and begin a text, unless told otherwise.
_WHOLE_WORDS: Final = ("llama-bpe", "llama-v3", "llama3", "falcon3", "tekken")
_COMPOSED: Final = ("qwen2", "deepseek-r1-qwen", "megrez")


def read_gguf_tokenizer(path: Path) -> tuple[Backend, dict[str, str], dict[str, str]]:
    """Return the tokenizer, the text of its named special tokens, and chat templates by name.

    Raises
    ------
    ModelLoadError
        The file is damaged, has no tokenizer, or one of a kind that is not read.
    """
    metadata = open_gguf(path).metadata
    vocabulary = _Vocabulary(metadata, str(path))
    kind, pre = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre")
    try:
        if kind == "gpt2":
            if pre is None:
                pre = "default"
                logger.warning(
                    "%s has no %spre: text is split as GPT-2 does it. Files of older converters "
                    "lack the key, and most models split text in another way, so answers may be "
                    "worse: convert the model again, or take a newer file",
                    path, PREFIX,
                )  # fmt: skip
            backend = _byte_level(vocabulary, pre)
            begins = pre in _WHOLE_WORDS
        elif kind == "llama":
            backend = _sentencepiece(vocabulary, metadata)
            begins = True
        else:
            raise ModelLoadError(
                f"{path}: tokenizer.ggml.model {kind!r} is not read; read are gpt2 and llama"
            )
        strips = kind == "llama" and _is_phi_3(metadata)
        backend.add_special_tokens(vocabulary.added(CONTROL, strips=strips))
        backend.add_tokens(vocabulary.added(USER_DEFINED, strips=strips))
        _surround(backend, vocabulary, begins=begins)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"{path}: its tokenizer cannot be built: {error}") from error
    return backend, vocabulary.named, _templates(metadata, str(path))


def _is_phi_3(metadata: Mapping[str, Any]) -> bool:
    """Whether special tokens take the white space behind them.

    No file says so. llama.cpp goes by the model's name; the architecture tells it too, where the
    tokenizer is of SentencePiece (Phi-4's is not).
    """
    named = str(metadata.get("general.name")).lower()
    is_named = any(name in named for name in ("phi-3", "phi3", "phi 3"))
    return is_named or metadata.get("general.architecture") == "phi3"


class _Vocabulary(GGUFTokens):
    """The vocabulary of a file that must have one, and its tokens with a name."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        super().__init__(metadata, source)
        if not self.tokens:
            raise ModelLoadError(f"{source} has no tokenizer: no {PREFIX}tokens")
        ids = {name: self.id_of(key) for name, key in _NAMES.items()}
        self.named = {name: self.tokens[i] for name, i in ids.items() if i is not None}

    def is_normal(self, index: int) -> bool:
        """Whether a token is neither special nor a byte nor unused."""
        return self.kinds[index] == NORMAL

    def added(self, kind: int, *, strips: bool) -> list[AddedToken]:
        """The tokens of a kind that are found in a text before it is split.

        With ``strips`` they take the white space behind them.
        """
        return [
            AddedToken(
                token,
                special=kind == CONTROL,
                normalized=False,
                rstrip=strips and token not in _KEEPS_SPACE,
            )
            for token, each in zip(self.tokens, self.kinds, strict=True)
            if each == kind and token
        ]

    def pairs(self) -> list[tuple[str, str]]:
        """The merges of the file, the best first; nothing if it has none.

        Raises
        ------
        ModelLoadError
            One is no pair.
        """
        merges = []
        for merge in self.merges:
            first, space, second = merge.partition(" ")
            if not space:
                raise self.error("merges", f"pairs of tokens, got {shown(merge)}")
            merges.append((first, second))
        return merges

    def unknown(self) -> str | None:
        """The token for what has none."""
        of_kind = (self.tokens[i] for i, kind in enumerate(self.kinds) if kind == UNKNOWN)
        return self.named.get("unk_token") or next(of_kind, None)


def _byte_level(vocabulary: _Vocabulary, pre: object) -> Backend:
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise ModelLoadError(
            f"{vocabulary.source}: {PREFIX}pre {shown(pre)} is not known; known are "
            + ", ".join(_PATTERNS)
        )
    backend = Backend(
        models.BPE(vocabulary.ids, vocabulary.pairs(), ignore_merges=pre in _WHOLE_WORDS)
    )
    pattern = _PATTERNS[pre]
    if pattern:
        split: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    else:
        split = None if pattern is None else pre_tokenizers.Digits(individual_digits=True)
    prefixed = vocabulary.flag("add_space_prefix") is True
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=not pattern)
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Backend:
    prefixed = vocabulary.flag("add_space_prefix") is not False
    by_place = str(metadata.get("general.architecture")).startswith("gemma")
    backend = Backend(
        models.BPE(
            vocabulary.ids,
            vocabulary.pairs() or _implied_merges(vocabulary, by_place=by_place),
            unk_token=vocabulary.unknown(),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), *spaces] if prefixed else spaces
    )
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _implied_merges(vocabulary: _Vocabulary, *, by_place: bool) -> list[tuple[str, str]]:
    """The merges that a vocabulary with scores stands for, the best first.

    Each token may be made of any two others. Those of equal scores keep the order of their ids.
    Gemma's scores do not follow the order of its merges (``by_place``), the tokens' order does.
    """
    ids, tokens, scores = vocabulary.ids, vocabulary.tokens, vocabulary.scores
    if not scores and not by_place:
        raise ModelLoadError(f"{vocabulary.source}: its tokenizer has neither merges nor scores")
    order = range(len(tokens)) if by_place else sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    cuts = characters = 0
    for index in order:
        token = tokens[index]
        if len(token) < 2 or not vocabulary.is_normal(index):
            continue
        cuts += len(token)
        if len(token) > _MOST_PIECE_CHARACTERS or cuts > _MOST_CUTS:
            raise vocabulary.error(
                "tokens",
                f"texts of at most {_MOST_PIECE_CHARACTERS} characters, and {_MOST_CUTS} in all, "
                f"where there are no merges; token {index} has {len(token)}",
            )
        found = []
        for at in range(1, len(token)):
            first, second = ids.get(token[:at]), ids.get(token[at:])
            if first is not None and second is not None:
                found.append((first, second))
        merges += [(tokens[first], tokens[second]) for first, second in sorted(found)]
        characters += len(token) * len(found)
        if len(merges) > _MOST_MERGES or characters > _MOST_MERGED_CHARACTERS:
            raise vocabulary.error(
                "tokens",
                f"texts that {_MOST_MERGES} merges make of one another, of "
                f"{_MOST_MERGED_CHARACTERS} characters, at most",
            )
    return merges


def _surround(backend: Backend, vocabulary: _Vocabulary, *, begins: bool) -> None:
    """Add the tokens that begin and end every text, if the file asks for them."""
    parts, special = ["$A"], []
    for key, name, default in (("bos", "bos_token", begins), ("eos", "eos_token", False)):
        token = vocabulary.named.get(name)
        if not vocabulary.flag(f"add_{key}_token", default) or token is None:
            continue
        parts = [token, *parts] if key == "bos" else [*parts, token]
        special.append((token, vocabulary.ids[token]))
    if special:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)


def _templates(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if wrong := [name for name, value in templates.items() if not isinstance(value, str)]:
        raise ModelLoadError(f"{source}: {_TEMPLATE} must be a text, got no text for {wrong[0]}")
    return templates
