"""A real engine on a small random checkpoint, in process and behind real servers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import (
    CacheSection,
    CompileSection,
    Config,
    DeviceSection,
    HttpSection,
    ModelSection,
    ObservabilitySection,
    SchedulerSection,
    StructuredOutputSection,
)
from src.engine.client import AsyncEngine
from src.engine.execution.step_computer import StepComputer
from src.engine.scheduling.scheduler import Scheduler
from src.http import create_app
from tests.http.asking import client_of
from tests.http.processes import ServerProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_settings, compile_variables

CONTEXT = 1024


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("http") / "tiny",
        tokenizer=True,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
    )


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> Config:
    return Config(
        model=ModelSection(path=str(checkpoint), served_model_name=("tiny", "org/alias")),
        device=DeviceSection(type="cpu", num_threads=1),
        cache=CacheSection(block_size=16, num_blocks=1024),
        scheduler=SchedulerSection(max_num_seqs=32, max_waiting_requests=64),
        compile=CompileSection(**compile_settings()),
        # Of a grammar, on a busy machine too.
        structured_output=StructuredOutputSection(compile_seconds=60.0),
        http=HttpSection(
            max_body_bytes=100_000,
            max_prompts_per_request=8,
            shutdown_timeout=5.0,
            # Clients in this process call it so.
            allowed_hosts=("slipstream",),
        ),
        observability=ObservabilitySection(stats_interval=0),
    )


@pytest.fixture(scope="session")
async def app(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app):
        # However long compilers take, where code is compiled first.
        await app.state.server._engine.wait_ready()
        yield app


@pytest.fixture(scope="session")
async def engine(app: Starlette) -> AsyncEngine:
    engine: AsyncEngine = await app.state.server.ready_engine()
    return engine


@pytest.fixture(scope="session")
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture(scope="session")
async def demo_app(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    """The bundled model, which knows how to call tools."""
    model = ModelSection(served_model_name=("demo",))
    app = create_app(msgspec.structs.replace(config, model=model), owns_process=False)
    async with app.router.lifespan_context(app):
        # However long compilers take, where code is compiled first.
        await app.state.server._engine.wait_ready()
        yield app


@pytest.fixture(scope="session")
async def demo_client(demo_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(demo_app) as client:
        yield client


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tokens take a second, however fast the machine and its code are."""
    compute = StepComputer.compute

    def slow(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.001)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", slow)


@pytest.fixture
def late_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once ten more steps were computed, it is ten minutes later for deadlines."""
    compute, expire, steps = StepComputer.compute, Scheduler.expire, 0

    def counted(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        return compute(self, *arguments, **named)

    def expired(self: Scheduler, now: float) -> Any:
        nonlocal steps
        if steps < 10:
            return expire(self, now)
        ended = expire(self, now + 600)
        # The next request has its own ten steps.
        steps = 0 if ended else steps
        return ended

    monkeypatch.setattr(StepComputer, "compute", counted)
    monkeypatch.setattr(Scheduler, "expire", expired)


@pytest.fixture(scope="session")
def environment(checkpoint: Path) -> dict[str, str]:
    """What makes a server process serve the small checkpoint."""
    return {
        "SLIPSTREAM_MODEL": str(checkpoint),
        "SLIPSTREAM_MODEL__SERVED_MODEL_NAME": "tiny",
        "SLIPSTREAM_DEVICE__NUM_THREADS": "1",
        "SLIPSTREAM_CACHE__NUM_BLOCKS": "1024",
        **compile_variables(),
        "SLIPSTREAM_HTTP__MAX_BODY_BYTES": "100000",
        "SLIPSTREAM_HTTP__SHUTDOWN_TIMEOUT": "20",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def hypercorn(environment: dict[str, str]) -> Iterator[ServerProcess]:
    """`hypercorn src.http:app`, as a user starts it; its first answers are in `early`."""
    # Idle connections are kept as long as configs/hypercorn.toml says.
    with ServerProcess.hypercorn(environment, "--keep-alive", "75") as server:
        server.wait_for("/live")
        server.early = {path: server.get(path) for path in ("/ready", "/health")}
        server.wait_ready()
        yield server
        server.terminate()
        assert server.wait_exit(30) == 0
