"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata
from typing import Final

DISTRIBUTION: Final = "slipstream-engine"


def _installed_version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed.
        return "0+checkout"


VERSION: Final = _installed_version()
