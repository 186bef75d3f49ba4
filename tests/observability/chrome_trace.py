"""What must hold of any Chrome trace that a viewer is to show as it is meant."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Slice = tuple[int, int, str]


def nanoseconds(event: dict[str, Any], name: str = "ts") -> int:
    value = event[name]
    assert isinstance(value, int | float)
    return round(value * 1000)


def slices_of(document: dict[str, Any]) -> dict[tuple[int, int], list[Slice]]:
    """(process, thread) -> (start, end, name) in nanoseconds, outer ones before inner ones."""
    tracks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            start = nanoseconds(event)
            end = start + nanoseconds(event, "dur")
            tracks[event["pid"], event["tid"]].append((start, end, event["name"]))
    for track in tracks.values():
        track.sort(key=lambda piece: (piece[0], -piece[1]))
    return tracks


def check_trace(document: dict[str, Any]) -> None:
    """Raise AssertionError with what is wrong."""
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    for event in document["traceEvents"]:
        kind = event["ph"]
        assert kind in ("X", "M", "C", "s", "t", "f"), f"unknown phase {kind}"
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if kind != "C":
            assert isinstance(event["tid"], int)
        if kind != "M":
            assert nanoseconds(event) >= 0
        if kind == "X":
            assert nanoseconds(event, "dur") >= 0
        elif kind == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif kind == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        elif kind == "M" and event["name"] == "process_name":
            processes.add(event["pid"])
    tracks = slices_of(document)
    assert set(tracks) <= named, "a track without a name"
    assert {process for process, _ in tracks} <= processes, "a process without a name"
    for track in tracks.values():
        _check_nesting(track)
    _check_flows(document, tracks)


def _check_nesting(track: list[Slice]) -> None:
    open_slices: list[Slice] = []
    for piece in track:
        while open_slices and open_slices[-1][1] <= piece[0]:
            open_slices.pop()
        if open_slices:
            assert piece[1] <= open_slices[-1][1], f"{piece} leaves {open_slices[-1]}"
        open_slices.append(piece)


def _check_flows(document: dict[str, Any], tracks: dict[tuple[int, int], list[Slice]]) -> None:
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] in ("s", "t", "f"):
            flows[event["cat"], event["id"]].append(event)
    for name, events in flows.items():
        kinds = [event["ph"] for event in events]
        assert kinds[0] == "s", f"flow {name} has no beginning"
        assert kinds[-1] == "f", f"flow {name} has no end"
        assert set(kinds[1:-1]) <= {"t"}
        times = [nanoseconds(event) for event in events]
        assert times == sorted(times), f"flow {name} runs backwards"
        for event in events:
            track, at = tracks[event["pid"], event["tid"]], nanoseconds(event)
            assert any(start <= at <= end for start, end, _ in track), f"{event} is in no slice"
