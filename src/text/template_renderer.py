"""One process that renders chat templates, seen from its parent."""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from typing import Final

from src.core.errors import UnavailableError
from src.core.process_end import at_process_end
from src.core.settings import CHECKOUT
from src.text.template_process import HEADER_BYTES, MAX_ANSWER_BYTES, Answer, Kind, Request

logger = logging.getLogger(__name__)

MEMORY_BYTES: Final = 512 * 2**20
"""Address space of a process beyond what it has when it has started."""
WALL_SECONDS: Final = 60.0
"""For the start of a process, and for a rendering, on a machine that is busy."""
_MODULE: Final = "src.text.template_process"
# `retry_after` in seconds if no process could be started.
_RETRY_AFTER: Final = 5.0
_RECEIVE_BYTES: Final = 1 << 16
# What a process is told of the environment: all that Python itself needs, and no secret.
_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ", "TZDIR", "VIRTUAL_ENV", "SYSTEMROOT", "TMPDIR")
_PREFIXES: Final = ("LC_", "LD_", "DYLD_", "PYTHON", "NIX_", "CONDA_")


class EndedError(Exception):
    """The process has ended; ``is_late`` if that was because a rendering took too long."""

    def __init__(self, status: int | None, *, is_late: bool) -> None:
        super().__init__(f"status {status}")
        self.is_late = is_late


class Renderer:
    """Starts a process. One thread asks it; any other may kill it.

    Raises
    ------
    OSError
        It cannot be started.
    """

    def __init__(self) -> None:
        self.is_last = False
        """Whether the process has given its last answer."""
        self._is_ready = False
        # Keys of the templates that were sent to it.
        self._known: set[bytes] = set()
        # Both directions. The kernel limits how long either may take, which saves a call for each.
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(WALL_SECONDS), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            with theirs:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(MEMORY_BYTES)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=CHECKOUT,
                    env=_environment(),
                    # Keys pressed in a terminal are for the parent, which ends it.
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise
        _running.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: Request) -> Answer:
        """Send a request; return the answer.

        Raises
        ------
        EndedError
            The process has ended before it answered.
        UnavailableError
            The process has not started.
        ValueError
            The variables are nested too deeply.
        """
        self._await_start()
        is_known = request.key in self._known
        frame = marshal.dumps(tuple(request._replace(source=None) if is_known else request))
        answer = self._exchange(frame)
        if answer.kind is Kind.UNKNOWN:
            answer = self._exchange(marshal.dumps(tuple(request)))
        self._known.add(request.key)
        return answer

    def kill(self) -> None:
        """Kill the process. A thread that waits for its answer learns it."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end, which is at once."""
        self.kill()
        self._process.wait()
        self._socket.close()

    def _await_start(self) -> None:
        if self._is_ready:
            return
        try:
            answer = self._receive(time.monotonic() + WALL_SECONDS)
        except EndedError as error:
            logger.error("the process that renders chat templates did not start: %s", error)
            raise not_started() from None
        assert answer.kind is Kind.READY, answer
        self._is_ready = True

    def _exchange(self, frame: bytes) -> Answer:
        deadline = time.monotonic() + WALL_SECONDS
        try:
            self._socket.sendall(len(frame).to_bytes(HEADER_BYTES, "little") + frame)
        except OSError:
            raise self._ended() from None
        return self._receive(deadline)

    def _receive(self, deadline: float) -> Answer:
        received = bytearray()
        length = HEADER_BYTES
        while len(received) < length:
            try:
                piece = self._socket.recv(_RECEIVE_BYTES)
            except OSError:
                piece = b""
            received += piece
            if not piece or time.monotonic() > deadline:
                raise self._ended()
            if length == HEADER_BYTES and len(received) >= HEADER_BYTES:
                length += int.from_bytes(received[:HEADER_BYTES], "little")
                if length > HEADER_BYTES + MAX_ANSWER_BYTES:
                    raise self._ended()
        if len(received) > length:
            # Our program says nothing that it was not asked for.
            raise self._ended()
        try:
            answer = Answer.decoded(received[HEADER_BYTES:])
        except ValueError:
            # No answer of our program.
            raise self._ended() from None
        self.is_last = answer.is_last
        return answer

    def _ended(self) -> EndedError:
        """Return what became of it; kill it if it still runs, late or no more itself."""
        is_late = self._process.poll() is None and not self._closes_down()
        self.kill()
        status = self._process.wait()
        return EndedError(status, is_late=is_late or status == -signal.SIGPROF)

    def _closes_down(self) -> bool:
        """Whether it ends in a moment: its socket closes before it can be waited for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode is not None


def not_started() -> UnavailableError:
    """No process could be started: no request's fault, and temporary."""
    return UnavailableError(
        "the process that renders chat templates did not start",
        retry_after=_RETRY_AFTER,
        code="renderer_unavailable",
    )


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }


_running: Final[weakref.WeakSet[Renderer]] = weakref.WeakSet()


def _kill_all() -> None:
    # Those that render would end only when their time is over.
    for renderer in list(_running):
        renderer.kill()


at_process_end(_kill_all)
