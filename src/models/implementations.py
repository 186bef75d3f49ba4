"""What computes a checkpoint: a native family, or, where there is none, transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.core.errors import ModelLoadError
from src.core.gguf import is_gguf
from src.models.config_file import read_config_file
from src.models.generic.loading import load_by_transformers
from src.models.loading.loader import load_model
from src.models.registry import has_family
from src.models.served import ImplementationName, ServedModel


@dataclass(frozen=True)
class Implementation:
    """One way to compute a model.

    Attributes
    ----------
    is_program
        As of `served.ServedModel`.
    load
        Arguments as of `loading.loader.load_model`.
    """

    name: ImplementationName
    is_program: bool
    load: Callable[..., ServedModel]


NATIVE = Implementation("native", True, load_model)
TRANSFORMERS = Implementation("transformers", False, load_by_transformers)


def choose_implementation(
    path: Path, wish: Literal["auto", "native", "transformers"]
) -> Implementation:
    """What computes the checkpoint of a directory, or a GGUF file.

    Parameters
    ----------
    path
        Of the directory or the file.
    wish
        ``auto`` takes the native family, if there is one.

    Raises
    ------
    ModelLoadError
        There is no readable `config.json`, or it asks for transformers and a GGUF file.
    """
    if is_gguf(path):
        if wish == "transformers":
            raise ModelLoadError(
                f"{path}: GGUF files are for native families; leave out model.implementation"
            )
        return NATIVE
    if wish == "auto":
        return NATIVE if has_family(read_config_file(path)) else TRANSFORMERS
    return NATIVE if wish == "native" else TRANSFORMERS
