"""Logging of the package ``src``: one line per record, as text or as JSON, on standard error.

Only the package's own logger is configured; those of hypercorn, uvicorn or an embedding program are
left alone. If :func:`setup_logging` is never called, records reach the program's own handlers.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final, Literal

import msgspec

ROOT: Final = "src"
LEVELS: Final = ("debug", "info", "warning", "error")

# Standard attributes of a LogRecord; all others were passed as `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class PackageHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Our handler; its class distinguishes it from others."""


class TextFormatter(logging.Formatter):
    """``2026-11-21 09:31:06.123 INFO    engine.loop: message``, in UTC."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(short)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by a traceback if there is one."""
        record.short = record.name.removeprefix(f"{ROOT}.")
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds since the epoch), level, logger, message, extras."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message contains."""
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        return msgspec.json.encode(extras | entry, enc_hook=str).decode()


def current_level() -> str:
    """The level of the package's logger, as one of :data:`LEVELS`."""
    return logging.getLevelName(logging.getLogger(ROOT).getEffectiveLevel()).lower()


def set_level(level: str) -> None:
    """Set the level of the package's logger to one of :data:`LEVELS`."""
    logging.getLogger(ROOT).setLevel(level.upper())


def setup_logging(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["text", "json"] = "text",
) -> None:
    """Log the package's records on standard error; calling it again changes level and format.

    Does nothing if the program has configured logging itself: its handlers get every record anyway,
    and a second handler would print each line twice.
    """
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if logging.getLogger().handlers:
        return
    for handler in list(logger.handlers):
        if isinstance(handler, PackageHandler):
            logger.removeHandler(handler)
    handler = PackageHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger.addHandler(handler)
