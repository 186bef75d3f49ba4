"""The cost of observability: throughput with everything on, compared with everything off.

    python -m benchmarks.observability                  # the default share of steps with a span
    python -m benchmarks.observability --trace-steps 1  # every step

Two engines of the same model in one process take turns, so that changes of the machine affect both.
One traces every request, exports spans and the conventions' metrics to a receiver in another
process that discards them, and logs a line per request. The other does none of that. Prometheus
metrics and the timeline are always on, so both include them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

from benchmarks.load import engine_client, random_prompts, side_by_side, throughput
from benchmarks.record import Figure, Recorder, add_common, figures_of
from src import AsyncEngine, Config
from src.core.settings import load_config

FIGURES = {
    "output_throughput": "tok/s",
    "ttft_median": "ms",
    "tpot_median": "ms",
    "cpu_per_token": "us",
}

# Accepts OTLP over HTTP; reports the number of bytes when its input is closed.
RECEIVER = """
import http.server, sys, threading
total = [0, 0]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        total[0] += 1
        total[1] += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
print(*total, flush=True)
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    parser.add_argument("--requests", type=int, default=192, metavar="N", help="per turn")
    parser.add_argument("--concurrency", type=int, default=64, metavar="C")
    parser.add_argument("--input-len", type=int, default=64, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=128, metavar="O", help="tokens")
    parser.add_argument("--trace-steps", type=float, default=None, metavar="SHARE")
    add_common(parser, repeats=8)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def receiver() -> Iterator[tuple[int, list[int]]]:
    """The receiver's port; after the block, the list has the numbers of requests and bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    got: list[int] = []
    try:
        yield int(process.stdout.readline()), got
    finally:
        output, _ = process.communicate(timeout=10)
        got += [int(number) for number in output.split()]


@contextlib.asynccontextmanager
async def opened(config: Config, variables: dict[str, str]) -> AsyncIterator[AsyncEngine]:
    """An engine that is opened with these variables and no other ones of OpenTelemetry."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(variables)
    async with AsyncEngine.open(config) as engine:
        yield engine


async def run(options: argparse.Namespace) -> None:
    overrides = [("compile.startup", "wait"), ("observability.stats_interval", "0")]
    off = load_config(options.config, overrides=overrides)
    seen = [("observability.log_requests", "true")]
    if options.trace_steps is not None:
        seen.append(("observability.trace_steps", str(options.trace_steps)))
    on = load_config(options.config, overrides=[*overrides, *seen])
    # Log lines are formatted, but discarded.
    logger = logging.getLogger("src")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.propagate = False
    with receiver() as (port, got):
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_METRICS_EXPORTER": "otlp",
        }
        async with (
            opened(off, {"OTEL_SDK_DISABLED": "true"}) as plain,
            opened(on, variables) as observed,
        ):
            if not observed.telemetry.traces:
                raise RuntimeError("the exporters are not installed: the extra is `otel`")
            turns = await take_turns({"off": plain, "on": observed}, options)
    pairs = list(zip(turns["off"], turns["on"], strict=True))
    costs = [100 * (1 - b["output_throughput"] / a["output_throughput"]) for a, b in pairs]
    # Other programs affect the wall clock, but not CPU time.
    cpu_costs = [100 * (b["cpu_per_token"] / a["cpu_per_token"] - 1) for a, b in pairs]
    recorder = Recorder("observability", save=not options.no_save)
    shape = {
        name: getattr(options, name)
        for name in ("requests", "concurrency", "input_len", "output_len")
    }
    for name, config in (("off", off), ("on", on)):
        recorder.add(f"everything {name}", figures_of(FIGURES, turns[name]), config=config, **shape)
    medians = [
        statistics.median(turn["output_throughput"] for turn in turns[name])
        for name in ("off", "on")
    ]
    recorder.add(
        "cost of everything on",
        {
            "of_medians": Figure.of("%", [100 * (1 - medians[1] / medians[0])]),
            "of_pairs": Figure.of("%", costs),
            "of_cpu_time": Figure.of("%", cpu_costs),
        },
        config=on,
        exports=got[0],
        exported_bytes=got[1],
        **shape,
    )


async def take_turns(
    engines: dict[str, AsyncEngine], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Turns in the order A B B A A B B A ..., so that drift affects both."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    order = list(engines)
    for repeat in range(-1, options.repeats):
        for name in order:
            vocab_size = engines[name].model_info.vocab_size
            prompts = random_prompts(
                options.requests, options.input_len, vocab_size, seed=100 + repeat
            )
            client = engine_client(engines[name])
            started = time.process_time()
            answers = await side_by_side(client, prompts, options.output_len, options.concurrency)
            used = time.process_time() - started
            # The first turn is a warm-up.
            if repeat >= 0:
                figures = throughput(answers, options.input_len)
                figures["cpu_per_token"] = 1e6 * used / (options.requests * options.output_len)
                found[name].append(figures)
        order.reverse()
    return found


def main() -> None:
    asyncio.run(run(parse()))


if __name__ == "__main__":
    main()
