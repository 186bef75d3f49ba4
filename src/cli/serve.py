"""``python -m src serve``: the HTTP server, under hypercorn in this process.

In this process, the exit code is our own, and no second process keeps the listening socket open
during a drain. Also, a drain can begin before the port closes: until running requests have
finished, ``/ready`` and every new request get status 503.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT

logger = logging.getLogger(__name__)

HYPERCORN_CONFIG: Final = CHECKOUT / "configs" / "hypercorn.toml"
EXIT_CANNOT_LISTEN: Final = 1
# Seconds beyond hypercorn's graceful_timeout after which open connections are abandoned.
_PATIENCE: Final = 10.0
# Seconds for remaining connections once no request runs: half-sent requests and slow readers.
_LAST_CONNECTIONS: Final = 2.0
# Seconds after a second signal for telling clients why their streams end.
_HURRY: Final = 3.0


def add_command(commands: Commands) -> None:
    """Declare the command."""
    add_address(add(commands, "serve", "Serve the model over HTTP, with OpenAI's protocol.", run))


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where to listen."""
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, metavar="PORT", help="port to listen on (default: 8000)"
    )
    parser.add_argument(
        "--hypercorn-config",
        metavar="FILE",
        type=Path,
        help="TOML file with hypercorn's settings (default: configs/hypercorn.toml)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until a signal ends it."""
    from src.http import create_app

    config = config_of(arguments)
    settings = hypercorn_settings(arguments, config)
    config = with_own_names(config, settings.bind)
    return asyncio.run(_serve(create_app(config), settings, config))


def with_own_names(config: Config, binds: Sequence[str]) -> Config:
    """The configuration that also answers to the names of the addresses to listen on."""
    from src.http.server.browsers import ALLOWED_HOST

    hosts = [bind.rpartition(":")[0] for bind in binds if not bind.startswith(("unix:", "fd:"))]
    # Addresses need no entry, and `*` would be one for all names.
    names = [host for host in hosts if ALLOWED_HOST.fullmatch(host) and "*" not in host]
    allowed = (*config.http.allowed_hosts, *names)
    http = msgspec.structs.replace(config.http, allowed_hosts=allowed)
    return msgspec.structs.replace(config, http=http)


def hypercorn_settings(arguments: argparse.Namespace, config: Config) -> Any:
    """Hypercorn's settings: its file, and the options of `add_address`.

    Raises
    ------
    ConfigError
        The file is missing, or is not hypercorn's.
    """
    from hypercorn.config import Config as HypercornConfig

    file = arguments.hypercorn_config or HYPERCORN_CONFIG
    if file.is_file():
        try:
            settings = HypercornConfig.from_toml(file)
        # Hypercorn does not check types, so a wrong one fails wherever the setting is first used.
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: not hypercorn's settings: {error}") from error
    elif arguments.hypercorn_config is not None:
        raise ConfigError(f"--hypercorn-config: there is no file {file}")
    else:
        # Installed without the checkout's configuration file: set its most important values.
        settings = HypercornConfig()
        settings.graceful_timeout = config.http.shutdown_timeout
    if arguments.host is not None or arguments.port is not None:
        host, _, port = settings.bind[0].rpartition(":")
        host = arguments.host or host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        settings.bind = [f"{host}:{port if arguments.port is None else arguments.port}"]
    return settings


async def _serve(app: Any, settings: Any, config: Config) -> int:
    from hypercorn.asyncio.run import worker_serve
    from hypercorn.utils import wrap_app

    # Checked before the model is loaded.
    try:
        sockets = settings.create_sockets()
    except (OSError, OverflowError, ValueError) as error:
        print(f"slipstream: cannot listen on {settings.bind[0]}: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    stop = asyncio.Event()
    closing: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if closing:
            logger.info("second signal: ending at once")
            closing.append(asyncio.create_task(_end_at_once(app, stop, settings)))
        else:
            closing.append(asyncio.create_task(_drain(app, stop, config, settings)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await worker_serve(
            wrap_app(app, settings.wsgi_max_body_size, "asgi"),
            settings,
            sockets=sockets,
            shutdown_trigger=stop.wait,
        )
    finally:
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
    return 0


async def _drain(app: Any, stop: asyncio.Event, config: Config, settings: Any) -> None:
    """Refuse new requests until running ones have finished, then close the port."""
    from src.http.server.process_exit import end_process

    logger.info("finishing what runs, for at most %g s", config.http.shutdown_timeout)
    await app.state.server.drain()
    settings.graceful_timeout = min(settings.graceful_timeout, _LAST_CONNECTIONS)
    stop.set()
    # From Python 3.12 on, closing waits for open connections without hypercorn's time-out.
    await asyncio.sleep(settings.graceful_timeout + _PATIENCE)
    end_process(0, "left connections that did not end")


async def _end_at_once(app: Any, stop: asyncio.Event, settings: Any) -> None:
    """Abort running requests, notify their clients, and end."""
    from src.http.server.process_exit import end_process

    settings.graceful_timeout = min(settings.graceful_timeout, 1.0)
    aborting = asyncio.create_task(app.state.server.drain(0))
    await asyncio.wait([aborting], timeout=1.0)
    stop.set()
    await asyncio.sleep(_HURRY)
    end_process(0, "left connections that did not end")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text)
