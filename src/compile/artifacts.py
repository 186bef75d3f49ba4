"""Where compiled code is kept between starts."""

from __future__ import annotations

import os
from pathlib import Path


def use_artifact_cache(directory: Path) -> None:
    """Keep Inductor's code, graphs and C++ objects under ``directory``.

    Inductor keys its entries by code, options, versions and CPU, writes them atomically and
    rebuilds what it cannot read, so processes may share the directory. A place that the user chose
    through torch's own variable is left alone. Must run before the process compiles anything.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))
