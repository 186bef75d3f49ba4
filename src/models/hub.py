"""Resolves a directory, a GGUF file or a Hugging Face hub id to a local path."""

from __future__ import annotations

from pathlib import Path

from src.core.errors import ModelLoadError
from src.core.gguf import SUFFIX, find_gguf, is_gguf
from src.models.weights.checkpoint import PICKLE_SUFFIXES

_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    cache_dir: Path | None = None,
) -> Path:
    """The local directory of a model, or its GGUF file.

    A directory that has no `config.json` but one GGUF model is that model.

    Args:
        model: a local directory, a GGUF file, or a hub id such as `owner/name`.
        revision: branch, tag or commit of a hub id; pin a commit for reproducible serving. Only
            safetensors, JSON files and the tokenizer are fetched, never code or pickles.
        weights: whether to fetch weights; dummy weights need none.
        cache_dir: the hub's cache; None: its default.

    Raises:
        ModelLoadError: there is no such directory or repository, access is refused, the hub cannot
            be reached and the cache does not have it, or it has only pickle checkpoints.
    """
    local = Path(model).expanduser()
    if local.exists() and revision is not None:
        what = "directory" if local.is_dir() else "file"
        raise ModelLoadError(
            f"revision {revision!r} was given, but {model} is a local {what}, which has none"
        )
    if local.is_dir():
        return local if (local / "config.json").exists() else find_gguf(local) or local
    if local.exists():
        if is_gguf(local):
            return local
        raise ModelLoadError(
            f"{model} is a file; expected a directory in Hugging Face layout or a *{SUFFIX} file"
        )
    if is_gguf(local):
        raise ModelLoadError(f"there is no file {model}")
    if local.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"there is no directory {model}")
    return _download(model, revision, weights, cache_dir)


def _download(model: str, revision: str | None, weights: bool, cache_dir: Path | None) -> Path:
    # Imported here: a local directory should not wait for a network client to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    patterns = [*_TEXT_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        directory = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=patterns, cache_dir=cache_dir
            )
        )
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
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"{model}{at} has no model.safetensors; pickle checkpoints "
            f"({', '.join('*' + suffix for suffix in PICKLE_SUFFIXES)}) are refused, since they "
            "can run code when they are read"
        )
    return directory
