"""What speculation brings and costs: on against off, on two engines in one process, in turns.

    python -m benchmarks.speculation                                  # the demo model, all cases
    python -m benchmarks.speculation --file SmolLM2.gguf repeated     # that model, one case
    python -m benchmarks.speculation --rows 8 32 --repeats 15 -- plain

Ratios are of one pair: time per token off over on, so more is better, and 1 is no difference.
Beside each stands the scatter of the same without any difference, off over the off of the pair
before, and the ratio of the fastest of all, which other work on the machine disturbs least.
`--cpu` takes processor time of the whole process instead, prompts included, where other work on the
machine makes times say nothing; use it with --set device.num_threads=1.

- repeated: a text that stands in the prompt several times goes on
- predicted: `prediction` is the answer
- again: a question that was asked before
- plain: random prompts, greedy and at temperature 1: what looking for drafts costs
- neighbour: seven rows at temperature 1 beside one that repeats itself; the time of the seven
- first: time to the first token of a request that arrives while seven repeat themselves
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.load import random_prompts
from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, Config, SamplingParams
from src.core.settings import load_config
from src.engine.speculation.drafter import DRAFTERS
from src.ops.build.kernels import ensure_built

CASES: Final = ("repeated", "predicted", "again", "plain", "neighbour", "first")
_STORY: Final = (
    "The red fox ran over the old bridge. Then the small boat came down the wide river, and "
    "seven men sang a song about the sea. "
)
_QUESTION: Final = "A story about a fox, a bridge and a boat:"


@dataclass(frozen=True)
class Row:
    """One request of a case, and whether its time counts."""

    prompt: Any
    params: SamplingParams
    prediction: str | list[int] | None = None
    counts: bool = True
    delay: float = 0.0
    first: bool = False


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--file", type=Path, metavar="GGUF", default=os.environ.get("SMOLLM2"))
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32), metavar="N")
    parser.add_argument("--output-len", type=int, default=128, metavar="N")
    parser.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--cpu", action="store_true", help="processor time, on a busy machine")
    add_common(parser, repeats=15)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {min(unknown)}, there are {', '.join(CASES)}")
    return options


def configuration(file: Path | str | None, method: str, settings: Sequence[str]) -> Config:
    overrides = [] if file is None else [("model.path", str(file))]
    overrides += [
        ("cache.memory_bytes", str(2**29)),
        ("device.type", "cpu"),
        ("compile.startup", "wait"),
        ("speculation.method", method),
        ("observability.stats_interval", "0"),
    ]
    pairs = [each.partition("=") for each in settings]
    given = [(key, value) for key, _, value in pairs]
    if method == "off":
        given = [(key, value) for key, value in given if not key.startswith("speculation.")]
    return load_config(None, overrides=[*overrides, *given])


async def seconds(engine: AsyncEngine, rows: Sequence[Row], *, cpu: bool) -> float:
    """Mean seconds of a token behind the first, or to the first, of the rows that count.

    ``cpu``: processor time of all of it instead.
    """
    before = time.process_time()

    async def one(row: Row) -> float:
        await asyncio.sleep(row.delay)
        begun, first, count, behind = time.perf_counter(), 0.0, 0, 0
        options = {} if row.prediction is None else {"prediction": row.prediction}
        async for delta in engine.stream(row.prompt, row.params, **options):
            if not first:
                first, behind = time.perf_counter(), len(delta.token_ids)
            count += len(delta.token_ids)
        if row.first:
            return first - begun
        return (time.perf_counter() - first) / max(1, count - behind)

    times = await asyncio.gather(*map(one, rows))
    if cpu:
        return time.process_time() - before
    return statistics.fmean([taken for taken, row in zip(times, rows, strict=True) if row.counts])


def asked(length: int, **params: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": length, "ignore_eos": True} | params))


async def rows_of(
    case: str, engine: AsyncEngine, count: int, length: int, turn: int
) -> dict[str, list[Row]]:
    """What is measured in a turn: name -> requests. ``engine`` may be asked for answers."""
    size = engine.model_info.vocab_size
    if case == "repeated":
        # Rows that share no prefix.
        texts = [f"{_STORY[row:]}{_STORY * 3}"[: 3 * len(_STORY)] for row in range(count)]
        return {case: [Row(text, asked(length)) for text in texts]}
    if case in ("predicted", "again"):
        rows = []
        for row in range(count):
            prompt = f"{turn} {row} {_QUESTION}"
            answer = await engine.generate(prompt, asked(length, temperature=0.8, seed=row))
            told = answer.token_ids if case == "predicted" else None
            rows.append(Row(prompt, asked(length, temperature=0.8, seed=row), told))
        return {case: rows}
    prompts = random_prompts(count, 24, size, seed=100 + turn)
    if case == "plain":
        return {
            f"plain, temperature {heat}": [
                Row(prompt, asked(length, temperature=heat, seed=turn)) for prompt in prompts
            ]
            for heat in (0, 1)
        }
    repeats = Row(_STORY * 4, asked(2 * length), counts=False)
    if case == "neighbour":
        return {
            case: [repeats]
            + [Row(prompt, asked(length, temperature=1, seed=turn)) for prompt in prompts[1:]]
        }
    newcomers = [
        Row(
            random_prompts(1, 100, size, seed=turn * 9 + at)[0],
            asked(1),
            delay=0.05 * at,
            first=True,
        )
        for at in range(1, 5)
    ]
    return {case: [repeats] * 7 + newcomers}


async def measure(
    case: str,
    on: AsyncEngine,
    off: AsyncEngine,
    count: int,
    length: int,
    pairs: int,
    *,
    cpu: bool,
) -> dict[str, tuple[list[float], list[float], float]]:
    """Name -> ratios of the pairs, those of off against off, and the ratio of the fastest."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    fastest: dict[tuple[str, AsyncEngine], float] = {}
    before: dict[str, float] = {}
    for turn in range(pairs + 1):
        for name, rows in (await rows_of(case, off, count, length, turn)).items():
            if case == "again":
                await seconds(on, rows, cpu=cpu)
            taken = {}
            for engine in (on, off) if turn % 2 else (off, on):
                taken[engine] = await seconds(engine, rows, cpu=cpu)
            ratios, scatter = found.setdefault(name, ([], []))
            # The first pair warms up.
            if turn:
                for engine, each in taken.items():
                    key = name, engine
                    fastest[key] = min(each, fastest.get(key, each))
                ratios.append(taken[off] / taken[on])
                scatter.append(before[name] / taken[off])
            before[name] = taken[off]
    return {name: (*lists, fastest[name, off] / fastest[name, on]) for name, lists in found.items()}


def acceptance(engine: AsyncEngine) -> str:
    """Drafts since the start, by who has drafted."""
    # Reads the engine.
    total, _ = engine.metrics.draft_counts
    found = []
    for source in DRAFTERS:
        drafted, accepted = (
            engine.metrics.value(f"slipstream_{name}_total", source=source)
            for name in ("draft_tokens", "accepted_draft_tokens")
        )
        if drafted:
            found.append(f"{source} {accepted:.0f} of {drafted:.0f}")
    return f"{total:.0f} drafts: {', '.join(found)}" if found else "none"


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("speculation", save=not options.no_save)
    kernels = ensure_built(wait=True)
    file = options.file
    name = "demo" if file is None else Path(file).stem
    config = configuration(file, "auto", options.settings)
    async with (
        AsyncEngine.open(config) as on,
        AsyncEngine.open(configuration(file, "off", options.settings)) as off,
    ):
        for case in options.cases or CASES:
            sizes = options.rows if case not in ("neighbour", "first") else (8,)
            for count in sizes:
                length = min(options.output_len, on.model_info.max_model_len // 4)
                measured = await measure(
                    case, on, off, count, length, options.repeats, cpu=options.cpu
                )
                for what, (ratios, scatter, best) in measured.items():
                    recorder.add(
                        f"{name}: {what}, {count} rows",
                        {
                            "off over on": Figure.of("", ratios),
                            "off over off": Figure.of("", scatter),
                            "fastest off over fastest on": Figure.of("", [best]),
                        },
                        config=config,
                        kernels=kernels,
                        rows=count,
                        processor_time=options.cpu,
                    )
                print(f"  drafts accepted so far: {acceptance(on)}")


if __name__ == "__main__":
    asyncio.run(run(parse()))
