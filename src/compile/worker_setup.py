"""What a compiling process is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from src.compile.job import Job


@dataclass(frozen=True)
class Setup:
    """Jobs in order, the root of the caches, and how far the process yields to others."""

    jobs: tuple[Job, ...]
    root: Path
    niceness: int
