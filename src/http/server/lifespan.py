"""From the first ASGI message to the last: begin to load, watch over the engine, drain, close.

The lifespan only *begins* to load, so the port opens at once and ``/live`` answers while torch is
imported. When loading fails, or the engine later, the process ends: a server without a model is of
no use, and whatever supervises it must see that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from starlette.applications import Starlette

from src.core.collector import freeze_collector
from src.core.config import Config
from src.core.errors import ConfigError, SlipstreamError
from src.core.settings import load_config
from src.engine.client import AsyncEngine
from src.http.hypercorn.http2 import bound_http2
from src.http.hypercorn.idle_connections import release_closed_connections
from src.http.hypercorn.outbox import Outbox
from src.http.server.body_work import Turns
from src.http.server.guard import check_access
from src.http.server.keys import check_owners
from src.http.server.process_exit import (
    EXIT_ENGINE_DEAD,
    EXIT_LOAD_FAILED,
    end_process,
    first_line,
    is_compiling,
)
from src.http.server.state import Server, compiled_send
from src.observability.logs import setup_logging

logger = logging.getLogger(__name__)

# Seconds for the answers to those who waited, before a failed process ends.
LAST_WORDS: Final = 0.5


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open the engine of ``app.state.server``, close it at the end."""
    server: Server = app.state.server
    config = _configuration(server)
    setup_logging(config.observability.log_level, config.observability.log_format)
    release_closed_connections()
    bound_http2()
    engine = AsyncEngine(config)
    server.attach(engine)
    # Their state is of this event loop.
    server.outbox = Outbox(compiled_send)
    server.turns = Turns()
    engine.start()
    tasks = []
    if server.owns_process:
        tasks.append(asyncio.create_task(_end_with(engine), name="slipstream-guard"))
    try:
        yield
    finally:
        loading = not engine.status.healthy and engine.status.error is None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.drain(config.http.shutdown_timeout)
        await engine.close()
        await server.close()
        server.outbox.close()
        if server.owns_process and (loading or is_compiling()):
            # Such a thread cannot be cancelled: an orderly exit would wait for a load, and crash in
            # the middle of a compilation.
            logger.info("stopped while loading or compiling")
            end_process(0)


def _configuration(server: Server) -> Config:
    try:
        config = server.given_config or load_config()
        keys = check_access(config.http)
        check_owners(config.scheduler, keys)
        server.keys = keys
        # From here on there are only hashes of them.
        secretless = msgspec.structs.replace(config.http, api_keys=(), admin_key=None)
        return msgspec.structs.replace(config, http=secretless)
    except ConfigError as error:
        if server.owns_process:
            end_process(EXIT_LOAD_FAILED, f"cannot start: {error}")
        raise


async def _end_with(engine: AsyncEngine) -> None:
    """End the process when the engine has failed."""
    try:
        await engine.wait_ready()
    except SlipstreamError:
        code, what = EXIT_LOAD_FAILED, "the model could not be loaded"
    else:
        # A program that embeds the application may have other plans with its objects.
        freeze_collector()
        code, what = EXIT_ENGINE_DEAD, "the engine died"
    error = await engine.wait_dead()
    # Everybody who waited has been woken with an error; let the answers go out.
    await asyncio.sleep(LAST_WORDS)
    end_process(code, f"{what}: {first_line(error)}")
