"""A section's own process: what it was asked for, how long it may take, and where its rows go."""

from __future__ import annotations

import argparse
import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.limits import GOALS, Goals
from benchmarks.gpu.table import Outcome, Row
from benchmarks.record import Figure, Recorder
from benchmarks.roofline import Roofline, measure
from src.core.config import Config


class Session:
    """Of one section.

    Parameters
    ----------
    rows
        A file that gets every row as soon as it is known: a process that dies has told some.
    deadline
        On the monotonic clock.
    """

    def __init__(
        self, options: argparse.Namespace, recorder: Recorder, rows: Path, deadline: float
    ) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self._recorder = recorder
        self._rows = rows
        self._deadline = deadline
        self._told: set[str] = set()

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def goals(self) -> Goals | None:
        """``None`` where figures are not those that the goals are about."""
        options = self.options
        return GOALS if self.on_cuda and options.shape == "8b" and not options.quick else None

    def row(self, row: Row) -> None:
        """Tell one row of the table."""
        self._told.add(row.figure)
        with self._rows.open("ab") as stream:
            stream.write(msgspec.json.encode(row) + b"\n")

    def without(self, figures: Sequence[str], outcome: Outcome, note: str) -> None:
        """Tell that these will have no figure, unless they have one."""
        for figure in figures:
            if figure not in self._told:
                self.row(Row(figure, outcome=outcome, note=note))

    @contextlib.contextmanager
    def attempt(self, *figures: str) -> Iterator[None]:
        """Whatever goes wrong inside is what these figures say, and nothing else is lost by it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.without(figures, "failed", f"{type(error).__name__}: {first_line(error)}")

    def record(
        self,
        measure: str,
        figures: dict[str, Figure],
        *,
        config: Config | None = None,
        **details: Any,
    ) -> None:
        """One line of results, with the device that it is of."""
        self._recorder.add(
            measure, figures, config=config, device=device_facts(self.device), **details
        )

    def roofline(self) -> Roofline:
        """Of this device, measured now, with nothing left on it."""
        # A CPU without bfloat16 units is faster in float32, which is what its kernels compute in.
        roof = measure(self.device, torch.bfloat16 if self.on_cuda else torch.float32)
        if self.on_cuda:
            torch.cuda.empty_cache()
        return roof


def device_facts(device: torch.device) -> dict[str, Any]:
    """What `Recorder` cannot know of the machine without torch."""
    if device.type != "cuda":
        return {"name": "cpu"}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def first_line(error: BaseException) -> str:
    """The message, short enough for a table's note."""
    return (str(error).strip().splitlines() or [""])[0][:200]
