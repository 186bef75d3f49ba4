"""A server in a process of its own, as a user starts it, on a free port of this machine."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from src.bench.errors import BenchError
from src.core.config import Config
from src.core.settings import CHECKOUT, PREFIX, known_settings

HOST: Final = "127.0.0.1"
_TIMEOUT: Final = 10.0
# Seconds until a server that was asked to end is made to.
_END_SECONDS: Final = 30.0
_MAX_LOG: Final = 2000


def environment_of(config: Config, **more: str) -> dict[str, str]:
    """Variables that give another process this configuration, whatever is set here."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for setting in known_settings().values():
        value = getattr(getattr(config, setting.section), setting.key)
        if value != setting.default:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            inherited[setting.variable] = text
    return {**inherited, **more}


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """``python -m src serve`` with an environment; leaving the block ends it.

    Parameters
    ----------
    options
        Of the command, beside the address.
    module
        What is run in the place of ``src``, and runs it.

    Attributes
    ----------
    begun
        When the process was started, on the monotonic clock.
    """

    def __init__(
        self, environment: Mapping[str, str], options: Sequence[str] = (), *, module: str = "src"
    ) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", module, "serve", "--host", HOST, "--port", str(self.port)]
        command += options
        self.begun = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A session of its own, so that what it starts can be ended with it.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check_alive(self) -> None:
        """Make sure that it has not ended.

        Raises
        ------
        BenchError
            It has; with the end of what it wrote.
        """
        code = self._process.poll()
        if code is not None:
            raise BenchError(f"the server ended with {code}: {self.log_tail()}")

    def log_tail(self, most: int = _MAX_LOG) -> str:
        """The end of what it wrote, so many bytes at most."""
        # Without moving the place at which the server writes, which it shares with us.
        file = self._log.fileno()
        begin = max(0, os.fstat(file).st_size - most)
        return os.pread(file, most, begin).decode("utf-8", "replace").strip()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of an answer.

        Raises
        ------
        OSError, http.client.HTTPException
            There is none.
        """
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_TIMEOUT)
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def end(self, seconds: float = _END_SECONDS) -> int:
        """Ask it to end, make it if it does not in time; returns its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.end()
        finally:
            self._log.close()
