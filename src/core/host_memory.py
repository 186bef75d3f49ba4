"""How much memory of the machine this process may still take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from src.core.cgroups import ROOT, ControlGroup, control_groups

# Per version of cgroups: limit, use, and what in memory.stat names the part of the use that is
# page cache which the system gives back when asked.
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_memory(root: Path = ROOT) -> int:
    """Bytes that may still be allocated, at least 0.

    Minds the limits of the process's cgroup and of those around it, in which files that were read
    count as used: those that are not in active use do not count here. ``root`` is where ``/proc``
    and ``/sys`` are.
    """
    # Lines like "MemAvailable:   24576 kB".
    host = {
        name: 1024 * int(value.split()[0])
        for name, value in (
            line.split(":") for line in (root / "proc/meminfo").read_text().splitlines()
        )
    }
    left = [_left(group, host["MemTotal"]) for group in control_groups("memory", root)]
    return max(0, min([host["MemAvailable"], *(room for room in left if room is not None)]))


def _left(group: ControlGroup, total: int) -> int | None:
    """Bytes that a cgroup leaves; ``None`` where it has no limit."""
    limit_name, used_name, reclaimable_name = _FILES[group.version]
    limit, used = group.number(limit_name), group.number(used_name)
    # Version 1 says "no limit" with a number over what any machine has.
    if limit is None or used is None or limit > total:
        return None
    lines = (group.text("memory.stat") or "").splitlines()
    reclaimable = (int(line.split()[1]) for line in lines if line.split()[0] == reclaimable_name)
    return limit - used + next(reclaimable, 0)
