"""How many CPUs this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Those that it may run on, where the system says which; no more than its cgroup has time for.

    A container's share of the CPUs is mostly given as time: who is done with it, in as many threads
    as the machine has CPUs, stands still until the next period.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _share(cgroup)
    return cpus if share is None else max(1, min(cpus, math.ceil(share)))


def _share(cgroup: Path) -> float | None:
    """CPUs that a cgroup (version 2 or 1) has time for; None where there is no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        # No limit is "max", or in version 1 -1.
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
