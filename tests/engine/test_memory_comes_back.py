"""An engine that is closed leaves nothing in memory, and that without a garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.engine import devices, startup
from tests.support.engines import small_config
from tests.support.fake_capture import FakeCapture

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=20)
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"compile__enforce_eager": True},
    "compiled": {"compile__enforce_eager": False, "compile__startup": "wait"},
    "captured": {
        "compile__enforce_eager": False,
        "compile__startup": "off",
        # With a timer for the next one whenever nothing runs.
        "compile__cuda_graphs": "background",
    },
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts_of(engine: AsyncEngine) -> list[weakref.ref[Any]]:
    assert engine._parts is not None
    runner = engine._parts.runner
    forward_pass = runner._forward_pass
    cache = forward_pass.kv_cache
    weights = forward_pass.decoder.parameters().values()
    return [
        weakref.ref(part)
        for part in (runner, runner._rows.tokens, *cache.keys, *cache.values, *weights)
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_weights_and_kv_memory_are_gone_when_it_is_closed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, no_collector: None, way: str
) -> None:
    if way == "captured":
        monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    # Who was the engine's owner may keep it.
    engine = AsyncEngine(small_config(checkpoint, **WAYS[way]))
    engine.start()
    await engine.wait_ready()
    await engine.generate([5, 6, 7], GREEDY)
    # One that is not answered to its end.
    abandoned = asyncio.create_task(engine.generate([5, 6, 8], SamplingParams(max_tokens=200)))
    await asyncio.sleep(0.05)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    del abandoned
    parts = parts_of(engine)
    left: list[Any] = []

    def give_back(device_type: str) -> None:
        if way == "captured":
            # What stands in for graphs refers to itself.
            gc.collect()
        left.append([part() for part in parts if part() is not None])

    # By then, or a GPU's allocator would keep it.
    monkeypatch.setattr(devices, "give_back_memory", give_back)
    await engine.close()
    assert left == [[]]
