"""This engine, as any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from turns import Ask, answer_turns, of_streams


def open_engine(options: dict[str, Any]) -> tuple[Ask, dict[str, Any]]:
    from src import AsyncEngine, SamplingParams
    from src.core.settings import load_config

    config = load_config(
        None,
        overrides=[
            ("model.path", options["checkpoint"]),
            ("model.max_model_len", str(options["max_model_len"])),
            ("cache.memory_bytes", str(options["kv_bytes"])),
            ("compile.startup", options["startup"]),
            ("scheduler.max_num_seqs", str(options["max_num_seqs"])),
            ("observability.stats_interval", "0"),
            *((name, value) for name, value in options.get("settings", {}).items()),
        ],
    )
    runner = asyncio.Runner()
    engine = runner.run(AsyncEngine.open(config).__aenter__())

    async def stream(prompt: list[int], output_len: int) -> AsyncIterator[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        async for delta in engine.stream(prompt, params):
            yield list(delta.token_ids)

    return of_streams(runner, stream), {"dtype": engine.model_info.dtype}


if __name__ == "__main__":
    answer_turns(open_engine)
