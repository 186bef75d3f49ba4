"""Where benchmarks write their results, while they are tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record

# Name of a benchmark -> the lines that it has written
Lines = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    folder = tmp_path / "results"
    monkeypatch.setattr(record, "RESULTS", folder)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]

    return lines
