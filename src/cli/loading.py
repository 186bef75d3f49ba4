"""Opens an engine for a terminal command, with the start's progress on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Final

from src.core.config import Config
from src.engine.client import AsyncEngine
from src.observability.logs import setup_logging

_REFRESH: Final = 0.1  # seconds
_ERASE_LINE: Final = "\r\x1b[2K"


@contextlib.asynccontextmanager
async def open_engine(config: Config) -> AsyncIterator[AsyncEngine]:
    """A ready engine, closed at the end.

    Raises
    ------
    ConfigError, ModelLoadError
        The start failed; the message is one readable reason.
    """
    # The terminal shows the model's output, so only warnings and errors are logged.
    quiet = config.observability.log_level == "info"
    setup_logging(
        "warning" if quiet else config.observability.log_level, config.observability.log_format
    )
    engine = AsyncEngine(config)
    engine.start()
    shown = asyncio.create_task(_show_progress(engine)) if sys.stderr.isatty() else None
    try:
        try:
            await engine.wait_ready()
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.gather(shown, return_exceptions=True)
        yield engine
    finally:
        await engine.close()


async def _show_progress(engine: AsyncEngine) -> None:
    try:
        while True:
            status = engine.status
            line = f"loading {100 * status.progress:3.0f} %  {status.detail}"
            print(f"{_ERASE_LINE}{line[:78]}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_REFRESH)
    finally:
        print(_ERASE_LINE, end="", file=sys.stderr, flush=True)
