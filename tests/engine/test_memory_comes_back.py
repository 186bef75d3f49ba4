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
from src.core.errors import EngineDeadError, ShuttingDownError
from src.engine import startup
from src.engine.execution.compilation import ProgramCompilation
from src.engine.scheduling.scheduler import Scheduler
from src.ops.build.cache_root import cache_root
from tests.support.engines import small_config
from tests.support.fake_capture import FakeCapture
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"compile__enforce_eager": True},
    "compiled": {"compile__enforce_eager": False, "compile__startup": "wait"},
    "compiled just in time": {"compile__enforce_eager": False, "compile__startup": "wait"},
    "closed while it compiles": {"compile__enforce_eager": False, "compile__startup": "background"},
    "captured": {
        "compile__enforce_eager": False,
        "compile__startup": "off",
        "compile__cuda_graphs": "background",
    },
}


class Watch:
    """What engines had, and what of it was left when memory was given back."""

    def __init__(self) -> None:
        self.parts: list[weakref.ref[Any]] = []
        self.left: list[list[Any]] = []
        self.fakes_graphs = False

    def note(self, engine: AsyncEngine) -> None:
        probe = Probe(engine)
        weights = probe.model.parameters().values()
        every = (probe.rows.tokens, *probe.kv_cache.named().values(), *weights)
        self.parts = [weakref.ref(part) for part in every]

    def give_back(self, device_type: str) -> None:
        if self.fakes_graphs:
            # What stands in for graphs refers to itself.
            gc.collect()
        self.left.append([part() for part in self.parts if part() is not None])


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    # By then, or a GPU's allocator would keep it.
    monkeypatch.setattr(startup, "give_back_memory", watch.give_back)
    gc.collect()
    gc.disable()
    yield watch
    gc.enable()


async def started(engine: AsyncEngine) -> AsyncEngine:
    engine.start()
    await engine.wait_ready()
    return engine


@pytest.mark.slow
@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
@pytest.mark.parametrize("way", WAYS)
async def test_weights_and_kv_memory_are_gone_when_it_is_closed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch, way: str
) -> None:
    if way == "captured":
        watch.fakes_graphs = True
        monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    if way in ("compiled just in time", "closed while it compiles"):

        def begin(_config: Any, _path: Any, _device: Any, timeline: Any, *_: Any, **__: Any) -> Any:
            return ProgramCompilation(
                None, 1, cache_root(), timeline, awaited=True, most_tokens=2048
            )

        monkeypatch.setattr(startup, "_begin_compilation", begin)
    # Who was the engine's owner keeps it, and what was asked of it.
    engine = await started(AsyncEngine(small_config(checkpoint, **WAYS[way])))
    await engine.generate([5, 6, 7], GREEDY)
    abandoned = asyncio.create_task(engine.generate([5, 6, 8], LONG))
    running = asyncio.create_task(engine.generate([5, 6, 9], LONG))
    await asyncio.sleep(0.02)
    abandoned.cancel()
    watch.note(engine)
    await engine.close()
    assert watch.left == [[]]
    with pytest.raises(ShuttingDownError):
        await running


async def test_an_engine_that_failed_keeps_nothing_either(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    config = small_config(checkpoint, compile__enforce_eager=True)
    engine = await started(AsyncEngine(config))
    watch.note(engine)
    running = asyncio.create_task(engine.generate([5, 6, 7], LONG))
    await asyncio.sleep(0.02)
    monkeypatch.setattr(Scheduler, "commit", fail)
    with pytest.raises(EngineDeadError, match="the engine stopped"):
        await running
    await engine.close()
    assert watch.left == [[]]
    assert isinstance(engine.status.error, ValueError)


async def test_a_start_that_fails_keeps_nothing_either(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    made: list[weakref.ref[Any]] = []

    def fail(*given: Any) -> None:
        model = given[4]
        made.extend(weakref.ref(weight) for weight in model.parameters().values())
        raise ValueError("no")

    monkeypatch.setattr(startup, "_settle_code", fail)
    engine = AsyncEngine(small_config(checkpoint, compile__enforce_eager=True))
    with pytest.raises(EngineDeadError):
        await started(engine)
    await engine.close()
    assert made
    assert [weight() for weight in made if weight() is not None] == []
