"""Default for compilation of the tests' engines: pytest's ``--compiled``.

Without it engines are not compiled, so that most test runs need not wait for compilers.
"""

from __future__ import annotations

import os
from typing import Any

# Not a variable of the server; processes that tests start inherit it.
_VARIABLE = "TESTS_COMPILED"


def compile_engines(wanted: bool) -> None:
    """Set the default for this process and its children."""
    os.environ[_VARIABLE] = "1" if wanted else ""


def compile_settings() -> dict[str, Any]:
    """The section ``compile`` of a test's configuration."""
    if os.environ.get(_VARIABLE):
        return {"enforce_eager": False, "startup": "wait"}
    return {"enforce_eager": True}


def compile_variables() -> dict[str, str]:
    """The same as environment variables of a server."""
    return {f"SLIPSTREAM_COMPILE__{key.upper()}": value for key, value in _texts()}


def compile_options() -> list[str]:
    """The same as command-line options."""
    return [word for key, value in _texts() for word in ("--set", f"compile.{key}={value}")]


def _texts() -> list[tuple[str, str]]:
    return [(key, str(value).lower()) for key, value in compile_settings().items()]
