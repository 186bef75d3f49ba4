"""The session over real schemas, on a few of them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.real_schemas import survey


def test_a_survey_counts_refusals_and_wrong_verdicts(tmp_path: Path) -> None:
    good = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1}}}
    bad = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    valid = {"data": {"a": 1, "b": 2}, "valid": True}
    cases = [
        {"name": "good", "schema": good, "tests": [valid, {"data": {"a": 2}, "valid": False}]},
        # As a file could be wrong.
        {"name": "odd", "schema": good, "tests": [{"data": {"a": 2}, "valid": True}]},
        {"name": "bad", "schema": bad, "tests": []},
    ]
    path = tmp_path / "schemas.jsonl"
    path.write_text("\n".join(map(json.dumps, cases)))
    found = survey(path)
    assert (found.num_schemas, found.num_instances) == (3, 3)
    assert list(found.refused) == ["bad"]
    assert "/properties/x/uniqueItems" in found.refused["bad"]
    assert [name for name, _ in found.wrong] == ["odd"]
