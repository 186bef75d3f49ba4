"""The configuration of a checkpoint as its files have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from src.core.errors import ModelLoadError
from src.core.gguf import is_gguf
from src.models.fields import read_json
from src.models.gguf.files import some_of


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in `config.json` of a directory, or the same of a GGUF file's metadata.

    Raises
    ------
    ModelLoadError
        The file is missing or damaged, or of an architecture that is not served.
    """
    if is_gguf(path):
        # Imported here because few checkpoints need it.
        from src.models.gguf.configuration import read_configuration

        return read_configuration(path)
    file = path / "config.json"
    if path.is_dir() and not file.exists():
        raise ModelLoadError(
            f"{path} has no config.json: not a model directory. It has {_found_in(path)}"
        )
    return read_json(file)


def _found_in(directory: Path) -> str:
    """What a directory has instead of a model."""
    names = sorted(file.name + "/" * file.is_dir() for file in directory.iterdir())
    if "adapter_config.json" in names:
        return "adapter_config.json, so it is an adapter: see lora.adapters"
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        return "params.json and consolidated.*: weights in the form of their makers, not converted"
    return some_of(names)


def name_of_config(path: Path) -> str:
    """What errors about the configuration name."""
    return str(path if is_gguf(path) else path / "config.json")


def names_of_fields(path: Path) -> dict[str, str]:
    """What fields of `config.json` are called in a GGUF file, for errors; nothing elsewhere.

    Raises
    ------
    ModelLoadError
        See `read_config_file`.
    """
    if not is_gguf(path):
        return {}
    from src.models.gguf.configuration import names_of_keys

    return names_of_keys(path)
