"""The cache of compiled CPU kernels, which processes share.

Each instruction set level is a library of its own. (If two levels were in one file, the linker
could merge their inline functions and put AVX-512 instructions into the portable level.) After the
build, the fastest level that the CPU supports is compared with the portable one in a separate
process. A level that fails or crashes there is never used, and the next slower one is tried. A
manifest, written last, names the level that passed, and which ways of multiplying were the fastest
here (`ways`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from src.ops.build import ways
from src.ops.build.compilers import BuildError, compilers, was_killed
from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.build.level_check import KILLED, PASSED, check
from src.ops.build.levels import LEVELS, Level, cpu_flags, cpu_model
from src.ops.build.objects import Objects, niced
from src.ops.build.prebuilt import Prebuilt
from src.ops.build.scratch import locked, scratch_in
from src.ops.build.timed_calls import timed_calls
from src.ops.build.units import (
    FLAGS,
    LINK_FLAGS,
    SAME_FOR_EVERY_LEVEL,
    SOURCES,
    digest,
    further_flags,
    units_of,
)
from src.ops.runtime.kernel_library import KernelLibrary, UnusableLibraryError

_log = logging.getLogger(__name__)

_NOT_MEASURED: Final = (
    "which kernels multiply quantized weights fastest was not measured (%s); a fixed table serves"
)
_COMPILE_TIMEOUT = 300.0  # seconds, of a unit
_KEPT_BUILDS: Final = 16
_KEPT_SECONDS: Final = 7 * 24 * 3600.0

NO_COMPILER: Final = "no C++ compiler that can be run (install g++ or set CXX)"


class KernelCache:
    """The cache directory of one combination of sources, flags, CPU and compiler.

    Layout: `<root>/cpu-kernels/<sources, flags, CPU's features>/<compiler, CPU's
    model>/{manifest.json,*.so}`. Without a compiler, the build of any compiler for these sources
    and features is used. Which way is the fastest was measured on a model of CPU: what was built on
    another model serves with the fixed table.
    """

    def __init__(self, root: Path) -> None:
        flags = cpu_flags()
        sources = sorted(SOURCES.rglob("*.cpp")) + sorted(SOURCES.rglob("*.h"))
        self.levels = [level for level in LEVELS if level.needs <= flags]
        code = (
            *(path.read_bytes() for path in sources),
            # `-Werror` does not change the libraries that do compile.
            repr(
                (
                    [level.flags for level in LEVELS],
                    *(FLAGS, LINK_FLAGS, sorted(SAME_FOR_EVERY_LEVEL)),
                    [flag for flag in further_flags() if flag != "-Werror"],
                )
            ).encode(),
        )
        machine = f"{platform.system()} {platform.machine()}"
        self._machine = " ".join((machine, *sorted(flags)))
        self._all = root / "cpu-kernels"
        self.base = self._all / digest(*code, self._machine.encode())
        self._model = cpu_model()
        self.prebuilt = Prebuilt(digest(*code, machine.encode()))
        self.compilations = 0
        self.compiler = cpp_compiler()

    def load(self) -> tuple[str, KernelLibrary] | None:
        """The fastest level that passed, from the cache only; None if nothing there is usable."""
        for directory in [self.directory()] if self.compiler else self._of_any_compiler():
            try:
                loaded = self._load_from(directory)
                with contextlib.suppress(OSError):
                    os.utime(self.base)  # it is in use
                return loaded
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, UnusableLibraryError) as error:
                _log.warning("CPU kernels in the cache are unusable (%s)", error)
        return None

    def build(self) -> tuple[str, KernelLibrary]:
        """Compile, check and load. Only one process does the work; others wait for it.

        Raises
        ------
        BuildError
            There is no compiler, or it fails on the portable level.
        """
        directory = self.directory()
        with locked(directory):
            if (loaded := self.load()) is not None:
                return loaded
            with scratch_in(directory) as scratch:
                # Not by the manifest: it is not written if a check was killed.
                loaded = self._build_into(directory, scratch)
            self._forget_old_builds()
            return loaded

    def build_all(self, optimization: str | None = None) -> dict[str, Path]:
        """The libraries of all levels by name, slowest first; for tests of every level.

        A level that the compiler does not support is left out.

        Parameters
        ----------
        optimization
            Replaces the compiler's flag for it in levels that serve nobody here.

        Raises
        ------
        BuildError
            As for `build`, or a level fails its check.
        """
        serving, _ = self.build()
        directory = self.directory()
        files = {
            level.name: directory
            / f"{level.name}{'' if level.name in ('portable', serving) else optimization or ''}.so"
            for level in self.levels
        }
        with locked(directory), scratch_in(directory) as scratch:
            missing = [level for level in self.levels if not files[level.name].exists()]
            missing = [level for level in missing if self.knows(level)]
            outputs, report = self.compile(scratch, missing, optimization=optimization)
            for level in missing:
                if output := outputs.get(level.name):
                    report[level.name] = check(files["portable"], output, level.number)
                    if report[level.name] == PASSED:
                        os.replace(output, files[level.name])
        if failed := {name: verdict for name, verdict in report.items() if verdict != PASSED}:
            raise BuildError(f"levels that this CPU and compiler have do not pass: {failed}")
        return {name: path for name, path in files.items() if path.exists()}

    @property
    def is_prebuilt(self) -> bool:
        """Whether `build` would find what it compiles."""
        return all(self.prebuilt.has(level.name) for level in (self.levels[0], self.levels[-1]))

    def knows(self, level: Level) -> bool:
        """Whether the compiler supports a level's flags."""
        assert self.compiler is not None
        command = [*self.compiler[0], *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]
        process = compilers.start(command)
        compilers.wait(process, _COMPILE_TIMEOUT)
        return process.returncode == 0

    def directory(self) -> Path:
        """The directory of this compiler's build, which may not exist yet.

        Raises
        ------
        BuildError
            There is no compiler.
        """
        if self.compiler is None:
            raise BuildError(NO_COMPILER)
        # Objects do not depend on the model: for another one they are linked, checked and measured.
        return self.base / digest(repr(self.compiler).encode(), self._model.encode())

    def _of_any_compiler(self) -> list[Path]:
        """Directories of builds for this CPU's features; first those of its model."""

        def is_of_another_model(directory: Path) -> bool:
            try:
                return self._is_elsewhere(json.loads((directory / "manifest.json").read_text()))
            except (OSError, ValueError):
                return True  # `load` says what is wrong with it

        return sorted(sorted(self.base.glob("*/")), key=is_of_another_model)

    def _is_elsewhere(self, manifest: dict[str, Any]) -> bool:
        return bool(manifest.get("model") != self._model)

    def _load_from(self, directory: Path) -> tuple[str, KernelLibrary]:
        manifest = json.loads((directory / "manifest.json").read_text())
        path = directory / manifest["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest["sha256"]:
            raise UnusableLibraryError(f"{path}: changed since it was built")
        library = KernelLibrary(path)
        # Nothing was measured by a process without tiles either, which had nothing to choose.
        if self._is_elsewhere(manifest) and ways.has_several(library.ways):
            where = manifest.get("model")
            _log.warning(_NOT_MEASURED, f"these CPU kernels are from another CPU: {where}")
        elif manifest["ways"] or not ways.has_several(library.ways):
            ways.apply(library.ways, [ways.Choice(**choice) for choice in manifest["ways"] or ()])
            library.has_measured_ways = True
        else:
            _log.warning(_NOT_MEASURED, "when these CPU kernels were built")
        return str(manifest["level"]), library

    def _build_into(self, directory: Path, scratch: Path) -> tuple[str, KernelLibrary]:
        """Check levels from the fastest on; returns the first that passes, and its library."""
        tried = [self.levels[0], self.levels[-1]]
        outputs, report = self.compile(scratch, tried)
        if "portable" not in outputs:
            raise BuildError("the C++ compiler fails on the portable level, see the warning above")
        for level in reversed(self.levels):
            if level not in tried:
                more, failed = self.compile(scratch, [level])
                outputs, report = outputs | more, report | failed
            if level.name in outputs:
                report[level.name] = check(outputs["portable"], outputs[level.name], level.number)
            if report[level.name] == PASSED:
                break
        else:
            raise BuildError(f"no instruction set level passed its check: {report}")
        _log.info("CPU kernels built in %s: %s", directory, report)
        for name, output in outputs.items():
            if name in ("portable", level.name):
                os.replace(output, directory / f"{name}.so")
        best = directory / f"{level.name}.so"
        try:
            library = KernelLibrary(best)
        except UnusableLibraryError as error:
            raise BuildError(f"the library just built cannot be loaded: {error}") from error
        choices = self._measured(library)
        library.has_measured_ways = choices is not None
        if KILLED in report.values():
            # A manifest would keep this level from being tried again by the next start.
            _log.warning("CPU kernels serve this process alone, the next builds anew: %s", report)
            return level.name, library
        manifest = scratch / "manifest.json"
        manifest.write_text(
            json.dumps(
                {
                    "level": level.name,
                    "file": best.name,
                    "sha256": hashlib.sha256(best.read_bytes()).hexdigest(),
                    "checks": report,
                    "ways": choices,
                    "compiler": self.compiler,
                    "model": self._model,
                },
                indent=1,
            )
        )
        os.replace(manifest, directory / "manifest.json")
        return level.name, library

    @staticmethod
    def _measured(library: KernelLibrary) -> list[dict[str, Any]] | None:
        """Let a library take the ways that are the fastest here, and return them for a manifest.

        None: they could not be measured, so the table in ways.h stays.
        """
        begin = time.perf_counter()
        try:
            choices = ways.measure(library.ways, timed_calls(library.streamed_linear))
        except (
            RuntimeError,
            ValueError,
            MemoryError,
        ) as error:  # a kernel's, or of a want of memory
            _log.warning(_NOT_MEASURED, error)
            return None
        ways.apply(library.ways, choices)
        if choices:
            _log.info(
                "measured in %.1f s which kernels multiply quantized weights fastest: %s",
                time.perf_counter() - begin,
                "; ".join(ways.told(library.ways)),
            )
        return [dataclasses.asdict(choice) for choice in choices]

    def compile(
        self,
        scratch: Path,
        levels: Sequence[Level],
        seconds: float | None = None,
        optimization: str | None = None,
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """Compile levels: file by level, and for levels that failed, the reason.

        Those that were compiled beforehand are copied.

        Parameters
        ----------
        scratch
            Where libraries and objects are written.
        seconds
            For one unit. None: so much that only a hanging compiler takes longer.
        optimization
            Replaces the compiler's flag for it.
        """
        assert self.compiler is not None
        seconds = _COMPILE_TIMEOUT if seconds is None else seconds
        outputs = {level.name: scratch / f"{level.name}.so" for level in levels}
        wanted = {
            level.name: level
            for level in levels
            if not self.prebuilt.copy(level.name, outputs[level.name])
        }
        if not wanted:
            return outputs, {}
        self.compilations += len(wanted)
        kept = Objects(self._all / "objects", self.compiler, self._machine)
        units = {name: units_of(level, optimization) for name, level in wanted.items()}
        objects, failed = kept.make(units, scratch, seconds)
        for name, files in objects.items():
            if verdict := self._link(wanted[name], files, outputs[name], seconds):
                failed[name] = verdict
        for name in failed:
            del outputs[name]
        return outputs, failed

    def _link(
        self, level: Level, objects: Sequence[Path], output: Path, seconds: float
    ) -> str | None:
        """Why a level's objects do not make a library; None if they do."""
        assert self.compiler is not None
        command = [*self.compiler[0], *LINK_FLAGS, *level.flags, *further_flags()]
        process = compilers.start(niced([*command, *map(str, objects), "-o", str(output)]))
        errors = compilers.wait(process, seconds)
        if process.returncode == 0:
            return None
        verdict = KILLED if was_killed(process, errors) else "cannot be linked"
        _log.warning("the %s level (%s): %s", level.name, verdict, errors[-2000:])
        return verdict

    def _forget_old_builds(self) -> None:
        """Remove builds of other sources that nobody has used for long, if there are many."""
        builds = []
        for path in self._all.glob("*/"):
            # Another process may remove it at the same time.
            with contextlib.suppress(OSError):
                if path.name != "objects":
                    builds.append((path.stat().st_mtime, path))
        for used, path in sorted(builds, reverse=True)[_KEPT_BUILDS:]:
            if time.time() - used > _KEPT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
