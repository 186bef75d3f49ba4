"""Compiles jobs in other processes, and loads their results from the cache.

The serving process imports no compiler and waits for its children in a thread, so a compiler can
neither block nor crash it. Concurrent starts share the work through the cache's locks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from src.compile.artifacts import ArtifactCache
from src.compile.job import Job
from src.compile.loaded import LoadedFunction
from src.compile.worker_setup import Setup
from src.core.cpus import usable_cpus
from src.core.process_end import at_process_end
from src.core.settings import CHECKOUT, PREFIX
from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.runtime.compiled import Caller, CompiledCodeError

_log = logging.getLogger(__name__)

# More workers need about a GiB of memory each, and save little time on four functions.
_MAX_WORKERS: Final = 2
_MESSAGE_CHARS: Final = 2000
# Seconds for all functions of a worker; usually it needs one or two minutes.
_TIMEOUT: Final = 900.0
_COMMAND: Final = (sys.executable, "-m", "src.compile.worker")


class CompilationError(Exception):
    """Compiled code is not available; the message says why."""


class CompilationClosedError(CompilationError):
    """The compilation was closed, so its results are no longer wanted."""


class Compilation:
    """The compilation of some jobs; it starts with the constructor.

    Parameters
    ----------
    root
        Of the caches; processes with the same root share the work.
    niceness
        Of the compilers, so that they yield to serving threads.
    head_start
        Seconds to wait before compilers start, if any are needed, so that other work goes first.
    """

    def __init__(
        self, jobs: Sequence[Job], root: Path, niceness: int = 10, head_start: float = 0.0
    ) -> None:
        self._jobs = list(jobs)
        self._niceness = niceness
        self._root = root
        self._cache = ArtifactCache(root)
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._closed = False
        self._is_awaited = False
        self.num_compiled = 0
        self._begun = threading.Event()
        self._not_begun: OSError | None = None
        self._timer = threading.Timer(head_start, self._begin)
        self._timer.daemon = True
        if head_start > 0 and self._missing():
            self._timer.start()
        else:
            self._begin()

    def load(self, caller: Caller) -> list[LoadedFunction]:
        """Wait for the workers, then load every job's function, in order. Blocks.

        Cached code that cannot be loaded is compiled once more.

        Raises
        ------
        CompilationError
            A worker failed, was killed or took too long, or its result cannot be loaded.
        """
        self._wait()
        try:
            return self._load(caller)
        except CompiledCodeError as error:
            _log.warning("compiled code is unusable and built again (%s)", error)
        for job in self._jobs:
            self._cache.discard(job)
        self._start()
        self._wait()
        try:
            return self._load(caller)
        except CompiledCodeError as error:
            raise CompilationError(str(error)) from error

    def close(self) -> None:
        """Kill running compilers; waits for their end unless `load` is waiting for it already."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            left: list[_Worker] = []
            if not self._is_awaited:
                left, self._workers = self._workers, left
        self._timer.cancel()
        self._begun.set()
        for worker in left:
            worker.wait()

    def _missing(self) -> list[Job]:
        return [job for job in self._jobs if self._cache.find(job) is None]

    def _begin(self) -> None:
        try:
            self._start()
        except OSError as error:
            self._not_begun = error
        self._begun.set()

    def _start(self) -> None:
        missing = self._missing()
        count = min(_MAX_WORKERS, len(missing), usable_cpus())
        with self._lock:
            self._workers = []
            if not self._closed:
                self._workers = [
                    _Worker(Setup(tuple(missing[i::count]), self._root, self._niceness))
                    for i in range(count)
                ]

    def _wait(self) -> None:
        faults = []
        self._begun.wait()
        if self._not_begun is not None:
            raise CompilationError(f"no compiler could be started: {self._not_begun}")
        with self._lock:
            self._is_awaited = True
            workers = self._workers
        for worker in workers:
            compiled, fault = worker.wait()
            self.num_compiled += compiled
            if fault is not None:
                faults.append(fault)
        if self._closed:
            raise CompilationClosedError("closed while compiling")
        if faults:
            raise CompilationError("; ".join(faults))

    def _load(self, caller: Caller) -> list[LoadedFunction]:
        functions = []
        for job in self._jobs:
            artifact = self._cache.find(job)
            if artifact is None:
                raise CompiledCodeError(f"{job.function} is not in the cache any more")
            functions.append(LoadedFunction(job, artifact, caller))
        return functions


class _Worker:
    """One worker process and the process group of its children."""

    def __init__(self, setup: Setup) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        # It compiles for the CPU only, without further processes.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if (found := cpp_compiler()) is not None:
            environment["CXX"] = shlex.join(found[0])
        self._deadline = time.monotonic() + _TIMEOUT
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=CHECKOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        _workers.add(self)
        assert self._process.stdin is not None
        # If the process has died already, `wait` reports it.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(setup, self._process.stdin)
            # Not closed: while the pipe is open, the worker knows that this process lives.
            self._process.stdin.flush()

    def wait(self) -> tuple[int, str | None]:
        """Wait for its end; returns how many jobs it compiled, and what went wrong. Blocks."""
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(max(self._deadline - time.monotonic(), 0.0), expire)
        timer.daemon = True
        timer.start()
        answers = [_answer(line) for line in self._process.stdout]
        status = self._process.wait()
        timer.cancel()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with self._errors:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
        faults = [answer["error"] for answer in answers if "error" in answer]
        if late.is_set():
            faults.append(f"the compiler's process took longer than {_TIMEOUT:g} s")
        elif status != 0:
            faults.append(f"the compiler's process ended with {status}: {said[-_MESSAGE_CHARS:]}")
        done = [answer for answer in answers if "error" not in answer]
        compiled = sum(bool(answer.get("compiled")) for answer in done)
        return compiled, "; ".join(faults) or None

    def kill(self) -> None:
        """Kill it and every compiler that it runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


_workers: Final[weakref.WeakSet[_Worker]] = weakref.WeakSet()


def _kill_workers() -> None:
    # They would end by themselves, but only after the directories that they write to are removed.
    for worker in list(_workers):
        worker.kill()


at_process_end(_kill_workers)


def _answer(line: bytes) -> dict[str, Any]:
    """A worker's answer for one job; for an incomplete line, an answer that reports an error."""
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    return {"error": f"the compiler's process said {line[:_MESSAGE_CHARS]!r}"}
