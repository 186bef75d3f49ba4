"""Processes of C++ compilers, which end with the process that wanted them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading


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
                raise BuildError("this process ends")
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill one, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def ended(self, process: subprocess.Popen[str]) -> None:
        """Note that somebody has waited for its end."""
        with self._lock:
            self._running.discard(process)

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
