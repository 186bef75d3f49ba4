"""CPUs that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from src.core.cpus import usable_cpus
from tests.core.cgroup_trees import HYBRID, V1, V2, make_tree

QUOTA = "cpu.cfs_quota_us"
PERIOD = "cpu.cfs_period_us"
SERVICE = "/system.slice/slipstream.service"


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ("version", "files", "most"),
    [
        (V2, {}, 64),
        (V2, {"cpu.max": "max 100000\n"}, 64),
        (V2, {"cpu.max": "200000 100000\n"}, 2),
        (V2, {"cpu.max": "250000 100000\n"}, 3),
        (V2, {"cpu.max": "1000 100000\n"}, 1),
        (V2, {"cpu.max": "nonsense\n"}, 64),
        (V2, {"cpu.max": "100000 0\n"}, 64),
        (V1, {f"cpu,cpuacct/{QUOTA}": "-1\n", f"cpu,cpuacct/{PERIOD}": "100000\n"}, 64),
        (V1, {f"cpu,cpuacct/{QUOTA}": "400000\n", f"cpu,cpuacct/{PERIOD}": "100000\n"}, 4),
        (V1, {f"cpu,cpuacct/{QUOTA}": "400000\n"}, 64),
        (HYBRID, {f"cpu,cpuacct/{QUOTA}": "400000\n", f"cpu,cpuacct/{PERIOD}": "100000\n"}, 4),
    ],
)
def test_a_containers_share_of_time_counts(
    version: str, files: dict[str, str], most: int, tmp_path: Path
) -> None:
    assert usable_cpus(make_tree(tmp_path, version, files)) == most


@pytest.mark.parametrize(
    ("own", "slice_", "most"),
    [("300000", "max", 3), ("max", "500000", 5), ("300000", "200000", 2), ("max", "max", 64)],
)
def test_a_services_own_share_counts_and_those_around_it(
    own: str, slice_: str, most: int, tmp_path: Path
) -> None:
    files = {
        f"{SERVICE[1:]}/cpu.max": f"{own} 100000\n",
        "system.slice/cpu.max": f"{slice_} 100000\n",
        "system.slice/other.service/cpu.max": "100000 100000\n",
    }
    assert usable_cpus(make_tree(tmp_path, V2, files, own=SERVICE)) == most


def test_so_they_do_in_version_1(tmp_path: Path) -> None:
    files = {
        f"cpu,cpuacct/{group}/{name}": text
        for group, quota in (("system.slice", "700000"), (SERVICE[1:], "-1"))
        for name, text in ((QUOTA, quota), (PERIOD, "100000"))
    }
    assert usable_cpus(make_tree(tmp_path, V1, files, own=SERVICE)) == 7


def test_a_container_sees_its_own_group_as_the_first(tmp_path: Path) -> None:
    files = {f"cpu,cpuacct/{QUOTA}": "200000\n", f"cpu,cpuacct/{PERIOD}": "100000\n"}
    tree = make_tree(tmp_path / "a", V1, files, own="/docker/abc", first="/docker/abc")
    assert usable_cpus(tree) == 2
    # With a group in that, which it has made itself.
    files["cpu,cpuacct/mine/" + QUOTA], files["cpu,cpuacct/mine/" + PERIOD] = "100000", "100000"
    tree = make_tree(tmp_path / "b", V1, files, own="/docker/abc/mine", first="/docker/abc")
    assert usable_cpus(tree) == 1
    # A path that leads out of what it sees says nothing.
    tree = make_tree(tmp_path / "c", V1, files, own="/../elsewhere", first="/docker/abc")
    assert usable_cpus(tree) == 2


def test_without_cgroups_all_cpus_count(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 64


def test_no_more_than_it_may_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5}, raising=False)
    assert usable_cpus(make_tree(tmp_path, V2, {"cpu.max": "900000 100000\n"})) == 2
