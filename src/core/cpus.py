"""How many CPUs this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from src.core.cgroups import ROOT, ControlGroup, control_groups


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may run on, but no more than its CPU quota allows.

    Containers and services usually have a quota of CPU time per period. With more threads than
    that, the quota is used up early and all threads stop until the next period. The smallest quota
    of the process's cgroup and its ancestors counts. ``root`` contains ``proc`` and ``sys``.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [_share(group) for group in control_groups("cpu", root)]
    return max(1, min([cpus, *(math.ceil(share) for share in shares if share is not None)]))


def _share(group: ControlGroup) -> float | None:
    """A cgroup's quota in CPUs; None if there is no limit."""
    if group.version == 2:
        quota, _, period = (group.text("cpu.max") or "max").partition(" ")
    else:
        quota = group.text("cpu.cfs_quota_us") or "max"
        period = group.text("cpu.cfs_period_us") or ""
    try:
        # "No limit" is "max" in version 2 and -1 in version 1.
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
