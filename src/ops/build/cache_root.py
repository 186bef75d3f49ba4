"""Where compiled code is cached."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

from src.core.process_end import at_process_end
from src.ops.build.scratch import is_ours

_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """The cache of compiled code: `chosen_cache_root`, if only this user and root can write to it.

    Libraries in the cache are executed. So a directory that other users can write to is not used:
    a warning is logged, and an empty directory is made that is removed when this process ends.
    """
    root = chosen_cache_root()
    return root if is_ours(root) else _private_root(root)


def chosen_cache_root() -> Path:
    """`SLIPSTREAM_CACHE_DIR`, else `$XDG_CACHE_HOME/slipstream`, else `~/.cache/slipstream`."""
    if chosen := os.environ.get("SLIPSTREAM_CACHE_DIR"):
        root = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        root = (Path(base) if base else Path.home() / ".cache") / "slipstream"
    # Absolute, because compilers run in another directory.
    return root.absolute()


def remove_at_the_end(directory: Path) -> None:
    """Remove a directory when this process ends, after whoever uses it has stopped."""
    remove = functools.partial(shutil.rmtree, directory, ignore_errors=True)
    at_process_end(remove, after_others=True)


@functools.cache
def _private_root(root: Path) -> Path:
    private = Path(tempfile.mkdtemp(prefix="slipstream-"))
    remove_at_the_end(private)
    _log.warning(
        "others may write to the cache %s, so nothing is loaded from it, and every start compiles: "
        "make it yours alone (chown, chmod go-w)",
        root,
    )
    return private
