"""``python -m src run-batch``: answers the requests of a batch file into an output file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from tqdm import tqdm

from src.cli.batch_file import (
    BatchRequest,
    answered,
    check_requests,
    failed,
    finished,
    problem,
    read_requests,
)
from src.cli.in_process import InProcessAnswer, InProcessClient
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.errors import ConfigError
from src.engine.client import AsyncEngine

# Seconds until a request is sent again after the engine had no room for it.
_RETRY_SECONDS: Final = 0.5
_MAX_SECONDS: Final = 30.0
# Exit code if some requests were not answered; another run may answer them.
_EXIT_FAILED: Final = 1


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "run-batch", "Answer the requests of an OpenAI batch file.", run)
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.jsonl",
        help="where the answers go; what is there already is not asked for again",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="forget what the output file holds"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N",
        help="requests at a time; by default twice scheduler.max_num_seqs",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config = _for_oneself(config_of(arguments))
    concurrency = arguments.concurrency
    if concurrency is None:
        concurrency = 2 * config.scheduler.max_num_seqs
    if concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {concurrency}")
    source, target = arguments.input, arguments.output
    names = check_requests(source)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target}: the output must not be the input")
    if arguments.overwrite:
        target.unlink(missing_ok=True)
    done = finished(target) & names
    if done:
        print(f"{len(done)} of {len(names)} are done already", file=sys.stderr)
    if len(done) < len(names):
        wanted = (item for item in read_requests(source) if item.custom_id not in done)
        return _answer_all(_Batch(wanted, len(names), len(done)), config, target, concurrency)
    return 0


def _answer_all(batch: _Batch, config: Config, target: Path, concurrency: int) -> int:
    """Run a batch and print a summary; returns the exit code."""
    # Imported here because other commands need no server.
    from src.http.server.process_exit import EXIT_ENGINE_DEAD, first_line

    dead = asyncio.run(batch.run(config, target, concurrency))
    print(f"{batch.answered} answered, {batch.refused} refused", file=sys.stderr)
    if dead is not None:
        reason = f"the engine died: {first_line(dead)}"
        code = EXIT_ENGINE_DEAD
    elif batch.failed:
        reason = f"{batch.failed} failed through no fault of their own"
        code = _EXIT_FAILED
    else:
        return 0
    print(f"slipstream: {reason}; run it again for what is not answered", file=sys.stderr)
    return code


def _for_oneself(config: Config) -> Config:
    """The configuration for private use: without keys, and with little logging."""
    quiet = config.observability.log_level == "info"
    return msgspec.structs.replace(
        config,
        http=msgspec.structs.replace(
            config.http,
            api_keys=(),
            api_key_file=None,
            admin_key=None,
            admin_key_file=None,
            cors_origins=(),
            allowed_hosts=(),
        ),
        observability=msgspec.structs.replace(
            config.observability,
            log_level="warning" if quiet else config.observability.log_level,
            stats_interval=0.0,
        ),
    )


class _Batch:
    """The remaining requests, and the counts of their outcomes."""

    def __init__(self, requests: Iterator[BatchRequest], total: int, done: int) -> None:
        self.answered = 0
        self.refused = 0
        self.failed = 0
        self._requests = requests
        self._bar = (total, done)

    async def run(self, config: Config, target: Path, concurrency: int) -> BaseException | None:
        """Answer all, ``concurrency`` at a time; returns why the engine died, if it did."""
        # Imported here because other commands need no server.
        from src.http import create_app

        app = create_app(config, owns_process=False)
        total, done = self._bar
        async with app.router.lifespan_context(app):
            engine: AsyncEngine = app.state.server.engine
            await engine.wait_ready()
            client = InProcessClient(app)
            with (
                target.open("ab") as output,
                tqdm(total=total, initial=done, unit=" requests", smoothing=0.05) as bar,
            ):
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(concurrency):
                        tasks.create_task(self._work(engine, client, output, bar))
            return engine.status.error

    async def _work(
        self, engine: AsyncEngine, client: InProcessClient, output: BinaryIO, bar: tqdm[Any]
    ) -> None:
        for request in self._requests:
            line = await self._answer(client, request)
            if line is None:
                self.failed += 1
            else:
                # One write per line, so an interrupted run leaves at most one incomplete line.
                output.write(line)
                output.flush()
                bar.set_postfix(refused=self.refused, refresh=False)
                bar.update()
            # A dead engine answers no further requests.
            if engine.status.error is not None:
                return

    async def _answer(self, client: InProcessClient, request: BatchRequest) -> bytes | None:
        """The output line of a request; ``None`` if it failed but may succeed another time."""
        if (what := problem(request)) is not None:
            self.refused += 1
            return failed(request, "invalid_request", what)
        answer = await self._patiently(client, request)
        if answer.status >= 500:
            return None
        if answer.status == 200:
            self.answered += 1
        else:
            self.refused += 1
        return answered(request, answer.status, answer.request_id, answer.body)

    async def _patiently(self, client: InProcessClient, request: BatchRequest) -> InProcessAnswer:
        """The answer; waits and retries while the engine has no room."""
        wait = _RETRY_SECONDS
        while (answer := await client.post(request.url, bytes(request.body))).status == 429:
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MAX_SECONDS)
        return answer
