"""docs/tour.md names files and functions; each is where it says."""

from __future__ import annotations

import ast
import re

from src.core.settings import CHECKOUT

TOUR = (CHECKOUT / "docs" / "tour.md").read_text(encoding="utf-8")
STOP = re.compile(r"\*\*`(src/[\w/.]+)`\*\*:\s((?:`\w+`(?:,\s)?)+)")


def _defined(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


def test_every_stop_of_the_tour_defines_what_it_shows() -> None:
    stops = STOP.findall(TOUR)
    assert len(stops) > 20
    lost = [
        f"{file}: {name}"
        for file, names in stops
        for name in re.findall(r"`(\w+)`", names)
        if name not in _defined((CHECKOUT / file).read_text(encoding="utf-8"))
    ]
    assert not lost
