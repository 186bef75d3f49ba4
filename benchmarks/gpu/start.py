"""Measures the time from process start to the first token, with empty and with filled caches.

The model's weights are generated from a seed, so no disk is read.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from benchmarks.record import Figure
from benchmarks.shapes import write_checkpoint
from benchmarks.startup import STARTUP, start
from src.core.settings import load_config

COLD: Final = "cold start to first token"
WARM: Final = "warm start to first token"
# Seconds reserved for the process to end.
_END_SECONDS = 5.0


def figures(options: argparse.Namespace) -> list[str]:
    return [COLD, WARM]


def run(session: Session) -> None:
    goals = session.goals
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", session.options.shape)
        config = load_config(
            overrides=[
                ("model.path", str(checkpoint)),
                ("model.load_format", "dummy"),
                ("device.type", session.device.type),
                ("compile.enforce_eager", str(session.options.eager).lower()),
            ]
        )
        cache = str(Path(folder) / "cache")
        for figure, goal in (
            (COLD, None if goals is None else goals.cold),
            (WARM, None if goals is None else goals.warm),
        ):
            with session.attempt(figure):
                # The warm start uses what the cold one built, so the cold one needs time to finish.
                patience = 0.0 if session.options.quick else session.left / 2
                found = start(config, cache, patience=patience, seconds=session.left - _END_SECONDS)
                seen = {name: found[name] for name in STARTUP if name in found}
                session.record(
                    figure,
                    {name: Figure.of("s", [seconds]) for name, seconds in seen.items()},
                    config=config,
                )
                session.row(Row(figure, "s", seen["first_token"], goal=goal, note=_rest(seen)))


def _rest(seen: dict[str, float]) -> str:
    return ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in seen.items())
