"""``python -m src.ops.build.prebuild``: compile every level that the compiler knows, for an image.

Levels that this machine's CPU cannot run are compiled all the same: the machine that runs them
checks them.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Final

from src.ops.build.compilers import BuildError
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.levels import LEVELS
from src.ops.build.prebuilt import DIRECTORY

_SECONDS: Final = 3600.0
"""For one unit, on a machine as busy as can be: nobody waits for a model here."""


def prebuild(cache: KernelCache) -> list[str]:
    """Compile all levels and keep them beside the sources; returns their names, slowest first.

    Raises
    ------
    BuildError
        There is no compiler, or it fails on a level whose options it knows.
    """
    cache.directory()
    levels = [level for level in LEVELS if cache.knows(level)]
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        outputs, failed = cache.compile(Path(scratch), levels, _SECONDS)
        if failed:
            raise BuildError(f"levels that the compiler knows do not compile: {failed}")
        cache.prebuilt.keep(outputs)
    return list(outputs)


def main() -> int:
    """Compile, and print which levels there are."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        # Objects are of no use in an image: they are kept in a folder that goes.
        with tempfile.TemporaryDirectory(prefix="slipstream-") as root:
            names = prebuild(KernelCache(Path(root)))
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"CPU kernels in {DIRECTORY}: {', '.join(names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
