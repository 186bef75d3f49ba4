"""Directories of a cache, and those that something is made in beside its place there."""

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


def make_directory(directory: Path) -> None:
    """Make a directory of the cache and those above it, for nobody but this user to write to.

    With a umask that lets a group write, the next start would leave what this one made alone.
    """
    for each in (*reversed(directory.parents), directory):
        each.mkdir(mode=0o755, exist_ok=True)
