"""Syntaxes that plugins add while other engines of the process read the tables."""

from __future__ import annotations

from typing import Any

import pytest

from src.text.reasoning import REASONING_SYNTAXES, ReasoningSyntax
from src.text.tool_calls import detection


class Filled(dict[str, Any]):
    """A table that is never read without what it had."""

    def clear(self) -> None:
        raise AssertionError("a table is emptied while others may read it")


def test_what_is_added_is_found_first_and_the_table_is_never_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Filled(REASONING_SYNTAXES)
    monkeypatch.setattr(detection, "REASONING_SYNTAXES", table)
    own = next(iter(REASONING_SYNTAXES.values()))
    template = "".join(mark if isinstance(mark, str) else "".join(mark) for mark in own.shown_by)
    try:
        detection.reasoning_syntax.cache_clear()
        assert detection.reasoning_syntax("auto", template) is own
        for name in ("first", "second"):
            added = ReasoningSyntax(
                name=name, models="", opening="<a>", closing="</a>", shown_by=own.shown_by
            )
            detection.add_reasoning_syntax(added)
            detection.add_reasoning_syntax(added)
            assert detection.reasoning_syntax("auto", template) is added
            assert detection.reasoning_syntax(name, "") is added
        assert len(table) == len(REASONING_SYNTAXES) + 2
    finally:
        detection.reasoning_syntax.cache_clear()
