"""Creates figures of a common style and saves them as SVG or PNG."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from src.bench.errors import BenchError, require
from src.core.errors import ConfigError

SUFFIXES: Final = (".svg", ".png")
# Colours that colour-blind readers can distinguish (M. Okabe, K. Ito, "Color Universal Design").
COLOURS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#555555", "#f0e442"),
)


def new_figure(width: float, height: float) -> Any:
    """An empty figure; width and height in inches.

    Raises
    ------
    BenchError
        matplotlib is not installed; the message says how to install it.
    """
    require("matplotlib")
    return require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def write(figure: Any, path: Path) -> None:
    """Save a figure; the same figure gives the same bytes.

    Raises
    ------
    ConfigError
        The suffix is not in ``SUFFIXES``, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    is_svg = path.suffix == ".svg"
    # Text stays text; no date and no random ids are included.
    style = {"svg.fonttype": "none", "svg.hashsalt": "slipstream"}
    try:
        with require("matplotlib").rc_context(style):
            figure.savefig(path, dpi=144, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """The JSON document in a file.

    Raises
    ------
    ConfigError
        It cannot be read, or is not JSON.
    """
    return _decode(_text(path), str(path))


def read_lines(path: Path) -> Iterator[Any]:
    """The JSON documents in a file: a single one, or one per line.

    Raises
    ------
    ConfigError
        It cannot be read, or a line is not JSON.
    """
    text = _text(path)
    try:
        yield json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield _decode(line, f"{path}, line {number}")


class NothingToDraw(BenchError):
    """The files contain nothing that this plot shows."""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None
