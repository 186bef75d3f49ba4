"""The cache of compiled code between starts.

Layout: ``<root>/regions/<key of the job>/<compiler>/{manifest.json,<digest>.so,<digest>.cpp}``. The
manifest is written last and names the other files by digest. So a reader sees a complete artifact
or none, and a library that a process has loaded is never overwritten. Without a C++ compiler, the
artifact of any compiler is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.build.scratch import make_directory

if TYPE_CHECKING:
    from src.compile.job import Job

_log = logging.getLogger(__name__)

# Seconds. Shorter than a compiler's total time, so that a lock that stays held gets reported.
_LOCK_TIMEOUT: Final = 600.0
_LOCK_POLL: Final = 0.1


def use_artifact_cache(directory: Path) -> None:
    """Keep Inductor's code, graphs and C++ objects, and Triton's kernels, under ``directory``.

    Both key their entries by code, options, versions and device, write them atomically and rebuild
    entries that they cannot read, so processes may share the directory. A directory that the user
    set by Inductor's or Triton's own variables is kept. Call this before the process, or one that
    it starts, compiles anything.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(directory / "triton"))


@dataclass(frozen=True)
class Artifact:
    """One compiled function on disk.

    Attributes
    ----------
    shared_object
        A library with AOTInductor's C interface.
    source
        The generated code that calls the kernels.
    result
        ``module:name`` of the named tuple that the function returns, None for a single tensor.
    has_own_tensors
        Whether `with_library_tensors` rewrote the library.
    """

    shared_object: Path
    source: Path
    result: str | None
    has_own_tensors: bool


class ArtifactCache:
    """Artifacts by job and C++ compiler; processes share them."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "regions"
        compiler = cpp_compiler()
        self._has_compiler = compiler is not None
        self._compiler = hashlib.sha256(repr(compiler).encode()).hexdigest()[:16]

    def find(self, job: Job) -> Artifact | None:
        """A complete and unchanged artifact of ``job``; None if there is none."""
        found = (self._read(directory) for directory in self._readable(job))
        return next((artifact for artifact in found if artifact is not None), None)

    def _readable(self, job: Job) -> list[Path]:
        directory = self._directory / job.key
        return [directory / self._compiler] if self._has_compiler else sorted(directory.glob("*/"))

    @staticmethod
    def _read(directory: Path) -> Artifact | None:
        try:
            manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
            library = directory / manifest["library"]
            if hashlib.sha256(library.read_bytes()).hexdigest() != manifest["sha256"]:
                raise ValueError("the library changed since it was built")
            return Artifact(
                library,
                directory / manifest["source"],
                manifest["result"],
                manifest["has_own_tensors"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("compiled code in %s is unusable (%s)", directory, error)
            return None

    def discard(self, job: Job) -> None:
        """Remove the artifact of ``job``, so that it is built again."""
        for directory in self._readable(job):
            with contextlib.suppress(OSError):
                (directory / "manifest.json").unlink()

    @contextlib.contextmanager
    def locked(self, job: Job) -> Iterator[Path]:
        """The directory of ``job`` and this compiler, locked for writing by this process.

        The system releases a lock when its holder ends, so none goes stale.

        Raises
        ------
        TimeoutError
            Another process has held the lock for ten minutes.
        """
        directory = self._directory / job.key / self._compiler
        make_directory(directory)
        with open(directory / "lock", "w") as lock:
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while not _lock(lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory}: another process does not end compiling")
                time.sleep(_LOCK_POLL)
            yield directory

    @staticmethod
    def publish(directory: Path, made: Artifact) -> None:
        """Move an artifact's files to where readers find them; on the same file system."""
        digest = hashlib.sha256(made.shared_object.read_bytes()).hexdigest()
        names = {"library": f"{digest[:16]}.so", "source": f"{digest[:16]}.cpp"}
        manifest = {
            **names,
            "sha256": digest,
            "result": made.result,
            "has_own_tensors": made.has_own_tensors,
        }
        os.replace(made.shared_object, directory / names["library"])
        os.replace(made.source, directory / names["source"])
        written = made.shared_object.with_name("manifest.json")
        written.write_text(json.dumps(manifest, indent=1))
        os.replace(written, directory / "manifest.json")


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
