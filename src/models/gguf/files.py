"""Which GGUF file of a directory or a repository is the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from src.core.errors import ModelLoadError
from src.core.gguf import SUFFIX, is_first, read_kind

_NAMES_SHOWN: Final = 8


def find_gguf(directory: Path, wanted: str | None = None, *, source: str = "") -> Path | None:
    """The one GGUF model of a directory, a file or the first of split files; None: there is none.

    Projectors, importance matrices and drafts that lie beside a model are left out.

    Parameters
    ----------
    directory
        Without ``wanted`` only the files in it count, else those below it too.
    wanted
        a name of precision that the file's name contains (``Q4_K_M``, in any case), or the name of
        a file.
    source
        What errors call the directory.

    Raises
    ------
    ModelLoadError
        There are several, there is none with the name that is wanted, or there are only files that
        are no models. The message lists what was found.
    """
    source = source or str(directory)
    pattern = f"*{SUFFIX}"
    files = directory.glob(pattern) if wanted is None else directory.rglob(pattern)
    firsts = [file for file in sorted(files) if is_first(file)]
    kinds = {file: read_kind(file) for file in firsts}
    models = [file for file in firsts if kinds[file] is None]
    # A draft is a model too, and so is one whose name says with what it was quantized. Alone it is
    # what is meant.
    models = models or [file for file in firsts if read_kind(file, by_name=False) is None]
    if wanted is not None:
        matching = [file for file in models if is_named(file.relative_to(directory), wanted)]
        if not matching:
            names = [str(file.relative_to(directory)) for file in models]
            raise ModelLoadError(f"{source} has no GGUF model {wanted}; it has {some_of(names)}")
        models = matching
    if len(models) > 1:
        names = [str(file.relative_to(directory)) for file in models]
        raise ModelLoadError(
            f"{source} has several GGUF models ({some_of(names)}); name one of them"
        )
    if firsts and not models:
        found = [f"{file.name}, {kinds[file]}" for file in firsts]
        raise ModelLoadError(f"{source} has no GGUF model, only {some_of(found, '; ')}")
    return models[0] if models else None


def is_named(file: Path, wanted: str) -> bool:
    """Whether a file's path has a precision in it, or is the one that is wanted."""
    if wanted.lower().endswith(SUFFIX):
        return file.name == wanted or file.as_posix() == wanted
    own = re.compile(rf"(?<![a-z0-9_]){re.escape(wanted.lower())}(?![a-z0-9_])")
    return own.search(file.as_posix().lower()) is not None


def some_of(names: Iterable[str] | Sequence[str], between: str = ", ") -> str:
    """Some of the names, or that there is nothing."""
    names = list(names)
    shown = between.join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return (shown + (f"{between}and {more} more" if more > 0 else "")) or "nothing"
