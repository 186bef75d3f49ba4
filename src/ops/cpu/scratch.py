"""Directories that something is made in, beside its place in a cache."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "tmp"


@contextlib.contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """One in ``directory``, of which the caller holds the exclusive lock, removed at the end."""
    # With the lock held, any other belonged to a process that was killed.
    for left in directory.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory) as scratch:
        yield Path(scratch)
