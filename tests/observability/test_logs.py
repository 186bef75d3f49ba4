import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from src.observability.logs import PackageHandler, setup_logging


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
    return stream


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
