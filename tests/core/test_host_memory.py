"""Memory that a process may still take, in MiB: the machine has 8000, of which 5000 are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.core.config import MIB
from src.core.host_memory import available_memory
from tests.core.cgroup_trees import HYBRID, V1, V2, make_tree

MEMINFO = f"MemTotal:       {8000 * 1024} kB\nMemAvailable:   {5000 * 1024} kB\nHugePages: 0\n"
SERVICE = "/system.slice/slipstream.service"


def left(root: Path, version: str, files: dict[str, str], **groups: str) -> float:
    return available_memory(make_tree(root, version, files, meminfo=MEMINFO, **groups)) / MIB


def of_group(group: str, limit: int | str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{group}memory.max": limit if isinstance(limit, str) else f"{limit * MIB}\n",
        f"{group}memory.current": f"{used * MIB}\n",
        f"{group}memory.stat": f"anon 5\ninactive_anon 7\ninactive_file {inactive * MIB}\nslab 3\n",
    }


def test_it_is_no_more_than_the_machine_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_memory() < total


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "free"),
    [
        ("max", 900, 0, 5000),
        (1000, 900, 0, 100),
        (1000, 900, 700, 800),  # page cache that nobody uses is as good as free
        (6000, 100, 50, 5000),
        (1000, 1200, 100, 0),
    ],
)
def test_a_container_of_version_2(
    tmp_path: Path, limit: int | str, used: int, inactive: int, free: int
) -> None:
    assert left(tmp_path, V2, of_group("", limit, used, inactive)) == free


@pytest.mark.parametrize("version", [V1, HYBRID])
@pytest.mark.parametrize(
    ("limit", "free"), [(1000 * MIB, 300), (9223372036854771712, 5000), (8001 * MIB, 5000)]
)
def test_a_container_of_version_1(tmp_path: Path, version: str, limit: int, free: int) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{limit}\n",
        "memory/memory.usage_in_bytes": f"{900 * MIB}\n",
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {200 * MIB}\n",
    }
    assert left(tmp_path, version, files) == free


@pytest.mark.parametrize(
    ("own", "around", "free"),
    [
        ((2000, 500), ("max", 4000), 1500),
        ((2000, 500), (4500, 4000), 500),  # what others take of the slice is gone
        (("max", 500), (4500, 4000), 500),
        (("max", 500), ("max", 4000), 5000),
    ],
)
def test_the_least_of_a_service_and_what_is_around_it_counts(
    tmp_path: Path, own: tuple[int | str, int], around: tuple[int | str, int], free: int
) -> None:
    files = of_group("system.slice/", *around) | of_group(f"{SERVICE[1:]}/", *own)
    files |= of_group("system.slice/other.service/", 10, 10)
    assert left(tmp_path, V2, files, own=SERVICE) == free


def test_without_statistics_or_cgroups(tmp_path: Path) -> None:
    files = {"memory.max": str(1000 * MIB), "memory.current": str(900 * MIB)}
    assert left(tmp_path / "a", V2, files) == 100
    assert left(tmp_path / "b", V2, {}) == 5000
    (tmp_path / "c/proc").mkdir(parents=True)
    (tmp_path / "c/proc/meminfo").write_text(MEMINFO)
    assert available_memory(tmp_path / "c") == 5000 * MIB
