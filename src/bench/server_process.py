"""A server in a separate process, started as a user would, on a free local port."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

from src.bench.errors import BenchError
from src.core.config import Config
from src.core.settings import CHECKOUT, PREFIX, known_settings

HOST: Final = "127.0.0.1"
_TIMEOUT: Final = 10.0
# Seconds until a server that was asked to end is killed.
_END_SECONDS: Final = 30.0
_MAX_LOG: Final = 2000
# Signals that end a program without leaving its `with` blocks.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def environment_of(config: Config, **more: str) -> dict[str, str]:
    """Environment variables that give another process exactly this configuration."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for setting in known_settings().values():
        value = getattr(getattr(config, setting.section), setting.key)
        if value != setting.default:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            inherited[setting.variable] = text
    return {**inherited, **more}


def free_port() -> int:
    """A port on which nobody is listening now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def left_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP leave the block as an exception, so that servers in it are ended.

    The exception is `SystemExit` with the code that a shell reports. Outside of the main thread,
    and for signals that have a handler already, nothing changes.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    ours = [one for one in _ENDING if in_main and signal.getsignal(one) is signal.SIG_DFL]
    for one in ours:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Postpone signal handlers to the end of the block."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {one: signal.getsignal(one) for one in (*_ENDING, signal.SIGINT) if in_main}
    # Only Python handlers can be postponed; default actions are left alone.
    handlers = {one: handler for one, handler in handlers.items() if callable(handler)}
    for one in handlers:
        signal.signal(one, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    for number in came:
        signal.raise_signal(number)


class ServerProcess:
    """``python -m src serve`` in a given environment; runs while the block is entered.

    Parameters
    ----------
    options
        Further command-line options.
    module
        Module to run instead of ``src``; it must run ``src`` itself.

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
        address = ("--host", HOST, "--port", str(self.port))
        self._command = [sys.executable, "-m", module, "serve", *address, *options]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes]
        self.begun = 0.0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check_alive(self) -> None:
        """Make sure that it is still running.

        Raises
        ------
        BenchError
            It has ended; the message contains the end of its log.
        """
        code = self._process.poll()
        if code is not None:
            raise BenchError(f"the server ended with {code}: {self.log_tail()}")

    def log_tail(self, most: int = _MAX_LOG) -> str:
        """The end of its log, at most ``most`` bytes."""
        # With pread, because the server shares the file position with this process.
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
        """Send a request; returns status and body of the answer.

        Raises
        ------
        OSError, http.client.HTTPException
            There is no valid answer.
        """
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_TIMEOUT)
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def end(self, seconds: float = _END_SECONDS) -> int:
        """Ask it to end, and kill it after ``seconds``; returns its exit code."""
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(seconds)
        finally:
            if self._process.returncode is None:
                # It takes too long, or this process must end now.
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def __enter__(self) -> Self:
        self.begun = time.monotonic()
        try:
            # No signal may come between starting the process and storing it.
            with _held_back():
                self._process = subprocess.Popen(
                    self._command,
                    cwd=CHECKOUT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    # A session of its own, so that its children can be killed with it.
                    start_new_session=True,
                )
        except BaseException:
            if hasattr(self, "_process"):
                self.end()
            raise
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
