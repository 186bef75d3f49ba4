"""No row gets the vector of another, whatever comes, fails and leaves beside it.

`test_embeddings.py` compares with transformers. Here every bit is compared with what the engine
gives for the text alone, over a random walk, which its seed makes the same each time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from src import SamplingParams
from src.core.errors import DeadlineExceededError, InvalidRequestError, PromptTooLongError
from src.core.outputs import FinishReason
from src.engine.client import AsyncEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules
from tests.support.engines import random_prompts, small_config, until_idle

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 240
# Longer than the tokens for which admission keeps memory free, so that rows take it from others.
PARAMS = SamplingParams(temperature=0, max_tokens=12)
# Steps are full and memory is short, so that sequences are computed in pieces, some twice.
TIGHT = {
    "cache__num_blocks": 30,
    "model__max_model_len": 64,
    "scheduler__max_num_batched_tokens": 40,
}
# An encoder computes a text as a whole.
WHOLE = {"scheduler__max_num_batched_tokens": 130}


def make_model(directory: Path, name: str) -> None:
    if name == "encoder":
        make_encoder(directory, "bert")
        save_encoder_tokenizer(directory)
    else:
        make_checkpoint(directory, "qwen3", tokenizer=True)
    # Sums of the pieces of a text are kept by row.
    save_modules(directory, pooling={"pooling_mode": "mean"})


class Walk:
    """Requests of all kinds at random times, each of which checks its own answer."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self._engine = engine
        self._source = random.Random(seed)
        self._prompts = random_prompts(40, longest=30, seed=seed)
        self._alone: dict[str, list[Any]] = {}
        self.ends: Counter[str] = Counter()
        self._kinds: dict[str, Callable[..., Awaitable[list[Any]]]] = {
            "embed": self._embed,
            "token_embed": self._token_embed,
        }
        if "generate" in engine.model_info.tasks:
            self._kinds["generate"] = self._generate

    async def _embed(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        return [each.vector for each in await self._engine.embed(prompts, **options)]

    async def _token_embed(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        made = await self._engine.encode(prompts, task="token_embed", **options)
        return [each.values.tolist() for each in made]

    async def _generate(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        calls = [self._engine.generate(prompt, PARAMS, **options) for prompt in prompts]
        results = await asyncio.gather(*calls)
        # What a deadline cuts off is handed out all the same.
        if any(result.finish_reason is FinishReason.DEADLINE for result in results):
            raise DeadlineExceededError("the text is cut off")
        return [result.token_ids for result in results]

    async def ask_alone(self) -> None:
        """Note what each text gives when nothing runs beside it."""
        for kind, ask in self._kinds.items():
            self._alone[kind] = [(await ask([prompt]))[0] for prompt in self._prompts]
        # Whoever gets another's vector has a wrong one.
        for one, other in itertools.combinations(self._alone["embed"], 2):
            assert one != other

    async def run(self) -> None:
        """Begin all requests, and cancel some of those that have begun."""
        tasks: list[asyncio.Task[None]] = []
        for _ in range(NUM_REQUESTS):
            tasks.append(asyncio.create_task(self._one()))
            if self._source.random() < 0.1:
                self._source.choice(tasks[-20:]).cancel()
            if self._source.random() < 0.2:
                await asyncio.sleep(0.004 * self._source.random())
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, asyncio.CancelledError):
                self.ends["cancelled"] += 1
            elif result is not None:
                raise result

    async def _one(self) -> None:
        source = self._source
        kind = source.choice(list(self._kinds))
        chosen = source.choices(range(len(self._prompts)), k=source.randint(1, 4))
        prompts = [self._prompts[index] for index in chosen]
        options: dict[str, Any] = {
            "tenant": source.choice(["one", "other"]),
            "priority": source.randrange(2),
        }
        fault = source.choice(["none"] * 5 + ["late", "long", "id"])
        if fault == "late":
            options["timeout"] = source.choice([1e-4, 0.01, 0.05])
        if fault in ("long", "id"):
            wrong = [5] * 300 if fault == "long" else [5, 320]
            prompts.insert(source.randint(0, len(prompts)), wrong)
            error = PromptTooLongError if fault == "long" else InvalidRequestError
            with pytest.raises(error):
                await self._kinds[kind](prompts, **options)
            self.ends[fault] += 1
            return
        try:
            made = await self._kinds[kind](prompts, **options)
        except DeadlineExceededError:
            assert fault == "late"
            self.ends["late"] += 1
            return
        for index, own in zip(chosen, made, strict=True):
            assert own == self._alone[kind][index], (kind, index)
        self.ends[kind] += 1


@pytest.mark.parametrize(("name", "depth"), [("encoder", 2), ("decoder", 1), ("decoder", 2)])
async def test_each_answer_is_that_of_its_text_alone(tmp_path: Path, name: str, depth: int) -> None:
    make_model(tmp_path, name)
    changes: dict[str, Any] = WHOLE if name == "encoder" else TIGHT
    config = small_config(
        tmp_path,
        **changes,
        model__deterministic=True,
        scheduler__pipeline_depth=depth,
        scheduler__policy="priority",
    )
    async with AsyncEngine.open(config) as engine:
        walk = Walk(engine, seed=depth)
        await walk.ask_alone()
        await walk.run()
        await until_idle(engine)
        # A text of an encoder holds no memory from one step to the next.
        assert bool(engine.stats.preemptions) == (name == "decoder")
    kinds = {"embed", "token_embed"} | ({"generate"} if name == "decoder" else set())
    assert set(walk.ends) >= kinds | {"cancelled", "late", "long", "id"}, walk.ends
    assert sum(walk.ends[kind] for kind in kinds) > NUM_REQUESTS / 3
