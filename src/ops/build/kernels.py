"""Builds, loads and installs this process's CPU kernels, at once or in the background.

`python -m src.ops.build` builds at installation time.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from pathlib import Path

from src.ops import OPS
from src.ops.build.cache_root import cache_root, remove_at_the_end
from src.ops.build.compilers import BuildError, compilers
from src.ops.build.kernel_cache import NO_COMPILER, KernelCache
from src.ops.build.levels import LEVELS, Level, cpu_flags, fastest_level
from src.ops.declaration import Kernel
from src.ops.projections import rounding
from src.ops.runtime.kernel_library import KernelLibrary

_log = logging.getLogger(__name__)


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
    ----------
    wait
        Whether to wait for a running build.
    head_start
        Seconds to wait before compilers start, so that other work goes first; the wait ends as soon
        as a caller waits for the build. 0 also ends the head start of an earlier call. None leaves
        it as it is.

    Returns
    -------
    `kernel_status` on return.
    """
    with _state.lock:
        if _state.status == "reference" and _state.thread is None and not _state.failed:
            cache = KernelCache(cache_root())
            loaded = cache.load()
            if loaded is not None:
                _install(*loaded)
            elif cache.compiler is None:
                # Known at once, so that no weights are packed for kernels that never come.
                _give_up(BuildError(NO_COMPILER))
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
    for op in OPS:
        # A kernel is an attribute by its op's name; the others' references serve on the CPU.
        run = getattr(library, op.name, None)
        if run is not None:
            op.install_cpu(Kernel(name, run))
    rounding.install_cpu(library.quantize)
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
                remove_at_the_end(Path(private))
                cache = KernelCache(Path(private))
                loaded = cache.build()
        _state.builds += bool(cache.compilations)
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
