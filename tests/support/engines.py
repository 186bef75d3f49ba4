"""Engines on small checkpoints, and their expected answers from transformers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import weakref
from pathlib import Path
from typing import Any

import msgspec
import torch

from src.core.config import Config
from src.engine.client import AsyncEngine
from tests.support.compiling import compile_settings


def small_config(checkpoint: Path, **changes: Any) -> Config:
    """Configuration of an engine on one thread; ``changes`` are ``section__key`` values.

    Nobody drafts unless ``changes`` say so: tests count steps, and compare them. A grammar may take
    long to compile, as it does on a busy machine.
    """
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(checkpoint)},
        "device": {"num_threads": 1, "type": "cpu"},
        "compile": compile_settings(),
        "cache": {"block_size": 4},
        "scheduler": {"max_num_seqs": 8},
        "speculation": {"method": "off"},
        "structured_output": {"compile_seconds": 60.0},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return msgspec.convert(values, Config)


def random_prompts(count: int, *, longest: int, seed: int = 0, vocab_size: int = 320) -> list[Any]:
    """Token-id prompts of 1 to ``longest`` tokens, without special tokens."""
    source = random.Random(seed)
    return [
        [source.randrange(3, vocab_size) for _ in range(source.randint(1, longest))]
        for _ in range(count)
    ]


def greedy(model: Any, prompt: list[int], max_tokens: int, end: int | None = 2) -> list[int]:
    """The greedy continuation by transformers, without a cache, including the end token."""
    known = _GREEDY.setdefault(model, {})
    key = (tuple(prompt), max_tokens, end)
    if key not in known:
        with torch.inference_mode():
            known[key] = _greedy(model, prompt, max_tokens, end)
    return known[key]


def _greedy(model: Any, prompt: list[int], max_tokens: int, end: int | None) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]


# Model -> (prompt, max_tokens, end) -> tokens; cached because many tests ask for the same.
_GREEDY: weakref.WeakKeyDictionary[Any, dict[Any, list[int]]] = weakref.WeakKeyDictionary()


async def until_idle(engine: AsyncEngine) -> None:
    """Wait for the end of what still runs for nobody, then assert that all is free.

    What was cancelled ends with the step that computes it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while not is_idle(engine):
                await asyncio.sleep(0.005)
    assert_idle(engine)


def is_idle(engine: AsyncEngine) -> bool:
    """Whether nothing runs, nothing waits, and every block is free."""
    stats = engine.stats
    return (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def assert_idle(engine: AsyncEngine) -> None:
    """Assert that nothing runs, nothing waits, and every block is free."""
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.pool_is_whole
