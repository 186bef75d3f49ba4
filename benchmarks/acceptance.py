"""How many guesses of each drafter are right: the demo model's held-out prompts, or a file of them.

    python -m benchmarks.acceptance                                   # its head beside look-ups
    python -m benchmarks.acceptance --methods suffix --drafts 16
    python -m benchmarks.acceptance --set model.path=BIG speculation.model=HEAD --methods eagle3

Every guess is verified, whether it pays or not, so figures do not depend on the machine. The same
requests for all: greedy, and with seeds at temperature 1. `tokens a step` is what a step of a row
gives with its drafts, by the tokens of the outputs; 1 without any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, ChatOptions, Config, SamplingParams
from src.core.settings import CHECKOUT, load_config
from src.engine.speculation import Widths, verification

DEMO: Final = CHECKOUT / "configs" / "demo"
METHODS: Final = ("ngram", "suffix", "eagle3")
HEATS: Final = (0.0, 1.0)
# That a step samples.
_POSITIONS: Final = 64


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--drafts", type=int, default=4, metavar="N", help="the most of a row")
    help = "JSON lines with `messages` and perhaps `tools`"
    parser.add_argument("--prompts", type=Path, default=DEMO / "eval.jsonl", help=help)
    parser.add_argument("--output-len", type=int, default=200, metavar="N")
    parser.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE", dest="settings")
    add_common(parser, repeats=1)
    return parser.parse_args(arguments)


def configuration(method: str, drafts: int, settings: Sequence[str]) -> Config:
    head = [("speculation.model", str(DEMO / "eagle3"))] if method == "eagle3" else []
    pairs = [each.partition("=") for each in settings]
    overrides = [
        ("device.type", "cpu"),
        ("model.path", str(DEMO)),
        # With more rows a step would not have room for all drafts of each.
        ("scheduler.max_num_seqs", str(max(1, _POSITIONS // (1 + drafts)))),
        *head,
        ("speculation.method", method),
        ("speculation.num_speculative_tokens", str(drafts)),
        *((key, value) for key, _, value in pairs),
    ]
    return load_config(None, overrides=overrides)


async def ask(
    engine: AsyncEngine, lines: Sequence[dict[str, Any]], heat: float, length: int
) -> int:
    """Answer all, as they would be served; returns how many tokens the outputs have."""

    async def one(at: int, line: dict[str, Any]) -> int:
        params = SamplingParams(temperature=heat, seed=at, max_tokens=length)
        chat = ChatOptions(tools=line.get("tools") or None)
        result = await engine.generate(line["messages"], params, chat=chat)
        return sum(len(completion.token_ids) for completion in result.completions)

    return sum(await asyncio.gather(*(one(at, line) for at, line in enumerate(lines))))


async def measure(
    config: Config, lines: Sequence[dict[str, Any]], length: int, heat: float
) -> dict[str, float]:
    """Figures of one drafter."""
    async with AsyncEngine.open(config) as engine:
        tokens = await ask(engine, lines, heat, length)
        drafted, accepted = engine.metrics.draft_counts
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        rows = engine.metrics.value("vllm:spec_decode_num_drafts_total")
        places = [
            engine.metrics.value(name, position=str(at))
            for at in range(config.speculation.num_speculative_tokens)
        ]
    return {
        "drafts": drafted,
        "right": accepted / max(1, drafted),
        "tokens a step": tokens / (tokens - accepted),
        **{f"place {at}": count / max(1, rows) for at, count in enumerate(places, 1)},
    }


def main() -> None:
    options = parse()
    recorder = Recorder("acceptance", save=not options.no_save)
    text = options.prompts.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    verification.Widths = partial(Widths, always=True)  # type: ignore[misc, assignment]
    for heat in HEATS:
        for method in options.methods:
            config = configuration(method, options.drafts, options.settings)
            found = asyncio.run(measure(config, lines, options.output_len, heat))
            figures = {name: Figure.of("", [value]) for name, value in found.items()}
            recorder.add(f"{method}, temperature {heat:.0f}", figures, config=config)


if __name__ == "__main__":
    main()
