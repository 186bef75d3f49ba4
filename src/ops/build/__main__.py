"""`python -m src.ops.build`: build the CPU's kernels now, at installation time."""

from __future__ import annotations

import logging
import sys

from src.ops.build.cache_root import cache_root
from src.ops.build.kernels import ensure_built


def main() -> int:
    """Build and print what will serve; fails if that is the reference."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    status = ensure_built(wait=True)
    sys.stdout.write(f"CPU kernels: {status} ({cache_root()})\n")
    return 0 if status != "reference" else 1


if __name__ == "__main__":
    sys.exit(main())
