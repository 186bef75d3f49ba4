"""Many requests that come, go, wait, share and fail in a small engine, with a hostile drafter.

Whoever is answered is answered as alone, without drafts; whoever goes away early has the beginning
of that answer; and in the end everything is free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from src import AsyncEngine, SamplingParams
from src.core.outputs import Completion, FinishReason, GenerationResult
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import ASKED, answer, config
from tests.engine.speculation.test_restricted import ASKED as RESTRICTED
from tests.support.engines import random_prompts, until_idle

FREE = (
    *("greedy, scored", "seeded 1.5", "several", "penalized", "ends", "stops", "bad words"),
    *("biased", "prompt", "one", "two", "thinking", "penalized, drawn"),
)
BOUND = ("schema, scored", "regex that goes on", "choice", "call", "thinking, then a form")
# What may become of a request.
FATES = ("stays", "stays", "stays", "goes away", "is aborted", "ends in time", "stops reading")


@dataclass
class Guest:
    """A request, what becomes of it, and its answer alone."""

    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    fate: str
    expected: GenerationResult | None = None
    found: GenerationResult | None = None
    # Of a reader: per completion, the tokens that it has seen.
    seen: dict[int, list[int]] = field(default_factory=dict)


def invite(seed: int, count: int, adapters: Sequence[str | None] = (None,)) -> list[Guest]:
    """Requests of every kind, many of which share the beginnings of their prompts."""
    source = random.Random(seed)
    stems = random_prompts(3, longest=20, seed=seed)
    kinds = [*(ASKED[name] for name in FREE), *(RESTRICTED[name] for name in BOUND)]
    guests = []
    for index in range(count):
        stem = source.choice(stems)
        own = [source.randrange(3, 320) for _ in range(source.randint(0, 12))]
        params = kinds[index % len(kinds)]
        if source.random() < 0.2 and params.n == 1 and params.temperature:
            params = msgspec.structs.replace(params, n=source.randint(2, 3))
        options: dict[str, Any] = {"lora": source.choice(adapters)}
        if source.random() < 0.3:
            options["cache_salt"] = source.choice("ab")
        if source.random() < 0.3:
            options["tenant"] = source.choice(("one", "two"))
        guests.append(Guest([*stem, *own], params, options, source.choice(FATES)))
    return guests


async def serve(engine: AsyncEngine, guest: Guest, source: random.Random) -> None:
    """Bring a request in at some time, and let its fate come."""
    await asyncio.sleep(source.random() * 0.3)
    options = dict(guest.options)
    expected = guest.expected
    assert expected is not None
    if source.random() < 0.4:
        # Right, wrong from some token on, or of somebody else.
        said = [*expected.token_ids]
        if said and source.random() < 0.6:
            said[source.randrange(len(said))] = 7
        options["prediction"] = said or [7, 8]
    if guest.fate == "ends in time":
        options["timeout"] = source.random() * 0.4
    after = source.randint(1, 12)
    if guest.fate == "goes away":
        task = asyncio.ensure_future(engine.generate(guest.prompt, guest.params, **options))
        await asyncio.sleep(source.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async with engine.submit(guest.prompt, guest.params, **options) as submission:
        if guest.fate in ("is aborted", "stops reading"):
            async for delta in submission:
                guest.seen.setdefault(delta.index, []).extend(delta.token_ids)
                after -= len(delta.token_ids)
                if after <= 0:
                    break
            if guest.fate == "stops reading":
                # Leaving the block aborts it.
                return
            submission.abort()
            async for delta in submission:
                guest.seen.setdefault(delta.index, []).extend(delta.token_ids)
            return
        guest.found = await submission.result()


def begins(some: Sequence[int], whole: Sequence[int]) -> bool:
    return list(whole[: len(some)]) == list(some)


def check(guest: Guest) -> None:
    """Compare what a request got with its answer alone."""
    expected, found = guest.expected, guest.found
    assert expected is not None
    for index, token_ids in guest.seen.items():
        assert begins(token_ids, expected.completions[index].token_ids), guest
    if found is None:
        return
    wanted: list[Completion] = []
    for got, whole in zip(found.completions, expected.completions, strict=True):
        if got.finish_reason is not FinishReason.DEADLINE:
            wanted.append(whole)
            continue
        assert guest.fate == "ends in time"
        assert begins(got.token_ids, whole.token_ids)
        wanted.append(got)
    if any(each.finish_reason is FinishReason.DEADLINE for each in found.completions):
        usage, prompt = found.usage, found.prompt_logprobs
        expected = msgspec.structs.replace(expected, usage=usage, prompt_logprobs=prompt)
    expected = msgspec.structs.replace(expected, completions=wanted)
    assert answer(found) == answer(expected), guest


async def crowd(
    path: Path,
    seed: int,
    drafting: Any,
    *,
    count: int = 60,
    blocks: int = 40,
    adapters: Sequence[str | None] = (None,),
    **settings: Any,
) -> tuple[int, int, int]:
    """Serve a crowd; returns drafts, right ones, and preemptions.

    Parameters
    ----------
    drafting
        Adversary -> settings with which it drafts.
    count, blocks
        Requests, and blocks of the pool that is too small for the rows that there are.
    """
    guests = invite(seed, count, adapters)
    async with AsyncEngine.open(config(path, scheduler__max_num_seqs=16, **settings)) as engine:
        calls = (engine.generate(each.prompt, each.params, **each.options) for each in guests)
        for guest, expected in zip(guests, await asyncio.gather(*calls), strict=True):
            guest.expected = expected
    texts = [
        [*guest.prompt, *completion.token_ids]
        for guest in guests
        if guest.expected is not None
        for completion in guest.expected.completions
    ]
    source = random.Random(seed)
    small = {"scheduler__max_num_seqs": 5, "model__max_model_len": 100, "cache__num_blocks": blocks}
    changes = settings | small | drafting(Adversary(texts, seed))
    async with AsyncEngine.open(config(path, **changes)) as engine:
        for _ in range(2):
            serving = (serve(engine, guest, source) for guest in guests)
            forgetting = asyncio.ensure_future(_forget(engine, source))
            await asyncio.gather(*serving)
            await forgetting
            for guest in guests:
                check(guest)
                guest.found = None
                guest.seen = {}
            await until_idle(engine)
        drafted, accepted = engine.metrics.draft_counts
        return int(drafted), int(accepted), engine.stats.preemptions


async def _forget(engine: AsyncEngine, source: random.Random) -> None:
    """Forget cached prefixes while requests run."""
    for _ in range(3):
        await asyncio.sleep(source.random() * 0.5)
        engine.inspector.reset_prefix_cache()
