"""Adapters that are loaded and unloaded while callers go away, and while the engine ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from src import AsyncEngine, SamplingParams
from src.core.config import LoraSection
from src.core.errors import ModelLoadError, ShuttingDownError
from src.engine.requests.adapters import Adapters
from src.models.adapters.reader import AdapterWeights
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import small_config

pytestmark = pytest.mark.anyio


class SlowReader:
    """Reads adapters that have nothing, and only when it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.started = threading.Semaphore(0)
        self.most = self._running = 0

    def __call__(self, path: Path) -> AdapterWeights:
        self._running += 1
        self.most = max(self.most, self._running)
        self.started.release()
        assert self.may_end.wait(30)
        self._running -= 1
        if path.name == "broken":
            raise ModelLoadError("it is broken")
        return AdapterWeights({}, b"digest", 1)


def adapters_of(reader: SlowReader) -> Adapters:
    return Adapters(LoraSection(slots=1), reader, lambda *_: None, lambda _: None, ())


@pytest.mark.parametrize("path", ["good", "broken"])
async def test_one_adapter_is_read_at_a_time_though_callers_go_away(path: str) -> None:
    reader = SlowReader()
    adapters = adapters_of(reader)
    first = asyncio.create_task(adapters.load("first", path))
    await asyncio.to_thread(reader.started.acquire)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(adapters.load("second", "good"))
    third = asyncio.create_task(adapters.load("third", "good"))
    await asyncio.sleep(0.05)
    third.cancel()
    reader.may_end.set()
    await second
    assert reader.most == 1
    # What was being read is there, what waited is not.
    assert list(adapters.loaded) == (["first"] if path == "good" else []) + ["second"]


async def test_an_adapter_that_is_replaced_counts_while_it_is_used() -> None:
    reader = SlowReader()
    reader.may_end.set()
    section = LoraSection(slots=1, max_adapters=2)
    dropped: list[int] = []
    adapters = Adapters(section, reader, lambda *_: None, dropped.append, ())
    await adapters.load("it", "good")
    with adapters.using("it"):
        await adapters.load("it", "good", replaces=True)
        # The newer one is not used: another one takes its place.
        await adapters.load("it", "good", replaces=True)
        assert dropped == [2]
        with adapters.using("it"):
            for name in ("it", "other"):
                with pytest.raises(ModelLoadError, match=r"lora\.max_adapters = 2"):
                    await adapters.load(name, "good", replaces=True)
    assert dropped == [2, 1]
    await adapters.load("it", "good", replaces=True)
    await adapters.load("other", "good")


async def test_an_adapter_that_is_taken_into_use_while_another_one_is_read() -> None:
    reader = SlowReader()
    section = LoraSection(slots=1, max_adapters=1)
    adapters = Adapters(section, reader, lambda *_: None, lambda _: None, ())
    reader.may_end.set()
    await adapters.load("it", "good")
    reader.may_end.clear()
    await asyncio.to_thread(reader.started.acquire)
    loading = asyncio.create_task(adapters.load("it", "good", replaces=True))
    await asyncio.to_thread(reader.started.acquire)
    with adapters.using("it") as used:
        reader.may_end.set()
        with pytest.raises(ModelLoadError, match=r"lora\.max_adapters = 1"):
            await loading
    assert adapters.loaded["it"].adapter is used


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1, tokenizer=True
    )


async def test_an_engine_that_is_closed_while_an_adapter_is_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "it", load_reference(checkpoint))
    config = small_config(checkpoint, lora__slots=1, compile__enforce_eager=True)
    async with AsyncEngine.open(config) as engine:
        adapters = engine.adapters
        reader = SlowReader()
        monkeypatch.setattr(adapters, "_read", reader)
        loading = asyncio.create_task(adapters.load("it", str(path)))
        await asyncio.to_thread(reader.started.acquire)
    reader.may_end.set()
    with pytest.raises(ShuttingDownError):
        await loading
    assert not adapters.loaded


async def test_an_engine_that_is_closed_while_an_adapter_leaves(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "it", load_reference(checkpoint))
    adapters = {"it": str(path)}
    config = small_config(checkpoint, lora__adapters=adapters, compile__enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with AsyncEngine.open(config) as engine:
        held = engine.adapters
        async with engine.submit([5, 6, 7], params, lora="it") as submission:
            await submission.take()
            unloading = asyncio.create_task(held.unload("it"))
            await asyncio.sleep(0)
            await engine.close()
        await asyncio.wait_for(unloading, 30)
