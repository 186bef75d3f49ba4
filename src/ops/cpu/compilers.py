"""Processes of C++ compilers, and of checks of what they made; they end with who wanted them."""

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
    """The kernels could not be built; the text says why, in one line or with compiler output."""


class Compilers:
    """Compilers that run, each a driver with the passes that it starts in a group of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.closed = False

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start one.

        Raises
            BuildError: They were closed.
        """
        with self._lock:
            if self.closed:
                raise BuildError(_CLOSED)
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                # A compiler may quote what is in no encoding.
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def wait(self, process: subprocess.Popen[str], seconds: float) -> str:
        """Wait for its end, and kill it after so many seconds; what it wrote to standard error.

        Raises
            BuildError: They were closed meanwhile.
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
        """Kill one, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    @property
    def are_running(self) -> bool:
        """Whether any is."""
        return bool(self._running)

    def close(self) -> None:
        """Kill those that run, and start no more."""
        with self._lock:
            self.closed = True
            for process in self._running:
                self.kill(process)


def was_killed(process: subprocess.Popen[str], errors: str) -> bool:
    """Whether it, or a pass of a compiler, ended by a signal that the system or `wait` sends.

    That says nothing of what it was at: memory or time were short, and may not be the next time.
    """
    # Of a driver that is a shell's child the shell tells 128 and the signal.
    codes = (-signal.SIGKILL, 128 + signal.SIGKILL)
    return process.returncode in codes or "Killed signal" in errors


compilers: Final = Compilers()
"""Those of this process."""

# The thread that waits for them does not outlive the interpreter, and they would.
at_process_end(compilers.close)
