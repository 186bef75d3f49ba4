"""Cache directories, their locks, and scratch directories beside the place of a future result."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "tmp"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """An exclusive lock between processes. It ends with its holder, so none goes stale."""
    make_directory(directory)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """A scratch directory in ``directory``, removed at the end. The caller holds its lock."""
    # The lock is held, so any other scratch directory belongs to a process that was killed.
    for left in directory.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory) as scratch:
        yield Path(scratch)


def make_directory(directory: Path) -> None:
    """Make a cache directory and its parents, writable only for this user.

    With a umask that permits group writes, the next start would reject the cache.
    """
    for each in (*reversed(directory.parents), directory):
        each.mkdir(mode=0o755, exist_ok=True)


def is_ours(root: Path) -> bool:
    """Whether only this user and root can write to a directory, or it does not exist yet."""
    try:
        status = root.stat()
    except OSError:
        return True
    # By convention, the group with the same number as a user contains only that user.
    others = 0o002 if status.st_gid == os.geteuid() else 0o022
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others
