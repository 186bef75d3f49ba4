"""Figures of one look, as SVG or PNG."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from src.bench.errors import BenchError, require
from src.core.errors import ConfigError

SUFFIXES: Final = (".svg", ".png")
# Told apart by those who do not see all colours too (M. Okabe, K. Ito, "Color Universal Design").
COLOURS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#555555", "#f0e442"),
)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises
    ------
    BenchError
        matplotlib is not installed; says how to.
    """
    require("matplotlib")
    return require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def write(figure: Any, path: Path) -> None:
    """Write a figure; the same one gives the same bytes.

    Raises
    ------
    ConfigError
        The name ends in none of ``SUFFIXES``, or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    is_svg = path.suffix == ".svg"
    # Text stays text, and neither a date nor a random name is in it.
    style = {"svg.fonttype": "none", "svg.hashsalt": "slipstream"}
    try:
        with require("matplotlib").rc_context(style):
            figure.savefig(path, dpi=144, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """The document in a file.

    Raises
    ------
    ConfigError
        It cannot be read, or is no JSON.
    """
    return _decode(_text(path), str(path))


def read_lines(path: Path) -> Iterator[Any]:
    """The documents in a file: one, or one a line.

    Raises
    ------
    ConfigError
        It cannot be read, or a line is no JSON.
    """
    text = _text(path)
    try:
        yield json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield _decode(line, f"{path}, line {number}")


class NothingToDraw(BenchError):
    """The files hold nothing that the picture shows."""


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
