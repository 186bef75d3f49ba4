"""How much host memory this process may still allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from src.core.cgroups import ROOT, ControlGroup, control_groups

# Per version of cgroups: the files with the limit and the usage, and the field of memory.stat with
# the reclaimable page cache that is part of the usage.
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_memory(root: Path = ROOT) -> int:
    """Bytes that may still be allocated, at least 0.

    Respects the limits of the process's cgroup and its ancestors. Their usage includes the page
    cache; its inactive part is subtracted, because it is reclaimable. ``root`` contains ``proc``
    and ``sys``.
    """
    # Lines look like "MemAvailable:   24576 kB".
    host = {
        name: 1024 * int(value.split()[0])
        for name, value in (
            line.split(":") for line in (root / "proc/meminfo").read_text().splitlines()
        )
    }
    left = [_left(group, host["MemTotal"]) for group in control_groups("memory", root)]
    return max(0, min([host["MemAvailable"], *(room for room in left if room is not None)]))


def _left(group: ControlGroup, total: int) -> int | None:
    """Bytes that a cgroup's limit still allows; ``None`` if it has no limit."""
    limit_name, used_name, reclaimable_name = _FILES[group.version]
    limit, used = group.number(limit_name), group.number(used_name)
    # Version 1 encodes "no limit" as a number larger than any machine's memory.
    if limit is None or used is None or limit > total:
        return None
    lines = (group.text("memory.stat") or "").splitlines()
    reclaimable = (int(line.split()[1]) for line in lines if line.split()[0] == reclaimable_name)
    return limit - used + next(reclaimable, 0)
