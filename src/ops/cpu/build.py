"""Building the CPU kernels: compiled once into a cache that processes share.

Each instruction set level is a library of its own. (If two levels were in one file, the linker
could merge their inline functions and put AVX-512 instructions into the portable level.) After the
build, the fastest level that the CPU supports is compared with the portable one in a separate
process. A level that fails or crashes there is never used, and the next slower one is tried. A
manifest, written last, names the level that passed.

`python -m src.ops.cpu.build` builds at installation time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from src.core.process_end import at_process_end
from src.ops.adapt import ADAPT
from src.ops.causal_convolution import CAUSAL_CONVOLUTION
from src.ops.cpu.compilers import BuildError, compilers, was_killed
from src.ops.cpu.cpp_compiler import cpp_compiler
from src.ops.cpu.kernel_library import KernelLibrary, UnusableLibraryError
from src.ops.cpu.level_check import KILLED, PASSED, check
from src.ops.cpu.levels import LEVELS, Level, cpu_flags, fastest_level
from src.ops.cpu.prebuilt import Prebuilt
from src.ops.cpu.scratch import is_ours, make_directory, scratch_in
from src.ops.declaration import Kernel
from src.ops.experts import EXPERTS
from src.ops.gumbel_argmax import GUMBEL_ARGMAX
from src.ops.latent_attention import LATENT_ATTENTION
from src.ops.linear import LINEAR
from src.ops.linear_recurrence import LINEAR_RECURRENCE
from src.ops.paged_attention import PAGED_ATTENTION

_log = logging.getLogger(__name__)

_COMPILE_TIMEOUT = 300.0  # seconds

_SOURCES = Path(__file__).parent
_UNITS = (
    "adapt.cpp",
    "attention.cpp",
    "compiled.cpp",
    "experts.cpp",
    "gumbel.cpp",
    "latent.cpp",
    "linear.cpp",
    "loops.cpp",
    "masks.cpp",
    "pool.cpp",
    "quantize.cpp",
    "recurrence.cpp",
    "self_check.cpp",
    "sockets.cpp",
    "step.cpp",
    "tensors.cpp",
)
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    # The ABI of vectors does not matter: they are only passed between functions of one library.
    "-Wno-psabi",
    # GCC's own AVX-512 header leaves unused operands undefined, and warns about them at inlining.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

_NO_COMPILER = "no C++ compiler that can be run (install g++ or set CXX)"


def further_flags() -> list[str]:
    """Further compiler flags from `SLIPSTREAM_KERNEL_FLAGS`, for tests and sanitizers.

    Tests add `-Werror`. Otherwise warnings are shown only if the compiler fails: a user's compiler
    may be newer than the tested ones and warn about correct code.
    """
    return shlex.split(os.environ.get("SLIPSTREAM_KERNEL_FLAGS", ""))


def cache_root() -> Path:
    """The cache of compiled code: `chosen_cache_root`, if only this user and root can write to it.

    Libraries in the cache are executed. So a directory that other users can write to is not used:
    a warning is logged, and an empty directory is made that is removed when this process ends.
    """
    root = chosen_cache_root()
    return root if is_ours(root) else _private_root(root)


def chosen_cache_root() -> Path:
    """`SLIPSTREAM_CACHE_DIR`, else `$XDG_CACHE_HOME/slipstream`, else `~/.cache/slipstream`."""
    if chosen := os.environ.get("SLIPSTREAM_CACHE_DIR"):
        root = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        root = (Path(base) if base else Path.home() / ".cache") / "slipstream"
    # Absolute, because compilers run in another directory.
    return root.absolute()


@functools.cache
def _private_root(root: Path) -> Path:
    private = Path(tempfile.mkdtemp(prefix="slipstream-"))
    _remove_at_the_end(private)
    _log.warning(
        "others may write to the cache %s, so nothing is loaded from it, and every start compiles: "
        "make it yours alone (chown, chmod go-w)",
        root,
    )
    return private


def _remove_at_the_end(directory: Path) -> None:
    remove = functools.partial(shutil.rmtree, directory, ignore_errors=True)
    at_process_end(remove, after_others=True)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


class KernelCache:
    """The cache directory of one combination of sources, flags, CPU and compiler.

    Layout: `<root>/cpu-kernels/<sources, flags, CPU>/<compiler>/{manifest.json,*.so}`. Without a
    compiler, the build of any compiler for these sources and this CPU is used.
    """

    def __init__(self, root: Path) -> None:
        flags = cpu_flags()
        sources = sorted(_SOURCES.glob("*.cpp")) + sorted(_SOURCES.glob("*.h"))
        self.levels = [level for level in LEVELS if level.needs <= flags]
        code = (
            *(path.read_bytes() for path in sources),
            # `-Werror` does not change the libraries that do compile.
            repr(
                (
                    [level.flags for level in LEVELS],
                    _FLAGS + [flag for flag in further_flags() if flag != "-Werror"],
                )
            ).encode(),
        )
        machine = f"{platform.system()} {platform.machine()}"
        self.base = (
            root / "cpu-kernels" / _digest(*code, " ".join((machine, *sorted(flags))).encode())
        )
        self.prebuilt = Prebuilt(_digest(*code, machine.encode()))
        self.compilations = 0
        self.compiler = cpp_compiler()

    def load(self) -> tuple[str, KernelLibrary] | None:
        """The fastest level that passed, from the cache only; None if nothing there is usable."""
        directories = [self.directory()] if self.compiler else sorted(self.base.glob("*/"))
        for directory in directories:
            try:
                return self._load_from(directory)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, UnusableLibraryError) as error:
                _log.warning("CPU kernels in the cache are unusable (%s)", error)
        return None

    def build(self) -> tuple[str, KernelLibrary]:
        """Compile, check and load. Only one process does the work; others wait for it.

        Raises
            BuildError: There is no compiler, or it fails on the portable level.
        """
        directory = self.directory()
        with _locked(directory):
            if (loaded := self.load()) is not None:
                return loaded
            with scratch_in(directory) as scratch:
                level, file = self._build_into(directory, scratch)
            _state.builds += bool(self.compilations)
            try:
                # Not by the manifest: it is not written if a check was killed.
                return level, KernelLibrary(file)
            except UnusableLibraryError as error:
                raise BuildError(f"the library just built cannot be loaded: {error}") from error

    def build_all(self) -> dict[str, Path]:
        """The libraries of all levels by name, slowest first; for tests of every level.

        A level that the compiler does not support is left out.

        Raises
            BuildError: As for `build`, or a level fails its check.
        """
        self.build()
        directory = self.directory()
        files = {level.name: directory / f"{level.name}.so" for level in self.levels}
        with _locked(directory), scratch_in(directory) as scratch:
            missing = [level for level in self.levels if not files[level.name].exists()]
            missing = [level for level in missing if self.knows(level)]
            outputs, report = self.compile(scratch, missing)
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
            BuildError: There is no compiler.
        """
        if self.compiler is None:
            raise BuildError(_NO_COMPILER)
        return self.base / _digest(repr(self.compiler).encode())

    @staticmethod
    def _load_from(directory: Path) -> tuple[str, KernelLibrary]:
        manifest = json.loads((directory / "manifest.json").read_text())
        path = directory / manifest["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest["sha256"]:
            raise UnusableLibraryError(f"{path}: changed since it was built")
        return str(manifest["level"]), KernelLibrary(path)

    def _build_into(self, directory: Path, scratch: Path) -> tuple[str, Path]:
        """Check levels from the fastest on; returns the first that passes, and its file."""
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
        if KILLED in report.values():
            # A manifest would keep this level from being tried again by the next start.
            _log.warning("CPU kernels serve this process alone, the next builds anew: %s", report)
            return level.name, best
        manifest = scratch / "manifest.json"
        manifest.write_text(
            json.dumps(
                {
                    "level": level.name,
                    "file": best.name,
                    "sha256": hashlib.sha256(best.read_bytes()).hexdigest(),
                    "checks": report,
                    "compiler": self.compiler,
                },
                indent=1,
            )
        )
        os.replace(manifest, directory / "manifest.json")
        return level.name, best

    def compile(
        self, scratch: Path, levels: Sequence[Level], seconds: float = _COMPILE_TIMEOUT
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """Compile levels in parallel: file by level, and for levels that failed, the reason.

        Those that were compiled beforehand are copied.
        """
        assert self.compiler is not None
        nice = [shutil.which("nice") or "nice"] if shutil.which("nice") else []
        outputs = {level.name: scratch / f"{level.name}.so" for level in levels}
        running, failed = {}, {}
        for level in {level.name: level for level in levels}.values():
            if self.prebuilt.copy(level.name, outputs[level.name]):
                continue
            self.compilations += 1
            command = [*nice, *self.compiler[0], *_FLAGS, *level.flags, *further_flags()]
            command += [str(_SOURCES / unit) for unit in _UNITS] + ["-o", str(outputs[level.name])]
            running[level.name] = compilers.start(command)
        for name, process in running.items():
            errors = compilers.wait(process, seconds)
            if process.returncode != 0:
                failed[name] = KILLED if was_killed(process, errors) else "does not compile"
                _log.warning(
                    "C++ compiler failed on the %s level (%s): %s",
                    *(name, failed[name], errors[-2000:]),
                )
                del outputs[name]
        return outputs, failed


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """An exclusive lock between processes. It ends with its holder, so none goes stale."""
    make_directory(directory)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _State:
    """The kernels of this process: at most one build runs, and its outcome is kept."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.status = "reference"
        self.kernels: KernelLibrary | None = None
        self.thread: threading.Thread | None = None
        self.awaited = threading.Event()
        self.failed = False
        self.builds = 0


_state = _State()


def kernel_status() -> str:
    """What serves CPU calls now: "cpp-<name of the level>", or "reference"."""
    return _state.status


def kernel_library() -> KernelLibrary | None:
    """The library that serves CPU calls now; None if the references do."""
    return _state.kernels


def is_building() -> bool:
    """Whether a build is running."""
    return _state.thread is not None


def kernel_builds() -> int:
    """How often this process compiled the kernels because the cache did not have them."""
    return _state.builds


def is_compiling() -> bool:
    """Whether compilers of the kernels are running."""
    return compilers.are_running


def serving_level() -> Level | None:
    """The level that serves, or is expected to after the build; None if the references serve."""
    if is_building():
        return fastest_level(cpu_flags())
    name = kernel_status().removeprefix("cpp-")
    return next((level for level in LEVELS if level.name == name), None)


def takes_strips() -> bool:
    """Whether the kernels are faster with bfloat16 weights in strips."""
    level = serving_level()
    return level is not None and level.pairs_in_strips


def multiplies_bytes() -> bool:
    """Whether the kernels are faster with quantized weights and inputs rounded to 8 bits."""
    level = serving_level()
    return level is not None and level.multiplies_bytes


def ensure_built(wait: bool, head_start: float | None = None) -> str:
    """Bring in the compiled CPU kernels.

    Kernels in the cache are loaded at once (milliseconds). Otherwise a background thread builds
    them; the references serve meanwhile, and the compiled kernels take over when they are ready.
    Without a working compiler, one warning is logged and the references go on serving. Safe to call
    from any thread, any number of times.

    Parameters
        wait: Whether to wait for a running build.
        head_start: Seconds to wait before compilers start, so that other work goes first; the wait
            ends as soon as a caller waits for the build. 0 also ends the head start of an earlier
            call. None leaves it as it is.

    Returns
        [`kernel_status`][src.ops.cpu.build.kernel_status] on return.
    """
    with _state.lock:
        if _state.status == "reference" and _state.thread is None and not _state.failed:
            cache = KernelCache(cache_root())
            loaded = cache.load()
            if loaded is not None:
                _install(*loaded)
            elif cache.compiler is None:
                # Known at once, so that no weights are packed for kernels that never come.
                _give_up(BuildError(_NO_COMPILER))
            else:
                _state.thread = threading.Thread(
                    target=_build_and_install,
                    args=(cache, head_start or 0.0),
                    name="cpu-kernel-build",
                    daemon=True,
                )
                _state.thread.start()
        thread = _state.thread
    if wait or head_start == 0:
        _state.awaited.set()
    if wait and thread is not None:
        thread.join()
    return _state.status


def _install(level: str, library: KernelLibrary) -> None:
    name = f"cpp-{level}"
    PAGED_ATTENTION.install_cpu(Kernel(name, library.paged_attention))
    GUMBEL_ARGMAX.install_cpu(Kernel(name, library.gumbel_argmax))
    LINEAR.install_cpu(Kernel(name, library.streamed_linear))
    EXPERTS.install_cpu(Kernel(name, library.experts))
    LATENT_ATTENTION.install_cpu(Kernel(name, library.latent_attention))
    CAUSAL_CONVOLUTION.install_cpu(Kernel(name, library.causal_convolution))
    LINEAR_RECURRENCE.install_cpu(Kernel(name, library.linear_recurrence))
    ADAPT.install_cpu(Kernel(name, library.adapt))
    _state.kernels = library
    _state.status = name
    _log.info("CPU kernels: %s", name)


def _build_and_install(cache: KernelCache, head_start: float) -> None:
    try:
        if not cache.is_prebuilt:
            _state.awaited.wait(head_start)
        try:
            loaded = cache.build()
        except OSError as error:
            # The cache directory is not writable: build for this process only.
            _log.warning("kernel cache %s is not usable (%s)", cache.base, error)
            with tempfile.TemporaryDirectory(prefix="slipstream-") as private:
                _remove_at_the_end(Path(private))
                loaded = KernelCache(Path(private)).build()
        _install(*loaded)
    except Exception as error:
        # Any error: otherwise every caller that waits for kernels would start the build again.
        _give_up(error)
    finally:
        _state.thread = None


def _give_up(error: Exception) -> None:
    _state.failed = True
    _log.log(
        logging.DEBUG if compilers.closed else logging.WARNING,
        "no compiled CPU kernels, so slower torch references serve on the CPU: %s",
        error,
        exc_info=None if isinstance(error, (BuildError, OSError)) else error,
    )


def main() -> int:
    """Build now and print what will serve; fails if that is the reference."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    status = ensure_built(wait=True)
    sys.stdout.write(f"CPU kernels: {status} ({cache_root()})\n")
    return 0 if status != "reference" else 1


if __name__ == "__main__":
    sys.exit(main())
