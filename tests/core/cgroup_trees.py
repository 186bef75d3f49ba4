"""A /proc and a /sys/fs/cgroup of a test's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V1, V2, HYBRID = "v1", "v2", "hybrid"

_MOUNT_OF_V2 = "30 23 0:26 {first} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
_MOUNTS_OF_V1 = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755",
    "32 31 0:29 {first} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct",
    "35 31 0:32 {first} /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory",
)
_MOUNT_OF_UNIFIED = "41 31 0:38 {first} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
_MOUNTS = {V1: _MOUNTS_OF_V1, V2: (_MOUNT_OF_V2,), HYBRID: (*_MOUNTS_OF_V1, _MOUNT_OF_UNIFIED)}
_GROUPS = {
    V1: "9:memory:{own}\n4:cpu,cpuacct:{own}\n1:name=systemd:{own}\n",
    V2: "0::{own}\n",
    HYBRID: "9:memory:{own}\n4:cpu,cpuacct:{own}\n0::{own}\n",
}


def make_tree(
    root: Path,
    version: str,
    files: Mapping[str, str],
    *,
    own: str = "/",
    first: str = "/",
    meminfo: str = "",
) -> Path:
    """Write one under ``root``, which it returns.

    ``files`` are below ``/sys/fs/cgroup``, ``own`` is the process's group and ``first`` the one
    that is mounted, both as the kernel names them.
    """
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    texts["proc/self/cgroup"] = _GROUPS[version].format(own=own)
    lines = ["22 1 0:20 / / rw - overlay overlay rw", *_MOUNTS[version]]
    texts["proc/self/mountinfo"] = "\n".join(lines).format(first=first) + "\n"
    texts["proc/meminfo"] = meminfo
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
