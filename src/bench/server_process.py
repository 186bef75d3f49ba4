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
# Seconds until a server that was asked to end is made to.
_END_SECONDS: Final = 30.0
_MAX_LOG: Final = 2000
# What ends a program from outside, and by itself passes over every `with`.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


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


@contextlib.contextmanager
def left_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block as an exception, so that servers in it are ended too.

    They are :class:`SystemExit` with the code that a shell shows. In another thread than the main
    one, and for a signal about which somebody has decided otherwise, nothing changes.
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
    """What a signal does comes at the end of the block."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {one: signal.getsignal(one) for one in (*_ENDING, signal.SIGINT) if in_main}
    # The others do nothing, or end this process here and now.
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
    """``python -m src serve`` with an environment: entering the block starts it, leaving ends it.

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(seconds)
        finally:
            if self._process.returncode is None:
                # It takes too long, or who waits has to end now.
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def __enter__(self) -> Self:
        self.begun = time.monotonic()
        try:
            # Not between its start and our knowing of it.
            with _held_back():
                self._process = subprocess.Popen(
                    self._command,
                    cwd=CHECKOUT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    # A session of its own, so that what it starts can be ended with it.
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
