"""Context of a section's process: its options, its deadline, and the output of its rows."""

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
from src.core.config import Config
from src.engine.sizing.roofline import Roofline, measure


class Session:
    """The context of one section.

    Parameters
    ----------
    rows
        A file to which every row is written at once, so that rows survive a crash.
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
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def goals(self) -> Goals | None:
        """The goals; ``None`` if the options differ from those that the goals assume."""
        options = self.options
        return GOALS if self.on_cuda and options.shape == "8b" and not options.quick else None

    def row(self, row: Row) -> None:
        """Output one row of the table."""
        self._told.add(row.figure)
        with self._rows.open("ab") as stream:
            stream.write(msgspec.json.encode(row) + b"\n")

    def without(self, figures: Sequence[str], outcome: Outcome, note: str) -> None:
        """Output that these figures could not be measured, except those that were."""
        for figure in figures:
            if figure not in self._told:
                self.row(Row(figure, outcome=outcome, note=note))

    @contextlib.contextmanager
    def attempt(self, *figures: str) -> Iterator[None]:
        """Report any error inside the block as the outcome of these figures, and go on."""
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
        """Save one line of results, including facts of the device."""
        self._recorder.add(
            measure, figures, config=config, device=device_facts(self.device), **details
        )

    def roofline(self) -> Roofline:
        """The limits of this device, measured now; its memory must be free."""
        # A CPU without bfloat16 units is faster in float32, in which its kernels then compute.
        roof = measure(self.device, torch.bfloat16 if self.on_cuda else torch.float32)
        if self.on_cuda:
            torch.cuda.empty_cache()
        return roof


def device_facts(device: torch.device) -> dict[str, Any]:
    """Facts of the device that `Recorder` cannot find out without torch."""
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
    """The message in one line, short enough for a note in the table."""
    return (str(error).strip().splitlines() or [""])[0][:200]
