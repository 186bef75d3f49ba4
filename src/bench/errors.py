"""Errors of benchmarks."""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Final

import msgspec

from src.core.errors import SlipstreamError

_MAX_MESSAGE: Final = 300


class BenchError(SlipstreamError):
    """A benchmark cannot run, or its result cannot be saved."""


def require(module: str) -> ModuleType:
    """Import a module that only the extra ``bench`` installs.

    Raises
    ------
    BenchError
        It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BenchError(
            f"this command needs {module}: pip install -e '.[bench]' in the checkout"
        ) from None


def error_message(body: bytes) -> str:
    """The message in the body of an error, in OpenAI's format or another."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        found = msgspec.json.decode(body)["error"]
        text = found["message"] if isinstance(found, dict) else found
        return str(text)[:_MAX_MESSAGE]
    return body[:_MAX_MESSAGE].decode("utf-8", "replace").strip()
