"""The cost of grammars: throughput of constrained and unconstrained rows on the same engine.

    python -m benchmarks.structured_output              # the bundled model, 32 rows
    python -m benchmarks.structured_output --whitespace # free white space in the JSON

Turns of both alternate, so that changes of the machine affect both. All outputs have the same
number of tokens: the schema is of an array that is not complete before, and end tokens are ignored.
The constrained outputs follow a schema with strings, numbers, enums and booleans.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from typing import Any

from benchmarks.load import MS, random_prompts
from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, SamplingParams
from src.core.settings import load_config
from src.core.structured_output import StructuredOutput

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "size": {"type": "integer", "minimum": 0, "maximum": 10_000},
            "kind": {"enum": ["animal", "vegetable", "mineral"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "size", "kind", "tags", "ok"],
        "additionalProperties": False,
    },
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured_output", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/demo.toml", metavar="FILE")
    parser.add_argument("--model", metavar="PATH", help="checkpoint, instead of the file's")
    parser.add_argument(
        "--dummy", action="store_true", help="weights from a seed: config.json only"
    )
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="requests at once")
    parser.add_argument("--input-len", type=int, default=32, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=256, metavar="O", help="tokens")
    parser.add_argument("--whitespace", action="store_true", help="free white space in the JSON")
    add_common(parser, repeats=40)
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error("--repeats: at least 2, for the error of the mean")
    return options


async def turn(
    engine: AsyncEngine, options: argparse.Namespace, output: StructuredOutput | None, seed: int
) -> tuple[float, float]:
    """Output tokens per second, and CPU seconds per token, of one batch of rows."""
    params = SamplingParams(
        temperature=0.8, seed=seed, max_tokens=options.output_len, ignore_eos=True,
        structured_output=output,
    )  # fmt: skip
    vocab_size = engine.model_info.vocab_size
    prompts = random_prompts(options.rows, options.input_len, vocab_size, seed=seed)
    started, cpu = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = sum(len(result.token_ids) for result in results)
    if tokens != options.rows * options.output_len:
        raise RuntimeError(f"an output ended early: {tokens} tokens")
    return tokens / seconds, cpu / tokens


async def run(options: argparse.Namespace) -> None:
    from src.ops.build.kernels import ensure_built

    kernels = ensure_built(wait=True)
    overrides = [("compile.startup", "wait"), ("scheduler.max_num_seqs", str(options.rows))]
    if options.model is not None:
        overrides.append(("model.path", options.model))
    if options.dummy:
        overrides.append(("model.load_format", "dummy"))
    config = load_config(options.config, overrides=overrides)
    output = StructuredOutput.json(json.dumps(SCHEMA), any_whitespace=options.whitespace)
    free: list[tuple[float, float]] = []
    constrained: list[tuple[float, float]] = []
    async with AsyncEngine.open(config) as engine:
        started = time.perf_counter()
        await turn(engine, options, output, seed=1)
        first = time.perf_counter() - started
        await turn(engine, options, None, seed=2)
        for repeat in range(options.repeats):
            order = [(free, None), (constrained, output)]
            for results, wanted in order if repeat % 2 else reversed(order):
                results.append(await turn(engine, options, wanted, seed=3 + repeat))
        about = {"kernels": kernels, "model": engine.model_info.name}
    costs = [100 * (1 - c[0] / f[0]) for f, c in zip(free, constrained, strict=True)]
    error = statistics.stdev(costs) / math.sqrt(len(costs))
    figures = {
        "free": Figure.of("tok/s", [speed for speed, _ in free]),
        "constrained": Figure.of("tok/s", [speed for speed, _ in constrained]),
        "cost, pair by pair": Figure.of("%", costs),
        "cost, mean of pairs": Figure.of("%", [statistics.fmean(costs)]),
        "standard error of that": Figure.of("%", [error]),
        "free, cpu per token": Figure.of("us", [MS * MS * cpu for _, cpu in free]),
        "constrained, cpu per token": Figure.of("us", [MS * MS * cpu for _, cpu in constrained]),
        "first batch, compilation included": Figure.of("s", [first]),
    }
    Recorder("structured_output", save=not options.no_save).add(
        f"{options.rows} rows, constrained against free",
        figures,
        config=config,
        rows=options.rows,
        input_len=options.input_len,
        output_len=options.output_len,
        whitespace=options.whitespace,
        **about,
    )


if __name__ == "__main__":
    asyncio.run(run(parse()))
