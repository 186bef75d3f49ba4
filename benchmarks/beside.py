"""Streams of text beside a flood of vectors, and a reranker's query once for all documents.

    python -m benchmarks.beside
    python -m benchmarks.beside --shape 7m --set scheduler.max_mixed_pooled_tokens=64

One engine generates and embeds. Its streams are measured alone and beside calls that ask for
vectors without a pause, in turns: the time per token, and the tokens per second of the texts that
became vectors meanwhile; those of the flood alone are measured too. Then texts in the form of a
reranker's are computed that share the query's prefix, and the same with a salt of their own each,
so that none finds it cached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.load import MS, engine_client, random_prompts
from benchmarks.record import Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES, write_checkpoint
from src import AsyncEngine, Config
from src.core.settings import load_config

_STREAMS, _INPUT_LEN, _OUTPUT_LEN = 8, 32, 96
_CALLS, _TEXTS, _TEXT_LEN = 4, 32, 128
_FLOOD_SECONDS = 1.0
# Of Qwen3-Reranker's template with a query, and of a document with what follows it.
_DOCUMENTS, _QUERY_LEN, _DOCUMENT_LEN = 32, 100, 64
_FIGURES = {
    "tpot alone": "ms",
    "tpot beside": "ms",
    "ratio": "x",
    "texts beside": "tok/s",
    "texts alone": "tok/s",
}
_PREFIX_FIGURES = {"query once": "ms", "query each time": "ms", "ratio": "x"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=("7m", "0.35b"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(directory: Path, overrides: list[str]) -> Config:
    """Default settings, but for what a benchmark needs."""
    given = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "4096"),
        ("cache.memory_bytes", str(2**30)),
        ("compile.startup", "wait"),
        ("observability.stats_interval", "0"),
        *(tuple(each.split("=", 1)) for each in overrides),
    ]
    return load_config(None, overrides=given)


class Flood:
    """Calls that ask for vectors one after the other, as long as the block runs."""

    def __init__(self, engine: AsyncEngine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._seeds = itertools.count(1)
        self._tokens = 0
        self._seconds = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run it during the block; `rate` is about the last one."""
        calls = [asyncio.create_task(self._ask()) for _ in range(_CALLS)]
        self._tokens, begun = 0, time.perf_counter()
        try:
            yield
            self._seconds = time.perf_counter() - begun
        finally:
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError) and isinstance(error, BaseException):
                raise error

    @property
    def rate(self) -> float:
        """Tokens per second of texts that had their vectors before the block's end."""
        return self._tokens / self._seconds

    async def _ask(self) -> None:
        while True:
            texts = random_prompts(_TEXTS, _TEXT_LEN, self._vocab_size, seed=next(self._seeds))
            # One call each, so that none is counted only with the last of many.
            await asyncio.gather(*(self._one(text) for text in texts))

    async def _one(self, text: list[int]) -> None:
        await self._engine.embed([text])
        self._tokens += len(text)


async def tpot(engine: AsyncEngine, vocab_size: int, seed: int) -> float:
    """Milliseconds per token of streams that begin at once."""
    ask = engine_client(engine)
    prompts = random_prompts(_STREAMS, _INPUT_LEN, vocab_size, seed=seed)
    answers = await asyncio.gather(*(ask(prompt, _OUTPUT_LEN) for prompt in prompts))
    return MS * statistics.mean(answer.tpot for answer in answers)


async def ranks(engine: AsyncEngine, vocab_size: int, seed: int, *, shares: bool) -> float:
    """Milliseconds until all documents are computed behind a query that is not cached yet."""
    (query,) = random_prompts(1, _QUERY_LEN, vocab_size, seed=seed)
    documents = random_prompts(_DOCUMENTS, _DOCUMENT_LEN, vocab_size, seed=seed + 1)
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, document in enumerate(documents):
            salt = f"{seed}" if shares else f"{seed} {number}"
            group.create_task(engine.embed([query + document], cache_salt=salt))
    return MS * (time.perf_counter() - begun)


async def measure_ranks(config: Config, vocab_size: int, repeats: int) -> list[dict[str, float]]:
    """A reranker's documents with the query once, and each time, in turns."""
    found: list[dict[str, float]] = []
    async with AsyncEngine.open(config) as engine:
        for repeat in range(repeats + 1):
            once = await ranks(engine, vocab_size, 10 * repeat, shares=True)
            each = await ranks(engine, vocab_size, 10 * repeat + 5, shares=False)
            if repeat:
                found.append(dict(zip(_PREFIX_FIGURES, (once, each, each / once), strict=True)))
    return found


async def measure(config: Config, vocab_size: int, repeats: int) -> list[dict[str, float]]:
    """Streams alone, and beside a flood of vectors, in turns."""
    found: list[dict[str, float]] = []
    async with AsyncEngine.open(config) as engine:
        flood = Flood(engine, vocab_size)
        for repeat in range(repeats + 1):
            alone = await tpot(engine, vocab_size, -2 * repeat)
            async with flood.running():
                # It fills the queue before the streams begin.
                await asyncio.sleep(0.1)
                beside = await tpot(engine, vocab_size, -2 * repeat - 1)
            texts_beside = flood.rate
            async with flood.running():
                await asyncio.sleep(_FLOOD_SECONDS)
            if repeat:
                values = (alone, beside, beside / alone, texts_beside, flood.rate)
                found.append(dict(zip(_FIGURES, values, strict=True)))
    return found


def main() -> None:
    options = parse()
    recorder = Recorder("beside", save=not options.no_save)
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(write_checkpoint(Path(folder), shape), options.overrides)
            size = int(SHAPES[shape]["vocab_size"])
            found = asyncio.run(measure(config, size, options.repeats))
            ranked = asyncio.run(measure_ranks(config, size, options.repeats))
        recorder.add(
            f"{shape}, {_STREAMS} streams beside a flood of vectors",
            figures_of(_FIGURES, found),
            config=config,
            shape=shape,
        )
        recorder.add(
            f"{shape}, {_DOCUMENTS} documents of a reranker",
            figures_of(_PREFIX_FIGURES, ranked),
            config=config,
            shape=shape,
        )


if __name__ == "__main__":
    main()
