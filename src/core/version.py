"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata
from typing import Final


def _installed_version() -> str:
    try:
        return importlib.metadata.version("slipstream-engine")
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed.
        return "0+checkout"


VERSION: Final = _installed_version()
