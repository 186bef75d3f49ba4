"""This engine as it serves: it answers at once, and compiled code takes over when it is ready."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from turns import Answer, Ask, answer_turns, of_streams


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    from src import AsyncEngine, SamplingParams
    from src.core.settings import load_config

    config = load_config(
        None,
        overrides=[
            ("model.path", options["checkpoint"]),
            ("model.max_model_len", str(options["max_model_len"])),
            ("cache.memory_bytes", str(options["kv_bytes"])),
            ("scheduler.max_num_seqs", str(options["max_num_seqs"])),
            ("observability.stats_interval", "0"),
            *((name, value) for name, value in options.get("settings", {}).items()),
        ],
    )
    runner = asyncio.Runner()
    engine = AsyncEngine(config)

    async def opened() -> None:
        engine.start()
        await engine.wait_ready()

    runner.run(opened())

    async def stream(prompt: list[int], output_len: int) -> AsyncIterator[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        async for delta in engine.stream(prompt, params):
            yield list(delta.token_ids)

    async def compiled() -> None:
        while config.compile.is_on and not engine.stats.compiled:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    asked = of_streams(runner, stream)
    turns = itertools.count()

    def ask(prompts: list[list[int]], output_len: int) -> list[Answer]:
        # The first turn ends the start; later turns measure the steady state.
        if next(turns):
            runner.run(compiled())
        return asked(prompts, output_len)

    return ask, {"dtype": engine.model_info.dtype}


if __name__ == "__main__":
    answer_turns(open_engine)
