"""Logging of the package ``src``: one line per record, as text or as JSON, on standard error.

Only the package's own logger is configured; those of hypercorn, uvicorn or an embedding program are
left alone. If `setup_logging` is never called, records reach the program's own handlers.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Final, Literal

import msgspec

ROOT: Final = "src"
LEVELS: Final = ("debug", "info", "warning", "error")

# Standard attributes of a LogRecord; all others were passed as `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# Control characters, and the line breaks that Unicode has beside them. A terminal obeys the former,
# and what reads a log by lines may end one at either.
_CONTROLS: Final = {
    code: f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
_ESCAPES: Final = _CONTROLS | {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}
# JSON's own spelling of those that it lets stand as they are.
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 0x7F}
# Begins each further line of a record. No record begins so.
_MARGIN: Final = "  | "


_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class PackageHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Our handler; its class distinguishes it from others."""


class TextFormatter(logging.Formatter):
    """``2026-11-21 09:31:06.123 INFO    engine.loop: message``, in UTC.

    A message is one line whatever is in it: control characters are shown as escapes. Tracebacks and
    stacks follow, each line behind a margin, so that nothing in a record can pass for another one.
    """

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(short)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by a traceback if there is one."""
        record.short = record.name.removeprefix(f"{ROOT}.")
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        return super().formatMessage(record).translate(_ESCAPES)

    def formatException(self, ei: _ExceptionInfo) -> str:
        """A traceback, with the texts of its errors."""
        return _behind_margin(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """A stack, or other lines that belong to a record."""
        return _behind_margin(super().formatStack(stack_info))


def _behind_margin(text: str) -> str:
    # Not `splitlines`, which ends lines where a terminal does not.
    return "\n".join(_MARGIN + line.translate(_ESCAPES) for line in text.rstrip("\n").split("\n"))


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
        if record.stack_info:
            entry["lines"] = record.stack_info.splitlines()
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        encoded = msgspec.json.encode(extras | entry, enc_hook=str).decode()
        return encoded.translate(_JSON_ESCAPES)


def log_lines(logger: logging.Logger, level: int, message: str, lines: str) -> None:
    """Log a message and lines that belong to it; nothing in them comes from a client."""
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, "", 0, message, (), None, sinfo=lines)
        logger.handle(record)


def current_level() -> str:
    """The level of the package's logger, as one of `LEVELS`."""
    return logging.getLevelName(logging.getLogger(ROOT).getEffectiveLevel()).lower()


def set_level(level: str) -> None:
    """Set the level of the package's logger to one of `LEVELS`."""
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
