"""A server in a separate process, for measurements from this one."""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from collections.abc import Iterator

from src.bench.server_process import ServerProcess, environment_of
from src.core.config import Config

_START_SECONDS = 600.0
_POLL = 0.1


@contextlib.contextmanager
def ready_server(config: Config) -> Iterator[ServerProcess]:
    """``python -m src serve``, ready for requests. Blocks until it is.

    Raises
    ------
    BenchError
        It ended.
    TimeoutError
        It was not ready in time.
    """
    environment = environment_of(config, SLIPSTREAM_OBSERVABILITY__STATS_INTERVAL="0")
    with ServerProcess(environment) as server:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(server):
            server.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server was not ready after {_START_SECONDS:g} s")
            time.sleep(_POLL)
        yield server


def metric(server: ServerProcess, name: str) -> float:
    """The current value of a metric with a single series."""
    _, page = server.request("GET", "/metrics")
    found = re.search(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$".encode(), page)
    if found is None:
        raise LookupError(f"{name} is not among the metrics")
    return float(found[1])


def _is_ready(server: ServerProcess) -> bool:
    try:
        return server.request("GET", "/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False
