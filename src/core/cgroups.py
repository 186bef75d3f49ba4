"""The cgroups whose limits apply to this process: its own and all its ancestors.

cgroups(7) describes the files: https://man7.org/linux/man-pages/man7/cgroups.7.html
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple

ROOT: Final = Path("/")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A cgroup's directory, and the version of its interface."""

    directory: Path
    version: Literal[1, 2]

    def text(self, name: str) -> str | None:
        """Content of one of its files; ``None`` if there is no such file."""
        try:
            return (self.directory / name).read_text().strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The number in one of its files; ``None`` if there is no file, no number or no limit."""
        text = self.text(name)
        try:
            return None if text is None or text == "max" else int(text)
        except ValueError:
            return None


class _Mount(NamedTuple):
    """A mounted hierarchy: ``point`` is the mount point, ``first`` the group at its root."""

    version: Literal[1, 2]
    first: PurePosixPath
    point: PurePosixPath


def control_groups(controller: str, root: Path = ROOT) -> list[ControlGroup]:
    """The groups whose limits of a controller apply to this process, its own first.

    A group's limit applies to all groups in it, so the smallest limit counts. Groups that are not
    visible inside a container are missing. Without cgroups the list is empty.

    Parameters
    ----------
    controller
        For example ``cpu`` or ``memory``.
    root
        The directory that contains ``proc`` and ``sys/fs/cgroup``.
    """
    own = _own_groups(controller, root)
    found: list[ControlGroup] = []
    for mount in _mounts(controller, root):
        parts = _below(own.get(mount.version), mount.first)
        point = root / mount.point.relative_to("/")
        for depth in range(len(parts), -1, -1):
            directory = point.joinpath(*parts[:depth])
            if directory.is_dir():
                found.append(ControlGroup(directory, mount.version))
    return found


def _own_groups(controller: str, root: Path) -> dict[int, PurePosixPath]:
    """Version -> path of this process's group in the hierarchy that has the controller.

    Lines look like ``4:cpu,cpuacct:/a/b``, or ``0::/a/b`` in version 2.
    """
    own: dict[int, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own[1] = PurePosixPath(path)
        elif number == "0" and not controllers:
            own[2] = PurePosixPath(path)
    return own


def _mounts(controller: str, root: Path) -> list[_Mount]:
    """The mounted hierarchies of a controller, and any hierarchy of version 2.

    Lines look like ``32 31 0:29 FIRST POINT rw - cgroup cgroup rw,cpu``, with any number of fields
    before the dash.
    """
    found: dict[tuple[int, PurePosixPath], _Mount] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version: Literal[1, 2] = 2
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            version = 1
        else:
            continue
        first, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
        if first.is_absolute() and point.is_absolute():
            # A second mount of the same hierarchy shows the same groups.
            found.setdefault((version, first), _Mount(version, first, point))
    return list(found.values())


def _below(path: PurePosixPath | None, first: PurePosixPath) -> tuple[str, ...]:
    """The path from a mount's first group to ``path``; empty if ``path`` is not below it.

    In a container without a cgroup namespace ``path`` is the host's, and the mount's first group
    may be the process's own.
    """
    if path is None or ".." in path.parts or not path.is_relative_to(first):
        return ()
    return path.relative_to(first).parts


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
