"""The examples of docs/plan.md are what the command prints."""

from __future__ import annotations

import re

import pytest

from benchmarks.plan_page import PAGE, written

pytestmark = pytest.mark.timeout(180)


def words(text: str) -> list[str]:
    """Every line without its figures, which follow torch's version in a few places."""
    return [" ".join(re.sub(r"[\d.,]+", "0", line).split()) for line in text.splitlines()]


def test_the_examples_are_what_the_command_prints() -> None:
    page = PAGE.read_text()
    assert page.count("```text\n$ python -m src plan ") == 2
    fresh = written(page)
    assert words(fresh) == words(page)
    assert "It fits. " in fresh
    assert "Any of these helps:\n" in fresh
