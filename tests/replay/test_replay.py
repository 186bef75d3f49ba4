"""A refactoring must not change a single plan. ``record.py`` says how to change them on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay.driver import TRACES, plans_path, replay


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name.partition(".")[0])
def test_a_recorded_trace_gives_the_recorded_plans(trace: Path) -> None:
    lines, _ = replay(trace)
    recorded = plans_path(trace).read_text().splitlines()
    for number, (line, expected) in enumerate(zip(lines, recorded, strict=False), 1):
        assert line == expected, f"plan {number} differs"
    assert len(lines) == len(recorded)


def test_the_traces_reach_what_they_are_for() -> None:
    stats = {trace.name.partition(".")[0]: replay(trace)[1].scheduler.stats for trace in TRACES}
    assert stats["mixed"].prefix_cache_hits > 0
    assert stats["mixed"].discarded_tokens > 0
    assert stats["mixed"].bypasses > 0
    assert stats["pressure"].preemptions > 0
    assert stats["pressure"].shortages > 0
