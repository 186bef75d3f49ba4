"""A start's parts: which follow each other, which go on beside them, and how they are shown."""

from __future__ import annotations

import gc
import weakref

import pytest

from src.core.start_timeline import StartSpan, StartTimeline, timeline_lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moment it is, as its only item."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_phases_follow_each_other_and_others_go_on_beside_them(clock: list[float]) -> None:
    told: list[tuple[str, bool]] = []
    timeline = StartTimeline(lambda span, is_late: told.append((span.name, is_late)))
    timeline.phase("importing")
    clock[0] = 102.0
    timeline.phase("weights")
    clock[0] = 103.0
    timeline.begin("compile")
    # It is where it was.
    timeline.phase("weights")
    clock[0] = 105.0
    timeline.phase("kv_cache")
    clock[0] = 106.0
    spans, ended = timeline.finish()
    assert (timeline.began, ended) == (100.0, 106.0)
    assert spans == [
        StartSpan("importing", 100.0, 102.0),
        StartSpan("weights", 102.0, 105.0),
        StartSpan("compile", 103.0, None),
        StartSpan("kv_cache", 105.0, 106.0),
    ]
    timeline.end("compile")
    assert told == [
        ("importing", False),
        ("weights", False),
        ("kv_cache", False),
        ("compile", True),
    ]


def test_a_phase_that_has_begun_already_keeps_its_times(clock: list[float]) -> None:
    """Compilation begins before weights, and is a phase of its own once they wait for it."""
    timeline = StartTimeline()
    timeline.begin("compile")
    clock[0] = 101.0
    timeline.phase("weights")
    clock[0] = 104.0
    timeline.phase("compile")
    clock[0] = 106.0
    timeline.end("compile")
    clock[0] = 107.0
    spans, _ = timeline.finish()
    assert spans == [StartSpan("compile", 100.0, 106.0), StartSpan("weights", 101.0, 104.0)]


def test_what_was_never_begun_does_not_end() -> None:
    told: list[str] = []
    timeline = StartTimeline(lambda span, _: told.append(span.name))
    timeline.end("compile")
    assert told == []
    assert timeline.finish()[0] == []


def test_an_error_is_told_and_not_kept() -> None:
    class Failure(Exception):
        pass

    told: list[str] = []
    timeline = StartTimeline(lambda span, _: told.append(type(span.error).__name__))
    early, late = Failure("early"), Failure("late")
    timeline.begin("compile")
    timeline.phase("weights")
    (compiled, weights), _ = timeline.finish(early)
    assert (compiled.error, weights.error) == (None, early)
    timeline.end("compile", late)
    assert told == ["Failure", "Failure"]
    kept = [weakref.ref(early), weakref.ref(late)]
    del early, late, compiled, weights
    gc.collect()
    assert [error() for error in kept] == [None, None]


def test_the_table_has_one_scale() -> None:
    lines = timeline_lines(
        [
            StartSpan("importing", 0.0, 2.0),
            StartSpan("compile", 2.0, None),
            StartSpan("weights", 2.5, 3.5, OSError("gone")),
            StartSpan("a moment", 5.0, 5.0),
        ],
        width=10,
    )
    assert lines == [
        "              began s    took s",
        "  importing      0.00      2.00  ####",
        "  compile        2.00   goes on      ######",
        "  weights        2.50      1.00       ##     failed",
        "  a moment       5.00                     #",
    ]


def test_however_short_a_part_is_it_is_seen_within_the_width() -> None:
    spans = [StartSpan(str(tenth), tenth / 10, tenth / 10 + 1e-6) for tenth in range(11)]
    bars = [line[26:] for line in timeline_lines(spans, width=4)]
    assert all(bar.strip() == "#" and len(bar) <= 4 for bar in bars[1:])
