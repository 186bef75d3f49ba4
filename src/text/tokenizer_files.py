"""Reads the tokenizer files of a checkpoint as transformers does.

``tokenizer.json`` holds the tokenizer. Three more files declare flags (special, surrounding white
space, ...) and names of the tokens that were added to its vocabulary:

- ``added_tokens_decoder`` in ``tokenizer_config.json`` overrides the flags in ``tokenizer.json``.
- Without it, ``special_tokens_map.json`` and ``added_tokens.json`` of older checkpoints are read.
  The flags in ``tokenizer.json`` override theirs.
- Tokens may be named (``eos_token``, an object ``extra_special_tokens``) or listed (a list
  ``extra_special_tokens`` or ``additional_special_tokens``). Those that none of the files declares
  are added as special tokens.

transformers itself converts a directory without ``tokenizer.json``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError

_NAMES: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG: Final = "tokenizer_config.json"
_MAP: Final = "special_tokens_map.json"
_ADDED: Final = "added_tokens.json"
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``; an empty one if there is no such file.

    Raises
    ------
    ModelLoadError
        The file holds no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def read_backend(path: Path, config: dict[str, Any]) -> tuple[Backend, dict[str, str]]:
    """Return the tokenizer of a directory, and the text of its named special tokens.

    Parameters
    ----------
    config
        What ``tokenizer_config.json`` holds.

    Raises
    ------
    ModelLoadError
        There is no tokenizer, or a file is damaged or of a form that is not understood.
    """
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more specific
            raise ModelLoadError(f"{file}: cannot be read by tokenizers: {error}") from error
        named = _add_tokens(backend, path, config)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        return backend, named
    if (path / "tokenizer.model").is_file():
        _require_sentencepiece(path)
        return _converted(path, "tokenizer.model")
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        vocabulary = read_json(path / "vocab.json")
        backend, named = _converted(path, "vocab.json")
        if not vocabulary.items() <= backend.get_vocab(with_added_tokens=True).items():
            raise ModelLoadError(
                f"{path}: vocab.json and merges.txt are not what transformers reads for a "
                f"tokenizer of class {config.get('tokenizer_class')!r}: name another one in "
                f"{_CONFIG}, or save the tokenizer as tokenizer.json"
            )
        return backend, named
    raise ModelLoadError(
        f"{path}: expected tokenizer.json, tokenizer.model, or vocab.json and merges.txt, "
        "found none"
    )


def _add_tokens(backend: Backend, path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Add to ``tokenizer.json`` what the files beside it say; return the named tokens' text."""
    present = backend.get_added_tokens_decoder()
    named, extra = _named_and_extra(path, config)
    if backend.padding and "pad_token" not in config:
        named.setdefault("pad_token", backend.padding["pad_token"])
    if config.get("added_tokens_decoder") is not None:
        listed = dict(_listed(path, config["added_tokens_decoder"]))
    else:
        listed = dict(_of_older_files(path, named, extra)) | present
    tokens = [token for _, token in sorted(listed.items())]
    known = {token.content for token in (*present.values(), *tokens)}
    for value in (*named.values(), *extra):
        token = _token(str(path), value)
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    names = {_content(value) for value in named.values()}
    for token in tokens:
        token.special = token.special or token.content in names
    # A known token gets the new flags. Usually none differs, and comparing thousands is cheaper
    # than adding them.
    there = {token.content: token.__getstate__() for token in present.values()}
    backend.add_tokens([t for t in tokens if t.__getstate__() != there.get(t.content)])
    return {name: _content(value) for name, value in named.items()}


def _named_and_extra(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the named special tokens and the unnamed ones, as the files spell them."""
    config = dict(config)
    if _ADDITIONAL in config and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_ADDITIONAL)
    own: dict[str, Any] = {}
    _take_names(config, own)
    if config.get("added_tokens_decoder") is None:
        for key, value in read_json(path / _MAP).items():
            lists = key == _EXTRA and isinstance(value, list)
            config[key] = _joined(config.get(_EXTRA), value) if lists else value
        _take_names(config, own)
    if _ADDITIONAL in config and _EXTRA not in config:
        config[_EXTRA] = config.pop(_ADDITIONAL)
    extra = config.get(_EXTRA) or []
    if not isinstance(extra, list):
        raise ModelLoadError(
            f"{path}: {_EXTRA} must be an object or a list of tokens, got {type(extra).__name__}"
        )
    named = {
        key: value
        for key, value in config.items()
        if key in _NAMES or (key.endswith("_token") and isinstance(value, str | dict))
    }
    named = {key: value for key, value in (named | own).items() if value is not None}
    for source, value in (*named.items(), *((_EXTRA, value) for value in extra)):
        _token(f"{path}: {source}", value)
    return named, extra


def _take_names(config: dict[str, Any], own: dict[str, Any]) -> None:
    """Move the names in an object ``extra_special_tokens`` from ``config`` to ``own``."""
    if isinstance(config.get(_EXTRA), dict):
        own |= config.pop(_EXTRA)


def _joined(first: Any, second: list[Any]) -> list[Any]:
    known = list(first or [])
    return known + [value for value in second if value not in known]


def _listed(path: Path, declared: Any) -> Iterator[tuple[int, AddedToken]]:
    """Yield (id, token) of ``added_tokens_decoder``."""
    where = f"{path / _CONFIG}: added_tokens_decoder"
    if not isinstance(declared, dict):
        raise ModelLoadError(f"{where} must be an object of ids, got {type(declared).__name__}")
    for key, value in declared.items():
        if not key.isdecimal() or not isinstance(value, dict):
            raise ModelLoadError(f"{where}[{key!r}] must be an id and an object")
        yield int(key), _token(f"{where}[{key!r}]", {"special": False, **value})


def _of_older_files(
    path: Path, named: dict[str, Any], extra: list[Any]
) -> Iterator[tuple[int, AddedToken]]:
    """Yield (id, token) of ``added_tokens.json``. Named and listed tokens are special."""
    special = {_content(value) for key, value in named.items() if key in _NAMES}
    special |= {_content(value) for value in extra}
    for text, index in read_json(path / _ADDED).items():
        if not isinstance(index, int):
            raise ModelLoadError(f"{path / _ADDED}: {text!r} must have an id, got {index!r}")
        is_special = text in special
        yield index, AddedToken(text, special=is_special, normalized=not is_special)


def _token(where: str, value: Any) -> AddedToken:
    """Return the token of a string or an object with ``content``; special by default."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise ModelLoadError(f"{where} must be a text or an object with content, got {value!r}")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if wrong := [flag for flag, given in flags.items() if not isinstance(given, bool)]:
        raise ModelLoadError(f"{where}: {wrong[0]} must be true or false, got {flags[wrong[0]]!r}")
    return AddedToken(content, **{"special": True, **flags})


def _content(value: Any) -> str:
    content: str = value if isinstance(value, str) else value["content"]
    return content


def _require_sentencepiece(path: Path) -> None:
    try:
        importlib.import_module("google.protobuf")
        importlib.import_module("sentencepiece")
    except ImportError as error:
        raise ModelLoadError(
            f"{path}: tokenizer.model is converted at load, which needs {error.name}: "
            "pip install -e '.[sentencepiece]' in the checkout"
        ) from None


def _converted(path: Path, file: str) -> tuple[Backend, dict[str, str]]:
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of transformers and of tokenizers, which raises nothing specific
        raise ModelLoadError(f"{path}: {file} cannot be converted: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(f"{path}: {file} cannot be converted to a fast tokenizer")
    return backend, dict(converted.special_tokens_map)
