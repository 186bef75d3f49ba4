"""The event loop's time per streamed token, layer by layer.

    python -m benchmarks.loop_time                        # 128 streams of 128 tokens
    python -m benchmarks.loop_time --streams 64 --chat

Measures the CPU time of the loop's thread, divided by the number of streamed tokens. So other
programs do not count, and neither do device steps and sending to clients, which run in threads of
their own; the sending thread's time is reported separately.

Three layers are measured, each including those below it: the engine with one reader per stream; the
ASGI application, whose output is discarded; and hypercorn on a socket, with clients in another
process. The differences are the cost of a layer. Phases within the engine are measured in a
separate run, with a clock around each of them, whose own cost is subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from starlette.applications import Starlette

from benchmarks.clocks import Clocks, clock_cost
from benchmarks.load import random_prompts
from benchmarks.record import Figure, Recorder, add_common, figures_of
from src import AsyncEngine, Config, SamplingParams
from src.core.collector import freeze_collector
from src.core.settings import load_config

US = 1e6
LAYERS = ("engine", "application", "hypercorn")
# Reported beside the loop's figures.
BESIDE = "sending thread"

# Sends all requests at once and reads every answer; minimal, because it shares the CPUs.
CLIENTS = """
import selectors, socket, sys
port, path = int(sys.argv[1]), sys.argv[2]
bodies = sys.stdin.buffer.read().split(b"\\n")
selector = selectors.DefaultSelector()
for body in bodies:
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
    client.sendall(head.encode() + b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    selector.register(client, selectors.EVENT_READ, bytearray())
left, writes, size = len(bodies), 0, 0
while left:
    for key, _ in selector.select():
        data = key.fileobj.recv(65536)
        writes, size = writes + 1, size + len(data)
        key.data.extend(data)
        if not data or key.data.endswith(b"data: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n"):
            if not key.data.startswith(b"HTTP/1.1 200") or b'"error"' in key.data:
                sys.exit(bytes(key.data[-500:]).decode())
            selector.unregister(key.fileobj)
            key.fileobj.close()
            left -= 1
        del key.data[15:-100]
print(writes, size)
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    parser.add_argument("--streams", type=int, default=128, metavar="N", help="at once")
    parser.add_argument("--input-len", type=int, default=16, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=400, metavar="O", help="tokens")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--chat", action="store_true", help="chat chunks, not completions'")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


class Load:
    """The requests of one turn, in the form that each layer takes."""

    def __init__(self, options: argparse.Namespace, vocab_size: int) -> None:
        self.prompts = random_prompts(options.streams, options.input_len, vocab_size)
        self.output_len: int = options.output_len
        self.path = "/v1/chat/completions" if options.chat else "/v1/completions"
        fields = {
            "max_tokens": options.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        asked: list[dict[str, Any]] = [{"prompt": prompt} for prompt in self.prompts]
        if options.chat:
            asked = [
                {"messages": [{"role": "user", "content": f"story {number}"}]}
                for number in range(options.streams)
            ]
        self.bodies = [json.dumps({**what, **fields}).encode() for what in asked]


async def through_engine(engine: AsyncEngine, load: Load) -> None:
    """One reader per stream, as in an embedding program."""

    async def read(prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True)
        async with engine.submit(prompt, params) as submission:
            while await submission.take():
                pass

    await asyncio.gather(*(read(prompt) for prompt in load.prompts))


async def through_app(app: Starlette, load: Load) -> None:
    """The application, below a server that discards its output."""

    async def ask(body: bytes) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] != 200:
                raise RuntimeError(f"status {message['status']}")

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": load.path,
            "raw_path": load.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, receive, send)

    await asyncio.gather(*(ask(body) for body in load.bodies))


async def through_socket(port: int, load: Load) -> None:
    """Hypercorn, with clients in another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENTS, str(port), load.path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    await process.communicate(b"\n".join(load.bodies))
    if process.returncode:
        raise RuntimeError("a client was refused")


def listening(port: int) -> None:
    """Wait until the port accepts connections."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@contextlib.asynccontextmanager
async def hypercorn(app: Starlette) -> AsyncIterator[int]:
    """The application behind hypercorn in this event loop; yields the port."""
    from hypercorn.asyncio.run import worker_serve
    from hypercorn.config import Config as HypercornConfig
    from hypercorn.utils import wrap_app

    settings = HypercornConfig.from_toml("configs/hypercorn.toml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    settings.bind = [f"127.0.0.1:{port}"]
    settings.graceful_timeout = 1
    stop = asyncio.Event()
    serving = asyncio.create_task(
        worker_serve(
            wrap_app(app, settings.wsgi_max_body_size, "asgi"),
            settings,
            sockets=settings.create_sockets(),
            shutdown_trigger=stop.wait,
        )
    )
    await asyncio.to_thread(listening, port)
    await app.state.server.engine.wait_ready()
    yield port
    stop.set()
    await serving


async def cost_per_token(turn: Callable[[], Awaitable[None]], num_tokens: int) -> float:
    """Microseconds of this thread's CPU time per token."""
    started = time.thread_time()
    await turn()
    return US * (time.thread_time() - started) / num_tokens


def sending_seconds() -> float:
    """CPU time of the sending thread, which is not part of the loop's time."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("slipstream-outbox") and thread.ident is not None
    )


@contextlib.contextmanager
def phases() -> Iterator[Clocks]:
    """Clocks around the parts of a turn, and around the delivery of a token."""
    from src.engine.execution.worker import Worker
    from src.engine.loop import EngineLoop
    from src.engine.requests.streams import Choice
    from src.engine.scheduling.scheduler import Scheduler
    from src.engine.telemetry.observer import EngineObserver
    from src.http.chat.encoder import ChatEncoder
    from src.http.completions.encoder import CompletionEncoder
    from src.http.hypercorn.direct import DirectWriter
    from src.text.output import OutputText

    found = Clocks()
    for name, owner, method in (
        ("loop", EngineLoop, "_turn"),
        ("scheduler", Scheduler, "schedule"),
        ("scheduler", Scheduler, "commit"),
        ("launch", Worker, "launch"),
        ("detokenize", OutputText, "go_on"),
        ("deliver", Choice, "take"),
        *(("observe", EngineObserver, m) for m in ("launched", "committed", "delivered", "turned")),
        ("encode", CompletionEncoder, "events"),
        ("encode", ChatEncoder, "events"),
        ("write", DirectWriter, "write"),
    ):
        found.measure(name, owner, method)
    try:
        yield found
    finally:
        found.close()


class Layers:
    """The measured layers, and the engine's configuration."""

    def __init__(
        self, config: Config, app: Starlette, engine: AsyncEngine, port: int, load: Load
    ) -> None:
        self.config = config
        self.turns: dict[str, Callable[[], Awaitable[None]]] = {
            "engine": lambda: through_engine(engine, load),
            "application": lambda: through_app(app, load),
            "hypercorn": lambda: through_socket(port, load),
        }


@contextlib.asynccontextmanager
async def served(options: argparse.Namespace) -> AsyncIterator[Layers]:
    """An engine behind hypercorn in this loop, and turns of its load through each layer."""
    overrides = [
        ("compile.enforce_eager", "true"),
        ("observability.stats_interval", "0"),
        ("scheduler.max_num_seqs", str(options.streams)),
        # Large enough that no request is preempted.
        ("cache.memory_bytes", str(512 * 2**20)),
    ]
    from src.http import create_app

    config: Config = load_config(options.config, overrides=overrides)
    app = create_app(config, owns_process=False)
    async with hypercorn(app) as port:
        engine = await app.state.server.ready_engine()
        # As in a server's process.
        freeze_collector()
        load = Load(options, engine.model_info.vocab_size)
        yield Layers(config, app, engine, port, load)


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("loop_time", save=not options.no_save)
    async with served(options) as layers:
        config = layers.config
        num_tokens = options.streams * options.output_len
        repeats = []
        for repeat in range(-1, options.repeats):
            found = {}
            sent = sending_seconds()
            for name in options.layers:
                found[name] = await cost_per_token(layers.turns[name], num_tokens)
            found[BESIDE] = US * (sending_seconds() - sent) / num_tokens
            if repeat >= 0:
                repeats.append(found)
        with phases() as clocks:
            inside = await cost_per_token(layers.turns["hypercorn"], num_tokens)
    shape = {
        name: getattr(options, name) for name in ("streams", "input_len", "output_len", "chat")
    }
    units = dict.fromkeys([*options.layers, BESIDE], "us/token")
    recorder.add("loop time per streamed token, with all below", figures_of(units, repeats),
                 config=config, **shape)  # fmt: skip
    once = clock_cost()
    spent = {
        name: max(0.0, US * (sum(values) - once * len(values)) / num_tokens)
        for name, values in clocks.values.items()
    }
    spent["rest"] = inside - US * sum(map(sum, clocks.values.values())) / num_tokens
    recorder.add(
        "of that, by phase (with clocks)",
        {name: Figure.of("us/token", [value]) for name, value in spent.items()},
        config=config,
        calls={name: len(values) / num_tokens for name, values in clocks.values.items()},
        **shape,
    )


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
