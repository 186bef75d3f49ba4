"""What speculation brings and costs: on against off, on two engines in one process, in turns.

    python -m benchmarks.speculation                                  # the demo model, all cases
    python -m benchmarks.speculation --file SmolLM2.gguf repeated     # that model, one case
    python -m benchmarks.speculation --rows 8 32 --repeats 15 -- plain

Ratios are of one pair: time per token off over on, so more is better, and 1 is no difference.
A pair is many short runs, on and off in turns, so that whatever else the machine does meets both;
each run of both engines has texts of its own. `--seconds` says how long the runs of each engine
take together. A run of on is compared with the run of off beside it. Of these ratios the smallest
and the largest quarter count for nothing, the geometric mean of the others is the pair's.

Beside each ratio stands the same without any difference: runs of off over the next ones of off,
half as many, so it scatters by 1.4 more. `median` has the bounds within which the median of more
pairs lies, 95 of 100 times. The ratio of the fastest of all runs is what other work on the machine
disturbs least. `--cpu` takes processor time of the whole process instead, prompts included, where
other work on the machine makes times say nothing; use it with --set device.num_threads=1.

Behind each case stands how many drafts were right: by who has drafted, and for each place among a
row's drafts the part of the rows in which that one was right. At the end of an engine's cases
stands what a draft has cost, as it was measured while serving: how much longer each makes a step,
as a part of the step without any, by the tokens that the step has anyway and by the drafts in it.
Both are kept with the figures.

What `off` costs against a commit before is not measured here, where one process has one commit's
code: `python -m benchmarks.commits COMMIT --set speculation.method=off`.

- repeated: a line that stands in the prompt eight times, and what was said to that, go on
- predicted: `prediction` is the answer
- again: a question that was asked before, on engines that keep what they said
- json: twenty objects of one form, by a schema
- plain: random prompts, greedy and at temperature 1: what looking for drafts costs
- neighbour: seven rows at temperature 1 beside one that repeats itself; the time of the seven
- first: time to the first token of a request that arrives while seven repeat themselves
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.load import random_prompts
from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, Config, SamplingParams
from src.core.settings import load_config
from src.core.structured_output import StructuredOutput
from src.engine.speculation import Widths, verification
from src.engine.speculation.drafter import SOURCES
from src.engine.speculation.guess import FORCED
from src.ops.build.kernels import ensure_built

# Case -> how many rows it is measured with.
CASES: Final[Mapping[str, Sequence[int]]] = {
    "repeated": (1, 8),
    "predicted": (1, 8),
    "again": (1, 8),
    "json": (1, 8),
    "plain": (1, 8, 32, 128),
    "neighbour": (8,),
    "first": (8,),
}
_FIXED: Final = ("neighbour", "first")
# Bytes of outputs that engines of the case `again` keep, unless a setting says how many.
_KEPT_BYTES: Final = 1 << 20
# As much as all cases need. An engine touches that much before its requests come, see `idle`.
_KV_BYTES: Final = 256 << 20
# A process that takes less processor time in 0.2 seconds is idle; and the longest wait for that.
_IDLE_SECONDS: Final = 0.01
_LONGEST_WAIT: Final = 60.0
# Whoever may draft, grammars included.
_DRAFTING: Final = sorted({FORCED, *(each for some in SOURCES.values() for each in some)})
# Runs of each engine in a pair.
_FEWEST_RUNS, _MOST_RUNS = 2, 64
_ITEM: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "count"],
    "additionalProperties": False,
}
_OBJECTS: Final = StructuredOutput.json(
    {"type": "array", "minItems": 20, "maxItems": 20, "items": _ITEM}, any_whitespace=False
)
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
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="instead of a case's own")
    help = "that each engine's runs of a pair take together, about"
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help=help)
    parser.add_argument("--output-len", type=int, default=128, metavar="N")
    parser.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--cpu", action="store_true", help="processor time, on a busy machine")
    add_common(parser, repeats=15)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {min(unknown)}, there are {', '.join(CASES)}")
    return options


def configuration(
    file: Path | str | None,
    method: str,
    settings: Sequence[str],
    rows: int,
    *,
    keeps: bool = False,
) -> Config:
    """Of an engine for so many rows; ``keeps``: it drafts from what it said before."""
    overrides = [] if file is None else [("model.path", str(file))]
    overrides += [
        ("cache.memory_bytes", str(_KV_BYTES)),
        ("scheduler.max_num_seqs", str(max(64, rows))),
        ("device.type", "cpu"),
        ("compile.startup", "wait"),
        ("speculation.method", method),
        ("observability.stats_interval", "0"),
    ]
    if keeps:
        overrides.append(("speculation.shared_history_bytes", str(_KEPT_BYTES)))
    pairs = [each.partition("=") for each in settings]
    given = [(key, value) for key, _, value in pairs]
    if method == "off":
        given = [(key, value) for key, value in given if not key.startswith("speculation.")]
        overrides = [each for each in overrides if each[0] != "speculation.shared_history_bytes"]
    return load_config(None, overrides=[*overrides, *given])


async def idle() -> None:
    """Wait until this process has nothing to do.

    Engines touch KV memory while they are idle. Whoever has touched less of it before the first run
    would be slower, also with no difference between both.
    """
    ended = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < ended:
        before = time.process_time()
        await asyncio.sleep(0.2)
        if time.process_time() - before < _IDLE_SECONDS:
            return


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
        # Rows that share no prefix. Models go on word for word with what stands on eight lines, or
        # repeat something of their own soon.
        words = _STORY.split()
        begins = [(turn * count + row) % len(words) for row in range(count)]
        lines = [" ".join(words[begin:] + words[:begin]) for begin in begins]
        said = [await engine.generate(f"{line}\n" * 8, asked(length)) for line in lines]
        texts = [[*each.prompt_token_ids, *each.token_ids] for each in said]
        return {case: [Row(text, asked(length)) for text in texts]}
    if case in ("predicted", "again"):
        rows = []
        for row in range(count):
            prompt = f"{turn} {row} {_QUESTION}"
            answer = await engine.generate(prompt, asked(length, temperature=0.8, seed=row))
            told = answer.token_ids if case == "predicted" else None
            rows.append(Row(prompt, asked(length, temperature=0.8, seed=row), told))
        return {case: rows}
    if case == "json":
        longest = engine.model_info.max_model_len - 64
        params = SamplingParams(temperature=0, max_tokens=longest, structured_output=_OBJECTS)
        return {case: [Row(f"{turn} {row} Twenty of them:", params) for row in range(count)]}
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


class Pairs:
    """Ratios of pairs so far, and the fastest run of each engine."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.scatter: list[float] = []
        self._fastest = [math.inf, math.inf]

    def add(self, off: Sequence[float], on: Sequence[float]) -> None:
        """A pair: seconds of each run, in turns."""
        self.ratios.append(typical_ratio(off, on))
        self.scatter.append(typical_ratio(off[::2], off[1::2]))
        for at, runs in enumerate((off, on)):
            self._fastest[at] = min(self._fastest[at], *runs)

    def figures(self) -> dict[str, Figure]:
        """What is printed and kept."""
        off, on = self._fastest
        low, high = median_bounds(self.ratios)
        median = statistics.median(self.ratios)
        return {
            "off over on": Figure.of("", self.ratios),
            "median of off over on": Figure("", median, low, high, len(self.ratios)),
            "off over off": Figure.of("", self.scatter),
            "fastest off over fastest on": Figure.of("", [off / on]),
        }


def typical_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The geometric mean of the ratios of both, without the smallest and the largest quarter."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    cut = len(ratios) // 4
    return statistics.geometric_mean(ratios[cut : len(ratios) - cut])


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which a median lies in 95 of 100 cases or more, whatever the distribution.

    How many of ``n`` values are below the true median is binomial. So it lies between the k-th
    smallest and the k-th largest, unless fewer than k are on one side of it.
    """
    ordered, count = sorted(values), len(values)
    beyond, below = 0, 0.0
    while beyond < (count - 1) // 2:
        below += math.comb(count, beyond) / 2**count
        if 2 * below > 0.05:
            break
        beyond += 1
    at = max(0, beyond - 1)
    return ordered[at], ordered[count - 1 - at]


def runs_for(seconds: float, one: float) -> int:
    """How many runs an engine has in a pair, an even number, if one takes ``one`` seconds."""
    return max(_FEWEST_RUNS, min(_MOST_RUNS, 2 * round(seconds / max(one, 1e-6) / 2)))


async def measure(
    case: str, on: AsyncEngine, off: AsyncEngine, count: int, options: argparse.Namespace
) -> dict[str, Pairs]:
    """Name -> what was measured under it."""
    length = min(options.output_len, on.model_info.max_model_len // 4)
    found: dict[str, Pairs] = {}
    runs, number = _FEWEST_RUNS, 0
    for pair in range(options.repeats + 1):
        taken: dict[str, tuple[list[float], list[float]]] = {}
        begun = time.perf_counter()
        for _ in range(runs):
            for name, rows in (await rows_of(case, off, count, length, number)).items():
                if case == "again":
                    await seconds(on, rows, cpu=options.cpu)
                each = taken.setdefault(name, ([], []))
                # Each begins every second pair; none runs twice in a row.
                for which in (pair % 2, 1 - pair % 2):
                    each[which].append(await seconds((off, on)[which], rows, cpu=options.cpu))
            number += 1
        # The first pair warms up, and says how many runs make a pair.
        if pair:
            for name, (without, with_) in taken.items():
                found.setdefault(name, Pairs()).add(without, with_)
        else:
            engines = 2 * len(taken)
            runs = runs_for(options.seconds, (time.perf_counter() - begun) / (runs * engines))
    return found


@dataclass(frozen=True)
class Acceptance:
    """Drafts since the start, or since another count.

    Attributes
    ----------
    rows
        Rows of steps that verified drafts, each step's counted.
    by_source
        Who has drafted -> how many tokens, and how many of them were right.
    right_at
        For each place among a row's drafts, in how many of these rows that one was right.
    """

    rows: float
    by_source: Mapping[str, tuple[float, float]]
    right_at: Sequence[float]

    @classmethod
    def of(cls, engine: AsyncEngine) -> Acceptance:
        """All of an engine."""
        metrics = engine.metrics
        # Reads the engine.
        _ = metrics.draft_counts
        names = [f"slipstream_{each}_total" for each in ("draft_tokens", "accepted_draft_tokens")]
        place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        most = engine.config.speculation.num_speculative_tokens
        return cls(
            metrics.value("vllm:spec_decode_num_drafts_total"),
            {
                source: (
                    metrics.value(names[0], source=source),
                    metrics.value(names[1], source=source),
                )
                for source in _DRAFTING
            },
            [metrics.value(place, position=str(at)) for at in range(most)],
        )

    def since(self, before: Acceptance) -> Acceptance:
        """What has come since."""
        return Acceptance(
            self.rows - before.rows,
            {
                source: (drafted - before.by_source[source][0], right - before.by_source[source][1])
                for source, (drafted, right) in self.by_source.items()
            },
            [now - then for now, then in zip(self.right_at, before.right_at, strict=True)],
        )

    @property
    def details(self) -> dict[str, Any]:
        """What is kept with a case's figures."""
        return {
            "drafting_rows": self.rows,
            "drafted_and_right": {
                source: counts for source, counts in self.by_source.items() if counts[0]
            },
            "right_at": self.right_at,
        }

    def __str__(self) -> str:
        if not self.rows:
            return "no drafts"
        found = [
            f"{source} {right:.0f} of {drafted:.0f}"
            for source, (drafted, right) in self.by_source.items()
            if drafted
        ]
        last = max((at for at, count in enumerate(self.right_at, 1) if count), default=1)
        places = " ".join(f"{count / self.rows:.2f}" for count in self.right_at[:last])
        return f"right drafts: {', '.join(found)}; by place {places} of {self.rows:.0f} rows"


def cost_figures(widths: Widths) -> dict[str, Figure]:
    """What steps take without drafts, and the price of a draft, as an engine has measured them."""
    found = {
        f"{tokens} tokens, no drafts": Figure("ms", *[1000 * seconds] * 3, repeats=1)
        for tokens, seconds in widths.costs.usual_seconds.items()
    }
    for tokens, drafts, price, steps in widths.costs.measured:
        name = f"{_range(tokens)} tokens, {_range(drafts)} drafts"
        found[name] = Figure("of the step", price, price, price, repeats=steps)
    return found


def _range(bounds: tuple[int, int | None]) -> str:
    least, most = bounds
    if most is None:
        return f"{least} or more"
    return str(least) if least == most else f"{least} to {most}"


def engines_of(options: argparse.Namespace) -> dict[tuple[bool, bool], list[tuple[str, int]]]:
    """Cases and rows by the engines that they need: for many rows, and with kept outputs."""
    plan: dict[tuple[bool, bool], list[tuple[str, int]]] = {}
    for case in options.cases or CASES:
        sizes = CASES[case] if case in _FIXED else options.rows or CASES[case]
        for count in sizes:
            plan.setdefault((count > 64, case == "again"), []).append((case, count))
    return plan


async def run(options: argparse.Namespace) -> None:
    recorder = Recorder("speculation", save=not options.no_save)
    kernels = ensure_built(wait=True)
    name = "demo" if options.file is None else Path(options.file).stem
    made: list[Widths] = []

    def noted() -> Widths:
        made.append(Widths())
        return made[-1]

    # Each engine that drafts makes one.
    verification.Widths = noted  # type: ignore[misc, assignment]
    for (_, keeps), cases in engines_of(options).items():
        most = max(count for _, count in cases)
        config, without = (
            configuration(options.file, method, options.settings, most, keeps=keeps)
            for method in ("auto", "off")
        )
        async with AsyncExitStack() as stack:
            on = await stack.enter_async_context(AsyncEngine.open(config))
            off = await stack.enter_async_context(AsyncEngine.open(without))
            await idle()
            about = {"config": config, "kernels": kernels}
            for case, count in cases:
                before = Acceptance.of(on)
                found = await measure(case, on, off, count, options)
                accepted = Acceptance.of(on).since(before)
                for what, pairs in found.items():
                    recorder.add(
                        f"{name}: {what}, {count} rows",
                        pairs.figures(),
                        **about,
                        rows=count,
                        processor_time=options.cpu,
                        **accepted.details,
                    )
                print(f"  {accepted}", flush=True)
            told = ", ".join(dict.fromkeys(case for case, _ in cases))
            for widths in made:
                recorder.add(f"{name}: what drafts cost in {told}", cost_figures(widths), **about)
            made.clear()


if __name__ == "__main__":
    asyncio.run(run(parse()))
