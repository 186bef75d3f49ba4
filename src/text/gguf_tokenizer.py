"""Builds the tokenizer that the metadata of a GGUF file describes.

A file has the vocabulary, its kinds of tokens, and merges (byte-level BPE, ``gpt2``) or scores
(SentencePiece, ``llama``). It names the pattern by which text is split before merging, but does
not contain it: the patterns are here, as the checkpoints' own ``tokenizer.json`` have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError
from src.core.gguf import open_gguf

_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NORMAL: Final = 1
_SPACE: Final = "\u2581"
_NAMES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

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
    kind, pre = metadata.get(_PREFIX + "model"), metadata.get(_PREFIX + "pre", "default")
    try:
        if kind == "gpt2":
            backend = _byte_level(vocabulary, metadata, pre)
            begins = pre in _WHOLE_WORDS
        elif kind == "llama":
            backend = _sentencepiece(vocabulary, metadata)
            begins = True
        else:
            raise ModelLoadError(
                f"{path}: tokenizer.ggml.model {kind!r} is not read; read are gpt2 and llama"
            )
        backend.add_special_tokens(vocabulary.added(_CONTROL, special=True))
        backend.add_tokens(vocabulary.added(_USER_DEFINED, special=False))
        _surround(backend, vocabulary, metadata, begins=begins)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"{path}: its tokenizer cannot be built: {error}") from error
    return backend, vocabulary.named, _templates(metadata, str(path))


class _Vocabulary:
    """The tokens of a file, their kinds, and those with a name."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.tokens: Sequence[str] = self._list(metadata, "tokens", str)
        if not self.tokens:
            raise ModelLoadError(f"{source} has no tokenizer: no {_PREFIX}tokens")
        self._kinds = self._list(metadata, "token_type", int, len(self.tokens))
        self.scores = self._list(metadata, "scores", float, len(self.tokens))
        self.merges = self._list(metadata, "merges", str)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.named = {
            name: self.tokens[self._id(metadata, key)]
            for name, key in _NAMES.items()
            if metadata.get(_PREFIX + key) is not None
        }

    def is_normal(self, index: int) -> bool:
        """Whether a token is neither special nor a byte nor unused."""
        return not self._kinds or self._kinds[index] == _NORMAL

    def added(self, kind: int, *, special: bool) -> list[AddedToken]:
        """The tokens of a kind that are found in a text before it is split."""
        return [
            AddedToken(self.tokens[index], special=special, normalized=False)
            for index, each in enumerate(self._kinds)
            if each == kind and self.tokens[index]
        ]

    def unknown(self) -> str | None:
        """The token for what has none."""
        of_kind = (self.tokens[i] for i, kind in enumerate(self._kinds) if kind == _UNKNOWN)
        return self.named.get("unk_token") or next(of_kind, None)

    def _list(
        self, metadata: Mapping[str, Any], key: str, of: type, length: int | None = None
    ) -> Sequence[Any]:
        values = metadata.get(_PREFIX + key, ())
        if not isinstance(values, tuple) or (values and not isinstance(values[0], of)):
            raise ModelLoadError(f"{self.source}: {_PREFIX}{key} must be a list of {of.__name__}")
        if length is not None and values and len(values) != length:
            raise ModelLoadError(
                f"{self.source}: {_PREFIX}{key} must have {length} entries, one for each token, "
                f"got {len(values)}"
            )
        return values

    def _id(self, metadata: Mapping[str, Any], key: str) -> int:
        index = metadata[_PREFIX + key]
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise ModelLoadError(
                f"{self.source}: {_PREFIX}{key} must be the id of one of {len(self.tokens)} "
                f"tokens, got {index!r}"
            )
        return index


def _byte_level(vocabulary: _Vocabulary, metadata: Mapping[str, Any], pre: object) -> Backend:
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise ModelLoadError(
            f"{vocabulary.source}: {_PREFIX}pre {pre!r} is not known; known are "
            + ", ".join(_PATTERNS)
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    if broken := next((merge for merge in merges if len(merge) != 2), None):
        raise ModelLoadError(
            f"{vocabulary.source}: {_PREFIX}merges must be pairs of tokens, got {broken[0]!r}"
        )
    backend = Backend(models.BPE(vocabulary.ids, merges, ignore_merges=pre in _WHOLE_WORDS))
    pattern = _PATTERNS[pre]
    if pattern:
        split: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    else:
        split = None if pattern is None else pre_tokenizers.Digits(individual_digits=True)
    prefixed = metadata.get(_PREFIX + "add_space_prefix") is True
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=not pattern)
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> Backend:
    prefixed = metadata.get(_PREFIX + "add_space_prefix") is not False
    by_place = str(metadata.get("general.architecture")).startswith("gemma")
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    backend = Backend(
        models.BPE(
            vocabulary.ids,
            merges or _implied_merges(vocabulary, by_place=by_place),
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
    merges = []
    for index in order:
        token = tokens[index]
        if len(token) < 2 or not vocabulary.is_normal(index):
            continue
        found = []
        for at in range(1, len(token)):
            first, second = ids.get(token[:at]), ids.get(token[at:])
            if first is not None and second is not None:
                found.append((first, second))
        merges += [(tokens[first], tokens[second]) for first, second in sorted(found)]
    return merges


def _surround(
    backend: Backend, vocabulary: _Vocabulary, metadata: Mapping[str, Any], *, begins: bool
) -> None:
    """Add the tokens that begin and end every text, if the file asks for them."""
    parts, special = ["$A"], []
    for key, name, default in (("bos", "bos_token", begins), ("eos", "eos_token", False)):
        token = vocabulary.named.get(name)
        if token is None or not metadata.get(f"{_PREFIX}add_{key}_token", default):
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
        raise ModelLoadError(f"{source}: the chat template {wrong[0]} must be a text")
    return templates
