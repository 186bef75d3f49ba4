"""Processes of C++ compilers and of the kernels' self-checks; they end with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from typing import Final

from src.core.process_end import at_process_end

_CLOSED: Final = "this process ends"


class BuildError(Exception):
    """The kernels could not be built; the message says why, possibly with compiler output."""


class Compilers:
    """Running compilers. Each driver and the passes that it starts form a process group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.closed = False

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a compiler.

        Raises
        ------
        BuildError
            `close` was called.
        """
        with self._lock:
            if self.closed:
                raise BuildError(_CLOSED)
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                # A compiler may quote bytes that are not valid text.
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def wait(self, process: subprocess.Popen[str], seconds: float) -> str:
        """Wait for a compiler to end, at most `seconds`, then kill it; returns its standard error.

        Raises
        ------
        BuildError
            `close` was called meanwhile.
        """
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill(process)
            _, errors = process.communicate()
        with self._lock:
            self._running.discard(process)
        if self.closed:
            raise BuildError(_CLOSED)
        return errors

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a compiler with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    @property
    def are_running(self) -> bool:
        """Whether any compiler is running."""
        return bool(self._running)

    def close(self) -> None:
        """Kill all running compilers, and refuse to start more."""
        with self._lock:
            self.closed = True
            for process in self._running:
                self.kill(process)


def was_killed(process: subprocess.Popen[str], errors: str) -> bool:
    """Whether a compiler, or one of its passes, was killed by the system or by `wait`.

    That is no verdict on the source: memory or time ran short, and may suffice the next time.
    """
    # If the driver runs under a shell, the shell reports 128 plus the signal.
    codes = (-signal.SIGKILL, 128 + signal.SIGKILL)
    return process.returncode in codes or "Killed signal" in errors


compilers: Final = Compilers()
"""The compilers of this process."""

# Compilers run in sessions of their own, so they would survive this process.
at_process_end(compilers.close)
