"""The input of a compiling process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from src.compile.job import Job


@dataclass(frozen=True)
class Setup:
    """Jobs in order, the root of the caches, and the niceness of the process."""

    jobs: tuple[Job, ...]
    root: Path
    niceness: int
