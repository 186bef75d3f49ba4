"""How late the event loop is while helpers of the kernels compute and keep watch."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.loop_lateness import while_idle
from src import Config
from tests.support.engines import small_config

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def config_with(threads: int) -> Config:
    """Of code that is compiled for other tests as well."""
    return small_config(
        DEMO,
        device__num_threads=threads,
        compile__enforce_eager=False,
        compile__startup="wait",
        cache__block_size=16,
        scheduler__max_num_seqs=64,
    )


@pytest.mark.anyio
async def test_a_loop_that_is_held_up_is_late() -> None:
    task = asyncio.create_task(while_idle(0.2))
    await asyncio.sleep(0.05)
    time.sleep(0.05)  # noqa: ASYNC251 - holds up the loop
    late = await task
    assert max(late) >= 0.04
    assert len(late) > 20
