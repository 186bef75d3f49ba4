"""Servers in processes of their own, on free ports, which never outlive a test."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from src.bench.startup import CACHE_VARIABLE
from src.core.settings import CHECKOUT, PREFIX

START_SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class ServerProcess:
    """A server; leaving the block ends it and everything that it started."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.early: dict[str, httpx.Response] = {}
        self.verify: ssl.SSLContext | bool = True
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # What has been compiled for one test is there for the others.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == CACHE_VARIABLE or not name.startswith(PREFIX)
        }
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A session of its own, so that a group can be ended whole.
            start_new_session=True,
        )

    @classmethod
    def hypercorn(
        cls, environment: dict[str, str], *options: str, app: str = "src.http:app"
    ) -> Self:
        port = free_port()
        command = [sys.executable, "-m", "hypercorn", app, "--bind", f"127.0.0.1:{port}", *options]
        return cls(command, port, environment)

    @classmethod
    def uvicorn(cls, environment: dict[str, str]) -> Self:
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "src.http:app", "--port", str(port)]
        return cls(command, port, environment)

    @classmethod
    def granian(cls, environment: dict[str, str]) -> Self:
        port = free_port()
        command = [sys.executable, "-m", "granian", "--interface", "asgi", "src.http:app"]
        return cls([*command, "--port", str(port)], port, environment)

    @classmethod
    def serve(cls, environment: dict[str, str], *options: str) -> Self:
        port = free_port()
        command = [sys.executable, "-m", "src", "serve", "--port", str(port), *options]
        return cls(command, port, environment)

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def use_tls(self, authority: Path) -> None:
        """Its answers come by TLS, vouched for by the certificate in this file."""
        self.url = f"https://127.0.0.1:{self.port}"
        self.verify = ssl.create_default_context(cafile=authority)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=self.verify)

    def wait_for(self, path: str, status: int = 200, seconds: float = START_SECONDS) -> None:
        """Wait until ``path`` answers with ``status``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.get(path).status_code == status:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{path} did not answer {status}:\n{self.output}")
            time.sleep(0.05)

    def wait_ready(self) -> None:
        self.wait_for("/ready")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self, seconds: float = START_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end:\n{self.output}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
