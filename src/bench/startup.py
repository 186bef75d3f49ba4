"""Measures how long a server takes from process start to ready, first token and compiled code."""

from __future__ import annotations

import contextlib
import http.client
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from src.bench.errors import BenchError
from src.bench.server_process import ServerProcess, environment_of
from src.core.config import Config
from src.core.start_timeline import StartSpan
from src.core.status import STARTUP_PHASES

CACHE_VARIABLE: Final = "SLIPSTREAM_CACHE_DIR"
_POLL: Final = 0.02  # seconds
_GIVE_UP: Final = 1200.0
_TOKEN: Final = b'{"prompt":"Once upon a time","max_tokens":1,"temperature":0}'
_PHASE: Final = re.compile(
    rb'(?m)^slipstream_startup_phase(_began)?_seconds\{[^}]*phase="(\w+)"\} (\S+)$'
)
_COMPILE: Final = re.compile(rb"(?m)^slipstream_compile_seconds(?:\{[^}]*\})? (\S+)$")
_KERNELS: Final = re.compile(rb'(?m)^slipstream_cpu_kernels_info\{[^}]*kernels="([\w-]+)"')
# The log message for a failed compilation of the kernels.
_NO_KERNELS: Final = "no compiled CPU kernels"


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """One start, in seconds.

    Attributes
    ----------
    answers
        Until the port was open and ``/live`` answered.
    ready
        Until requests were admitted.
    first_token
        Until the answer to a request for one token, sent when the server was ready.
    kernels
        Until the CPU kernels replaced the references, where applicable.
    compiled
        Until compiled code served; ``None`` if nothing is compiled, or if compilation failed.
    compilation
        How long the compiler, or loading from the cache, took; 0 if nothing is compiled.
    began
        Phase of the engine's start -> when it began, counted from the first phase; includes
        ``ready``.
    phases
        Phase -> its duration, for the other phases.
    """

    answers: float
    ready: float
    first_token: float
    kernels: float
    compiled: float | None
    compilation: float
    began: dict[str, float]
    phases: dict[str, float]


def cold_start(config: Config) -> Startup:
    """Start a server with an empty artifact cache, and end it.

    Raises
    ------
    BenchError
        It does not start.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as cache:
        return start_once(config, cache)


@contextlib.contextmanager
def warm_starts(config: Config) -> Iterator[Callable[[], Startup]]:
    """Yield a function that starts a server; all of its starts share a cache.

    The first start fills the cache, so it must not be counted as warm.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as cache:
        yield lambda: start_once(config, cache)


def start_once(config: Config, cache: str) -> Startup:
    """Start a server with this artifact cache, and end it when its code is compiled.

    Raises
    ------
    BenchError
        It does not start.
    """
    # Without keys, so that this process gets answers.
    open_to_us = msgspec.structs.replace(
        config.http, api_keys=(), api_key_file=None, admin_key=None, admin_key_file=None
    )
    config = msgspec.structs.replace(config, http=open_to_us)
    environment = environment_of(config, **{CACHE_VARIABLE: cache})
    # It would keep what Inductor made between cold starts.
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with ServerProcess(environment) as server:
        answers = _until(server, lambda: _status(server, "/live") == 200)
        ready = _until(server, lambda: _status(server, "/ready") == 200)
        status, body = server.request("POST", "/v1/completions", _TOKEN)
        first_token = time.monotonic() - server.begun
        if status != 200:
            raise BenchError(f"the first request was answered with {status}: {body[:200]!r}")
        kernels = _until(server, lambda: _has_kernels(server))
        compiled = None
        if config.compile.is_on:
            # Or until it has failed.
            end = _until(server, lambda: "compile" in _phases(server)[1])
            compiled = end if _compile_seconds(server) > 0 else None
        began, phases = _phases(server)
        return Startup(
            answers=answers,
            ready=ready,
            first_token=first_token,
            kernels=kernels,
            compiled=compiled,
            compilation=_compile_seconds(server),
            began=began,
            phases=phases,
        )


def spans_of(startup: Startup) -> list[StartSpan]:
    """The phases of a start in the order in which they began, relative to the process start."""
    # Before the first phase, Python starts and imports our modules.
    offset = max(0.0, startup.ready - startup.began.get("ready", startup.ready))
    spans = [StartSpan("process", 0.0, offset)]
    for phase, seconds in startup.phases.items():
        began = offset + startup.began[phase]
        spans.append(StartSpan(phase, began, began + seconds))
    spans.append(StartSpan("first token", startup.ready, startup.first_token))
    if "kernels" not in startup.phases:
        spans.append(StartSpan("kernels", startup.kernels, startup.kernels))
    return sorted(spans, key=lambda span: span.began)


def _until(server: ServerProcess, reached: Callable[[], bool]) -> float:
    """Seconds from the process start until ``reached`` returns true."""
    while not reached():
        server.check_alive()
        if time.monotonic() - server.begun > _GIVE_UP:
            raise BenchError(f"the server was not ready after {_GIVE_UP:g} s: {server.log_tail()}")
        time.sleep(_POLL)
    return time.monotonic() - server.begun


def _status(server: ServerProcess, path: str) -> int:
    try:
        return server.request("GET", path)[0]
    except (OSError, http.client.HTTPException):
        return 0


def _metrics(server: ServerProcess) -> bytes:
    return server.request("GET", "/metrics")[1]


def _has_kernels(server: ServerProcess) -> bool:
    """Whether the final kernels serve: without a C++ compiler, these are the references."""
    found = _KERNELS.search(_metrics(server))
    return found is None or found[1] != b"reference" or _NO_KERNELS in server.log_tail()


def _phases(server: ServerProcess) -> tuple[dict[str, float], dict[str, float]]:
    """Phase -> when it began, and phase -> its duration if it has ended, in order."""
    found: tuple[dict[str, float], dict[str, float]] = {}, {}
    for is_began, phase, seconds in _PHASE.findall(_metrics(server)):
        if phase.decode() in STARTUP_PHASES:
            found[0 if is_began else 1][phase.decode()] = float(seconds)
    return found


def _compile_seconds(server: ServerProcess) -> float:
    found = _COMPILE.search(_metrics(server))
    return float(found[1]) if found else 0.0
