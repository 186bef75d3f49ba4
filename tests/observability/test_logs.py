import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from src.observability.logs import PackageHandler, log_lines, setup_logging


@pytest.fixture
def package_logger() -> Iterator[logging.Logger]:
    """The package's logger without handlers, put back afterwards."""
    logger = logging.getLogger("src")
    handlers, level = list(logger.handlers), logger.level
    logger.handlers.clear()
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def set_up(**how: Any) -> None:
    """Set up logging as in a program that has no handlers of its own, which pytest has."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    root.handlers.clear()
    try:
        setup_logging(**how)
    finally:
        root.handlers[:] = handlers


def captured(logger: logging.Logger) -> io.StringIO:
    (handler,) = logger.handlers
    assert isinstance(handler, PackageHandler)
    handler.setStream(stream := io.StringIO())
    # Engines of other tests wait between these, and their watchdogs may say so.
    handler.addFilter(_is_of_the_test)
    return stream


def _is_of_the_test(record: logging.LogRecord) -> bool:
    return record.name != "src.engine.telemetry.health"


def test_a_record_is_one_line_of_text(package_logger: logging.Logger) -> None:
    set_up()
    stream = captured(package_logger)
    logging.getLogger("src.engine.loop").info("step %d", 7)
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    engine\.loop: step 7\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_a_record_is_one_json_object(package_logger: logging.Logger) -> None:
    set_up(format="json")
    stream = captured(package_logger)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("src.http").exception("two\nlines", extra={"request": {"id": 5}})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == (
        "error",
        "src.http",
        "two\nlines",
    )
    assert entry["request"] == {"id": 5}
    assert "ValueError: broken" in entry["traceback"]


# What a terminal obeys and what ends a line, with the first and the last of each kind.
CONTROLS = {
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\0": r"\x00",
    "\x08": r"\x08",
    "\x0b": r"\x0b",
    "\x0c": r"\x0c",
    "\x1b[2J": r"\x1b[2J",
    "\x1c": r"\x1c",
    "\x1f": r"\x1f",
    "\x7f": r"\x7f",
    "\x80": r"\x80",
    "\x85": r"\x85",
    "\x9b2J": r"\x9b2J",
    "\x9f": r"\x9f",
    "\u2028": r"\u2028",
    "\u2029": r"\u2029",
}
FORGED = "2026-11-27 00:00:00.000 INFO    engine.loop: forged"
# What is none stays as it is, a backslash too.
PLAIN = "caf\u00e9 \u4f60\u597d \\n \U0001f600\u00a0"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_message_is_one_line_whatever_is_in_it(
    package_logger: logging.Logger, control: str
) -> None:
    set_up()
    stream = captured(package_logger)
    text = f"{PLAIN}{control}{FORGED}"
    logging.getLogger("src.x").warning("a client said %s", text)
    logging.getLogger("src.x").warning(text)
    logging.getLogger(f"src.{control}").warning("y")
    shown = stream.getvalue()
    assert shown.count("\n") == 3
    assert len(shown.splitlines()) == 3
    assert shown.count(f"{PLAIN}{CONTROLS[control]}{FORGED}\n") == 2
    assert control not in shown.replace("\n", "")


@pytest.mark.parametrize("control", CONTROLS)
def test_no_line_of_a_traceback_passes_for_a_record(
    package_logger: logging.Logger, control: str
) -> None:
    """Nor does one of its causes, its notes, or of a group."""
    set_up()
    stream = captured(package_logger)
    text = f"{PLAIN}{control}{FORGED}"
    try:
        try:
            raise KeyError(text)
        except KeyError as cause:
            error = ExceptionGroup(text, [ValueError(text), OSError(text)])
            error.add_note(text)
            raise error from cause
    except ExceptionGroup:
        logging.getLogger("src.http").exception("a request failed", stack_info=True)
    first, *others = stream.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("ERROR   http: a request failed")
    assert all(line.startswith("  | ") for line in others)
    # Only the margin's own line feeds are left.
    assert stream.getvalue().splitlines() == [first, *others]
    assert control == "\n" or control not in stream.getvalue()
    assert sum(FORGED in line for line in others) >= 5
    assert any("Traceback (most recent call last)" in line for line in others)
    assert any("Stack (most recent call last)" in line for line in others)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_json_line_is_one_too(package_logger: logging.Logger, control: str) -> None:
    set_up(format="json")
    stream = captured(package_logger)
    text = f"{PLAIN}{control}{FORGED}"
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("src.x").exception(text, extra={control: [text]})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["message"], entry[control]) == (text, [text])
    assert entry["traceback"].endswith(text)
    assert control not in line


@pytest.mark.parametrize("format", ["text", "json"])
def test_lines_belong_to_a_record(package_logger: logging.Logger, format: str) -> None:
    set_up(format=format, level="info")
    stream = captured(package_logger)
    logger = logging.getLogger("src.engine.x")
    log_lines(logger, logging.INFO, "100 % ready", "  a  1\n  b  2")
    log_lines(logger, logging.DEBUG, "unseen", "unseen")
    shown = stream.getvalue()
    if format == "text":
        assert shown.endswith(" INFO    engine.x: 100 % ready\n  |   a  1\n  |   b  2\n")
    else:
        entry = json.loads(shown)
        assert (entry["message"], entry["lines"]) == ("100 % ready", ["  a  1", "  b  2"])
    assert "unseen" not in shown


def test_setting_up_twice_prints_once(package_logger: logging.Logger) -> None:
    set_up()
    set_up(level="warning")
    stream = captured(package_logger)
    logging.getLogger("src.x").info("unseen")
    logging.getLogger("src.x").warning("seen")
    assert stream.getvalue().count("\n") == 1


def test_a_program_that_logs_itself_gets_no_second_handler(package_logger: logging.Logger) -> None:
    setup_logging(level="debug")
    assert package_logger.handlers == []
    assert package_logger.level == logging.DEBUG


def test_loggers_of_others_are_left_alone(package_logger: logging.Logger) -> None:
    others = [logging.getLogger(name) for name in ("uvicorn", "hypercorn.error")]
    before = [(list(logger.handlers), logger.level) for logger in others]
    setup_logging(level="debug")
    assert [(list(logger.handlers), logger.level) for logger in others] == before
