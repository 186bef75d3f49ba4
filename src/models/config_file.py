"""The configuration of a checkpoint as its files have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from src.core.gguf import is_gguf
from src.models.fields import read_json


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in `config.json` of a directory, or the same of a GGUF file's metadata.

    Raises:
        ModelLoadError: the file is missing or damaged, or of an architecture that is not served.
    """
    if is_gguf(path):
        # Imported here because few checkpoints need it.
        from src.models.gguf.configuration import read_configuration

        return read_configuration(path)
    return read_json(path / "config.json")


def name_of_config(path: Path) -> str:
    """What errors about the configuration name."""
    return str(path if is_gguf(path) else path / "config.json")
