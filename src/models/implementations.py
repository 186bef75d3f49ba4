"""What computes a checkpoint: a native family, or, where there is none, transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.models.fields import read_json
from src.models.generic.loading import load_by_transformers
from src.models.registry import supported_architectures
from src.models.served import ImplementationName, ServedModel
from src.models.weights.loader import load_model


@dataclass(frozen=True)
class Implementation:
    """One way to compute a model.

    Attributes
    ----------
    is_program
        As of `served.ServedModel`.
    load
        Arguments as of `weights.loader.load_model`.
    """

    name: ImplementationName
    is_program: bool
    load: Callable[..., ServedModel]


NATIVE = Implementation("native", True, load_model)
TRANSFORMERS = Implementation("transformers", False, load_by_transformers)


def choose_implementation(
    path: Path, wish: Literal["auto", "native", "transformers"]
) -> Implementation:
    """What computes the checkpoint of a directory.

    Args:
        path: of the directory.
        wish: ``auto`` takes the native family, if there is one.

    Raises:
        ModelLoadError: there is no readable `config.json`.
    """
    if wish == "auto":
        names = read_json(path / "config.json").get("architectures")
        has_family = isinstance(names, list) and bool({*names[:1]} & {*supported_architectures()})
        return NATIVE if has_family else TRANSFORMERS
    return NATIVE if wish == "native" else TRANSFORMERS
