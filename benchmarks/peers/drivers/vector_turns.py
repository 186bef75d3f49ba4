"""Common part of the drivers of vectors and ranks: opens an engine and times its calls.

As `turns` does for text: it runs under its peer's Python, uses the standard library alone, gets one
JSON object as its argument and communicates by JSON lines.

    out  {"ready": T, "about": {...}}                T: `time.monotonic`, which processes share
    in   {"texts": [...], "repeats": N}              vectors of all texts in one call, N times
    in   {"query": Q, "texts": [...], "repeats": N}  scores of all texts for a query
    out  {"seconds": [...], "results": [...]}        of each call; of the last: vectors or scores

Texts are given as text, so that tokenizing is timed too. Output of the engine itself goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

# Texts -> a vector of each, as lists of floats or rows of an array.
Embed = Callable[[list[str]], Sequence[Any]]
# (query, texts) -> a score of each text.
Rank = Callable[[str, list[str]], Sequence[float]]


class Opened(NamedTuple):
    """What a driver has opened; a call that it does not have is None."""

    embed: Embed | None
    rank: Rank | None
    about: dict[str, Any]


def by_length(texts: Sequence[Any], most: int) -> list[list[int]]:
    """Indexes of texts in batches of up to ``most``, similar lengths together, longest first."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    return [order[first : first + most] for first in range(0, len(order), most)]


def answer_turns(open_engine: Callable[[dict[str, Any]], Opened]) -> None:
    """Open the engine and answer turns; ``open_engine`` gets the program's argument."""
    # Before the engine is imported, so that its own output does not mix with the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    opened = open_engine(json.loads(sys.argv[1]))
    about = {**opened.about, "ranks": opened.rank is not None}
    out.write(json.dumps({"ready": time.monotonic(), "about": about}) + "\n")
    for line in sys.stdin:
        turn = json.loads(line)
        seconds, results = _timed(opened, turn)
        plain = [
            [float(number) for number in result] if hasattr(result, "__len__") else float(result)
            for result in results
        ]
        out.write(json.dumps({"seconds": seconds, "results": plain}) + "\n")
    # Exit at once, because engines with threads and child processes take long to shut down.
    os._exit(0)


def _timed(opened: Opened, turn: dict[str, Any]) -> tuple[list[float], Sequence[Any]]:
    texts, query = turn["texts"], turn.get("query")
    seconds: list[float] = []
    results: Sequence[Any] = ()
    for _ in range(turn["repeats"]):
        begun = time.perf_counter()
        if query is None:
            results = cast(Embed, opened.embed)(texts)
        else:
            results = cast(Rank, opened.rank)(query, texts)
        seconds.append(time.perf_counter() - begun)
    return seconds, results
