"""How many CPUs this process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Those that it may run on, where the system says which; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
