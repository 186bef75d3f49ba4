"""The server under test: low limits, which a load soon reaches, and a probe inside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from src.bench.errors import BenchError
from src.bench.server_process import ServerProcess, environment_of
from src.bench.soak.probe import VARIABLE
from src.bench.soak.vitals import Vitals
from src.core.config import MIB, Config, Secret
from src.core.views import PoolView, RequestsView

_START_SECONDS: Final = 300.0
# Time until finished requests must have released everything.
_SETTLE_SECONDS: Final = 30.0
_INTERVAL: Final = 0.05
# Idle connections are closed after so many seconds, so all of them are gone a little later.
_KEEP_ALIVE_SECONDS: Final = 1
_LINGER_SECONDS: Final = 3.0 * _KEEP_ALIVE_SECONDS
_GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def hurt(config: Config) -> Config:
    """The configuration with low limits, which a load reaches within seconds.

    Settings of the user are kept, except keys. Caches get small limits, so that they soon stop
    growing; otherwise their growth would look like a leak.
    """
    default = Config()

    def small(name: str, **values: Any) -> Any:
        section, plain = getattr(config, name), getattr(default, name)
        kept = {k: v for k, v in values.items() if getattr(section, k) == getattr(plain, k)}
        return msgspec.structs.replace(section, **kept)

    return msgspec.structs.replace(
        config,
        # Requests of several hundred tokens, so some are preempted and prefixes are evicted.
        cache=small("cache", num_blocks=160),
        scheduler=small("scheduler", max_num_seqs=16, max_waiting_requests=32),
        compile=small("compile", startup="off"),
        structured_output=small("structured_output", cached_grammars=4),
        http=msgspec.structs.replace(
            small(
                "http",
                max_body_bytes=MIB,
                write_timeout=3.0,
                body_timeout=3.0,
                shutdown_timeout=3.0,
                max_stored_responses=16,
            ),
            # No keys: only this process uses the server, for a short time.
            api_keys=(),
            api_key_file=None,
            admin_key=Secret(secrets.token_hex(16)),
            admin_key_file=None,
        ),
        observability=small(
            "observability",
            stats_interval=0.0,
            log_level="warning",
            timeline_steps=256,
            timeline_requests=64,
        ),
    )


class SoakedServer:
    """A server process, with access from outside and, by the probe, from inside.

    Its methods block; call them in a thread beside the load's event loop.

    Attributes
    ----------
    admin_headers
        The authorisation for its debug endpoints.
    """

    def __init__(self, process: ServerProcess, config: Config, probe: Path) -> None:
        self.process = process
        self.config = config
        self._probe = probe
        key = config.http.admin_key
        assert key is not None, "hurt() gives one"
        self.admin_headers = {"Authorization": f"Bearer {key.reveal()}", "Connection": "close"}

    def get(self, path: str) -> bytes:
        """The body of an answer with status 200.

        Raises
        ------
        BenchError
            The server gives no such answer.
        """
        try:
            status, body = self.process.request("GET", path, headers=self.admin_headers)
        except (OSError, http.client.HTTPException) as error:
            self.process.check_alive()
            raise BenchError(f"{path} is not answered: {error}") from error
        if status != 200:
            raise BenchError(f"{path} answers {status}: {body[:200]!r}")
        return body

    def wait_ready(self) -> None:
        """Wait until it accepts requests.

        Raises
        ------
        BenchError
            It has ended, or takes too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self.process.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.process.request("GET", "/ready")[0] == 200:
                    return
            if time.monotonic() > deadline:
                raise BenchError(f"the server was not ready after {_START_SECONDS:g} s")
            time.sleep(_INTERVAL)

    def settled(self, at: float, requests: int, tasks: int | None = None) -> Vitals:
        """Read the vitals as soon as the server is idle, or after a time limit.

        Parameters
        ----------
        tasks
            Number of tasks of an idle server; closing connections may take a moment.
        """
        begun = time.monotonic()
        while True:
            reading = self._read(at, requests)
            idle = not (reading.held or reading.alive or reading.gauges)
            waited = time.monotonic() - begun
            few = tasks is None or reading.tasks <= tasks or waited > _LINGER_SECONDS
            if (idle and few) or waited > _SETTLE_SECONDS:
                return reading
            time.sleep(_INTERVAL)

    def _read(self, at: float, requests: int) -> Vitals:
        pool = msgspec.json.decode(self.get("/debug/pool?cells=1"), type=PoolView)
        alive = msgspec.json.decode(self.get("/debug/requests"), type=RequestsView)
        lines = self.get("/metrics").decode().splitlines()
        inside = self.inside()
        return Vitals(
            at=at,
            requests=requests,
            blocks=pool.num_blocks,
            held=pool.held,
            free=pool.free + pool.cached,
            alive=len(alive.requests) + alive.omitted + alive.running + alive.waiting,
            gauges=sum(
                float(line.rpartition(" ")[2]) for line in lines if line.startswith(_GAUGES)
            ),
            tasks=inside["tasks"],
            threads=inside["threads"],
            descriptors=len(os.listdir(f"/proc/{self.process.pid}/fd")),
            memory=sum(map(_resident, _family(self.process.pid))),
            series=len(lines),
        )

    def inside(self) -> dict[str, Any]:
        """Data from the probe.

        Raises
        ------
        BenchError
            It does not answer, so the event loop hangs.
        """
        self._probe.unlink(missing_ok=True)
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not self._probe.exists():
            self.process.check_alive()
            if time.monotonic() > deadline:
                raise BenchError(f"the event loop has not turned for {_SETTLE_SECONDS:g} s")
            time.sleep(0.005)
        found: dict[str, Any] = json.loads(self._probe.read_text())
        return found


@contextlib.contextmanager
def soaked_server(config: Config) -> Iterator[SoakedServer]:
    """A ready server with these settings; it is ended after the block.

    Raises
    ------
    BenchError
        It does not start.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as folder:
        probe = Path(folder) / "probe.json"
        environment = environment_of(config, **{VARIABLE: str(probe)})
        assert config.http.admin_key is not None, "hurt() gives one"
        environment["SLIPSTREAM_HTTP__ADMIN_KEY"] = config.http.admin_key.reveal()
        settings = Path(folder) / "hypercorn.toml"
        settings.write_text(
            f"keep_alive_timeout = {_KEEP_ALIVE_SECONDS}\nbacklog = 2048\n"
            f"graceful_timeout = {config.http.shutdown_timeout}\n"
        )
        options = ("--hypercorn-config", str(settings))
        with ServerProcess(environment, options, module="src.bench.soak.probe") as process:
            server = SoakedServer(process, config, probe)
            server.wait_ready()
            yield server


def _family(pid: int) -> list[int]:
    """A process and those of its children that exist."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                for child in children.read().split():
                    found += _family(int(child))
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as facts:
            return int(facts.read().split()[1]) * _PAGE
    except OSError:
        return 0
