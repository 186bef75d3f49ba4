"""How many CPUs this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from src.core.cgroups import ROOT, ControlGroup, control_groups


def usable_cpus(root: Path = ROOT) -> int:
    """Those that it may run on, where the system says which; no more than it has time for.

    A container's or a service's share of the CPUs is mostly given as time: who is done with it, in
    as many threads as the machine has CPUs, stands still until the next period. The least share of
    its cgroup and of those around it counts. ``root`` is where ``/proc`` and ``/sys`` are.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [_share(group) for group in control_groups("cpu", root)]
    return max(1, min([cpus, *(math.ceil(share) for share in shares if share is not None)]))


def _share(group: ControlGroup) -> float | None:
    """CPUs that a cgroup has time for; None where there is no limit."""
    if group.version == 2:
        quota, _, period = (group.text("cpu.max") or "max").partition(" ")
    else:
        quota = group.text("cpu.cfs_quota_us") or "max"
        period = group.text("cpu.cfs_period_us") or ""
    try:
        # No limit is "max", or in version 1 -1.
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
