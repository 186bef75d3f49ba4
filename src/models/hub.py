"""Resolves a directory, a GGUF file or a Hugging Face hub id to a local path."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from src.core.errors import ModelLoadError
from src.core.gguf import SUFFIX, files_of, first_bytes, is_first, is_gguf, named_kind
from src.models.checkpoint import PICKLE_SUFFIXES
from src.models.gguf.files import find_gguf, is_named, some_of

_TEXT_FILES: Final = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WEIGHT_FILES: Final = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    # Of modules behind the pooling, see `sentence_transformers`.
    "[0-9]*_*/model.safetensors",
)
_TEMPLATES: Final = "*.jinja"
# A repository and the precision or the name of one of its GGUF files.
_WITH_FILE: Final = re.compile(r"([^/:]+/[^/:]+):(.+)")
_FILES: Final = {
    b"PK\x03\x04": "a zip archive, as pickled checkpoints are, which can run code",
    b"lmgg": "a GGML file of before GGUF: convert the model again",
    b"fmgg": "a GGML file of before GGUF: convert the model again",
    b"tjgg": "a GGML file of before GGUF: convert the model again",
}


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    cache_dir: Path | None = None,
) -> Path:
    """The local directory of a model, or its GGUF file.

    A directory that has one GGUF model, and no `config.json` or no safetensors beside it, is that
    model, and so is a repository.
    `owner/name:Q4_K_M` is the GGUF file of a repository whose name has that precision in it.

    Parameters
    ----------
    model
        a local directory, a GGUF file, or a hub id such as `owner/name`.
    revision
        Branch, tag or commit of a hub id; pin a commit for reproducible serving. Only safetensors,
        GGUF and JSON files and the tokenizer are fetched, never code or pickles.
    weights
        Whether to fetch weights; dummy weights need none. GGUF files are only looked for in the
        cache then.
    cache_dir
        The hub's cache; None: its default.

    Raises
    ------
    ModelLoadError
        There is no such directory or repository, access is refused, the hub cannot be reached and
        the cache does not have it, it has only pickle checkpoints, or several GGUF models. The
        message says what was found.
    """
    local = Path(model).expanduser()
    if local.exists() and revision is not None:
        what = "directory" if local.is_dir() else "file"
        raise ModelLoadError(
            f"revision {revision!r} was given, but {model} is a local {what}, which has none"
        )
    if local.is_dir():
        is_whole = (local / "config.json").exists() and any(local.glob("*.safetensors"))
        return local if is_whole else find_gguf(local) or local
    if local.exists():
        if is_gguf(local):
            return local
        raise ModelLoadError(
            f"{model} is a file{_described(local)}; expected a directory in Hugging Face layout or "
            "a GGUF file"
        )
    with_file = _WITH_FILE.fullmatch(model)
    if with_file is None and is_gguf(local):
        raise ModelLoadError(f"there is no file {model}")
    if not is_hub_id(model):
        raise ModelLoadError(f"there is no directory {model}")
    if with_file is not None:
        return _gguf_of(with_file[1], with_file[2], revision, cache_dir, fetches=weights)
    return _download(model, revision, weights, cache_dir)


def is_hub_id(model: str) -> bool:
    """Whether a name means a repository of the hub, and no file or directory."""
    local = Path(model).expanduser()
    with_file = _WITH_FILE.fullmatch(model)
    if local.exists() or (with_file is None and is_gguf(local)):
        return False
    is_path = local.is_absolute() or model.startswith((".", "~"))
    return not (is_path or (with_file is None and model.count("/") > 1))


def _described(file: Path) -> str:
    """What a file is that is no model by itself, as far as its name and first bytes tell."""
    if file.suffix == ".safetensors":
        return " of tensors: name the directory that it lies in, with its config.json"
    try:
        begin = first_bytes(file)
    except OSError as error:
        return f" that cannot be read ({error.strerror})"
    known = _FILES.get(begin)
    return f", {known}" if known else f" that begins with {begin!r}, not with {b'GGUF'!r}"


def _gguf_of(
    repository: str, wanted: str, revision: str | None, cache_dir: Path | None, *, fetches: bool
) -> Path:
    """A GGUF file of a repository, from the hub or its cache."""
    any_case = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in wanted)
    stem = any_case if wanted.lower().endswith(SUFFIX) else f"{any_case}*{SUFFIX}"
    source = _source(repository, revision)
    if re.search(r"[\[\]*?]", wanted):
        raise ModelLoadError(f"{repository}:{wanted}: {wanted!r} is no name of a precision or file")
    patterns = [f"*{stem}", _TEMPLATES]
    if models := _models_of(repository, revision) if fetches else []:
        # Only what is served is fetched. What is not wanted may be hundreds of gigabytes.
        one = _the_one(models, wanted, source)
        patterns = [*(glob.escape(file.as_posix()) for file in files_of(one)), _TEMPLATES]
    try:
        directory = _snapshot(repository, revision, cache_dir, patterns, is_cached=not fetches)
    except ModelLoadError as error:
        try:
            directory = _snapshot(repository, revision, cache_dir, [_TEMPLATES], is_cached=True)
        except ModelLoadError:
            raise error from None
    found = find_gguf(directory, wanted, source=source)
    assert found is not None, "find_gguf raises if what is wanted is not there"
    return found


def _the_one(models: Sequence[Path], wanted: str, source: str) -> Path:
    """The one of a repository's models that is wanted."""
    found = [model for model in models if is_named(model, wanted)]
    if not found:
        raise ModelLoadError(
            f"{source} has no GGUF model {wanted}; it has {some_of(map(str, models))}"
        )
    if len(found) > 1:
        raise ModelLoadError(
            f"{source} has several GGUF models {wanted} ({some_of(map(str, found))}); name one of "
            "them"
        )
    return found[0]


def _only_gguf(
    repository: str,
    directory: Path,
    revision: str | None,
    cache_dir: Path | None,
    *,
    fetches: bool,
) -> Path | None:
    """The one GGUF model of a repository that has no other, or None.

    The snapshot in the cache counts; what it lacks is looked for on the hub.
    """
    source = _source(repository, revision)
    how = f"name one as {repository}:Q4_K_M, with the precision that is in its name"
    try:
        found = find_gguf(directory, source=source)
        if found is not None or not fetches:
            return found
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; {how}") from None
    models = _models_of(repository, revision)
    if len(models) > 1:
        raise ModelLoadError(
            f"{source} has several GGUF models ({some_of(map(str, models))}); {how}"
        )
    if not models:
        return None
    return _gguf_of(repository, str(models[0]), revision, cache_dir, fetches=True)


def _names(repository: str, revision: str | None) -> Sequence[str]:
    """The names of a repository's files on the hub; nothing if it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    with contextlib.suppress(OfflineModeIsEnabled, *HfHubHTTPError.__bases__):
        return list(HfApi().list_repo_files(repository, revision=revision))
    return ()


def _models_of(repository: str, revision: str | None) -> list[Path]:
    """The GGUF models of a repository on the hub, by the names of their first files."""
    names = [Path(name) for name in _names(repository, revision)]
    firsts = sorted(name for name in names if name.suffix == SUFFIX and is_first(name))
    return [name for name in firsts if named_kind(name) is None] or firsts


def _source(repository: str, revision: str | None) -> str:
    return f"{repository} at revision {revision}" if revision else repository


def _download(model: str, revision: str | None, weights: bool, cache_dir: Path | None) -> Path:
    patterns = [*_TEXT_FILES, *(_WEIGHT_FILES if weights else ())]
    directory = _snapshot(model, revision, cache_dir, patterns)
    has_config = (directory / "config.json").exists()
    if has_config and (not weights or any(directory.glob("*.safetensors"))):
        return directory
    found = _only_gguf(model, directory, revision, cache_dir, fetches=weights)
    if found is not None:
        return found
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"{_source(model, revision)} has no model.safetensors; pickle checkpoints "
            f"({', '.join('*' + suffix for suffix in PICKLE_SUFFIXES)}) are refused, since they "
            f"can run code when they are read. It has {some_of(_names(model, revision))}"
        )
    return directory


def _snapshot(
    model: str,
    revision: str | None,
    cache_dir: Path | None,
    patterns: Sequence[str],
    *,
    is_cached: bool = False,
) -> Path:
    """The directory with a repository's files of these patterns; fetches what is missing."""
    # Imported here: a local directory should not wait for a network client to import.
    from huggingface_hub import snapshot_download

    with _one_reason(model, revision):
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(patterns),
                cache_dir=cache_dir,
                local_files_only=is_cached,
            )
        )


@contextlib.contextmanager
def _one_reason(model: str, revision: str | None) -> Iterator[None]:
    """Turns the hub client's errors into one readable reason."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    try:
        yield
    except HFValidationError as error:
        raise ModelLoadError(
            f"{model!r} is neither a directory nor a valid hub id: {error}"
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"access to {model} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no directory {model}, and no such model on the hub "
            "(or it is private and HF_TOKEN gives no access)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"there is no directory {model}; as a hub id{at} it is not (completely) in the local "
            "cache, and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set)"
        ) from error
    except HfHubHTTPError.__bases__ as error:
        # OSError and the base class of the HTTP library's errors (httpx, or httpx2 from 2.0 on),
        # for example a refusing proxy or a connection that breaks in the middle of a file.
        raise ModelLoadError(f"{model}{at} could not be fetched from the hub: {error}") from error
