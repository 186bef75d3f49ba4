"""What the endpoints share: the configuration and the engine of one application."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from src.core.config import Config
from src.core.errors import ModelNotFoundError, NotReadyError
from src.core.status import EngineStatus, Stall
from src.engine.client import AsyncEngine
from src.http.hypercorn.outbox import Outbox, SendAll
from src.http.server.body_work import Turns
from src.http.server.keys import Keys
from src.observability.metrics import EngineMetrics

# The most adapters that an error lists.
_MAX_NAMES: Final = 20


class Kept(Protocol):
    """What an endpoint keeps from one request to the next."""

    async def close(self) -> None:
        """Let go of everything, when the application ends."""


KeptT = TypeVar("KeptT", bound=Kept)


class Server:
    """One application's state. The lifespan gives it an engine."""

    def __init__(self, config: Config | None = None, *, owns_process: bool = False) -> None:
        self.given_config = config
        self.config = config or Config()
        self.owns_process = owns_process
        # Set when the configuration is known; until then nothing is open but the probes.
        self.keys: Keys | None = None
        self.outbox = Outbox(compiled_send)
        self.turns = Turns()
        self._kept: dict[Callable[[], Any], Any] = {}
        self._engine: AsyncEngine | None = None
        # Only until there is an engine with metrics of its own.
        self._metrics = EngineMetrics("")

    def attach(self, engine: AsyncEngine) -> None:
        """Serve with this engine from now on."""
        self._engine = engine
        self.config = engine.config

    def keep(self, kind: Callable[[], KeptT]) -> KeptT:
        """The one ``kind`` of this application, which is made when it is first asked for."""
        kept: KeptT | None = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = kind()
        return kept

    async def close(self) -> None:
        """Close whatever endpoints keep."""
        for kept in self._kept.values():
            await kept.close()

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics."""
        return self._metrics if self._engine is None else self._engine.metrics

    @property
    def status(self) -> EngineStatus:
        """The engine's status, and that of an engine to come before there is one."""
        return EngineStatus() if self._engine is None else self._engine.status

    @property
    def stall(self) -> Stall | None:
        """What of a step hangs, if one does."""
        return None if self._engine is None else self._engine.stall

    @property
    def admits(self) -> bool:
        """Whether a request would be queued now."""
        return self._engine is not None and self._engine.admits

    @property
    def engine(self) -> AsyncEngine | None:
        """The engine, ready or not."""
        return self._engine

    async def ready_engine(self) -> AsyncEngine:
        """The engine, after waiting for its model for as long as is configured.

        Raises
        ------
        NotReadyError, ShuttingDownError
            Not now.
        ModelLoadError, ConfigError, EngineDeadError
            Never again in this process.
        """
        if self._engine is None:
            raise NotReadyError("the server is starting", retry_after=1.0)
        await self._engine.wait_ready(self.config.http.ready_wait)
        return self._engine

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests and finish what runs, for ``timeout`` s or as long as configured."""
        if self._engine is not None:
            await self._engine.drain(
                self.config.http.shutdown_timeout if timeout is None else timeout
            )


def compiled_send() -> SendAll | None:
    """What sends to many sockets in one call, once it is compiled."""
    # Here and not at the top: it brings torch in, which whoever streams has loaded.
    from src.ops.build.kernels import kernel_library

    library = kernel_library()
    return None if library is None else library.send


def served_name(engine: AsyncEngine, asked: str | None) -> str:
    """The name under which an answer is given; ``None`` asks for the only model there is.

    It may be an adapter's, see `adapter_name`.

    Raises
    ------
    ModelNotFoundError
        No model of this name is served here.
    """
    info, adapters = engine.model_info, engine.adapters.loaded
    if asked is None:
        return info.name
    if asked not in info.served_names and asked not in adapters:
        names = (*info.served_names, *itertools.islice(adapters, _MAX_NAMES))
        raise ModelNotFoundError(
            f"the model `{asked[:200]}` does not exist; served here: "
            + ", ".join(f"`{name}`" for name in names),
            param="model",
        )
    return asked


def adapter_name(engine: AsyncEngine, name: str) -> str | None:
    """The adapter of a served name; ``None`` for a name of the model itself."""
    return name if name in engine.adapters.loaded else None
