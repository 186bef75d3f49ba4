"""Why something cannot be measured."""

from __future__ import annotations

import importlib
from types import ModuleType

from src.core.errors import SlipstreamError


class BenchError(SlipstreamError):
    """A measurement cannot begin, or its result cannot be kept."""


def require(module: str) -> ModuleType:
    """Import what only the extra ``bench`` installs.

    Raises
    ------
    BenchError
        It is not installed; says how to.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BenchError(
            f"this command needs {module}: pip install 'slipstream-engine[bench]'"
        ) from None
