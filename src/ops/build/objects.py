"""Compiles units into objects, several at a time, and keeps the objects by their content.

After a change of one source, only the units that include it are compiled again. The caller links
the objects. The objects that were used last are kept; the others go when there are too many bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from src.core.cpus import usable_cpus
from src.core.host_memory import available_memory
from src.ops.build.compilers import compilers, was_killed
from src.ops.build.level_check import KILLED
from src.ops.build.scratch import make_directory
from src.ops.build.units import Unit

_log = logging.getLogger(__name__)

_COMPILER_BYTES: Final = 1 << 30
"""Memory that a compiler may take for the largest unit."""
_KEPT_BYTES: Final = 256 << 20
"""Of all objects: some dozens of builds."""

DOES_NOT_COMPILE: Final = "does not compile"


class Objects:
    """The objects of one compiler.

    Parameters
    ----------
    directory
        Where objects are kept. Several compilers and processes may share it.
    compiler
        Its command and version.
    machine
        What else an object depends on, if the compiler looks at the machine.
    """

    def __init__(self, directory: Path, compiler: tuple[list[str], str], machine: str) -> None:
        self._directory = directory
        self._compiler = compiler
        self._machine = machine

    def make(
        self, wanted: Mapping[str, Sequence[Unit]], scratch: Path, seconds: float
    ) -> tuple[dict[str, list[Path]], dict[str, str]]:
        """The objects of libraries by the library's name, and for libraries that failed, why.

        Libraries that come first are compiled first. The objects are written to ``scratch``, where
        no other process removes them.

        Parameters
        ----------
        wanted
            The units of each library.
        scratch
            A directory of this process alone.
        seconds
            How long a unit may take.

        Raises
        ------
        BuildError
            This process is ending.
        OSError
            The directory cannot be written.
        """
        make_directory(self._directory)
        keys = {
            unit: unit.key(self._compiler, self._machine)
            for units in wanted.values()
            for unit in units
        }
        users: dict[str, list[str]] = {}
        for name, units in wanted.items():
            for unit in units:
                users.setdefault(keys[unit], []).append(name)
        missing = {
            key: unit for unit, key in keys.items() if not self._take(key, scratch / f"{key}.o")
        }
        failed = _Compilation(self._compiler[0], missing, users, scratch, seconds).run()
        for key in missing:
            if (made := scratch / f"{key}.o").exists():
                self._keep(key, made)
        if missing:
            self._forget_the_oldest()
        objects = {
            name: [scratch / f"{keys[unit]}.o" for unit in units]
            for name, units in wanted.items()
            if name not in failed
        }
        return objects, failed

    def _take(self, key: str, output: Path) -> bool:
        """Copy a kept object; False if there is none, or it is damaged."""
        for kept in self._directory.glob(f"{key}-*.o"):
            with contextlib.suppress(OSError):
                content = kept.read_bytes()
                if kept.name == _name(key, content):
                    output.write_bytes(content)
                    os.utime(kept)
                    return True
        return False

    def _keep(self, key: str, made: Path) -> None:
        content = made.read_bytes()
        half = self._directory / f"{key}.{os.getpid()}.half"
        half.write_bytes(content)
        half.chmod(0o644)
        os.replace(half, self._directory / _name(key, content))

    def _forget_the_oldest(self) -> None:
        files = []
        for path in self._directory.iterdir():
            # Another process may remove it at the same time.
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        room = _KEPT_BYTES
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)


def _name(key: str, content: bytes) -> str:
    """With a digest, so that a damaged object is noticed."""
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.o"


def compilers_at_once() -> int:
    """How many compilers this machine's processors and free memory suffice for, at least one."""
    try:
        room = available_memory() // _COMPILER_BYTES
    except (OSError, ValueError, KeyError):
        return usable_cpus()  # not Linux
    return max(1, min(usable_cpus(), room))


def niced(command: Iterable[str]) -> list[str]:
    """A command that leaves processors to whoever else wants them."""
    nice = shutil.which("nice")
    return [*([nice] if nice else []), *command]


class _Compilation:
    """Compiles units by a few threads. They are daemons: they must not outlive the process."""

    def __init__(
        self,
        compiler: list[str],
        units: Mapping[str, Unit],
        users: Mapping[str, list[str]],
        scratch: Path,
        seconds: float,
    ) -> None:
        self._compiler = compiler
        self._waiting = deque(units.items())
        self._users = users
        self._scratch = scratch
        self._seconds = seconds
        self._failed: dict[str, str] = {}
        self._error: Exception | None = None

    def run(self) -> dict[str, str]:
        """Why libraries failed, by name.

        Raises
        ------
        BuildError
            This process is ending.
        """
        count = min(compilers_at_once(), len(self._waiting))
        threads = [
            threading.Thread(target=self._work, name="cpu-kernel-unit", daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._failed

    def _work(self) -> None:
        while self._error is None:
            try:
                key, unit = self._waiting.popleft()
            except IndexError:
                return
            # Other units of a library that has failed already would be compiled in vain.
            if all(name in self._failed for name in self._users[key]):
                continue
            try:
                self._compile(key, unit)
            except Exception as error:
                self._error = error

    def _compile(self, key: str, unit: Unit) -> None:
        output = self._scratch / f"{key}.o"
        process = compilers.start(niced([*self._compiler, *unit.command(), "-o", str(output)]))
        errors = compilers.wait(process, self._seconds)
        if process.returncode == 0 and output.exists():
            return
        output.unlink(missing_ok=True)
        verdict = KILLED if was_killed(process, errors) else DOES_NOT_COMPILE
        names = self._users[key]
        self._failed.update(dict.fromkeys(names, verdict))
        _log.warning(
            "C++ compiler failed on %s of the %s level (%s): %s",
            *(unit.source.name, ", ".join(names), verdict, errors[-2000:]),
        )
