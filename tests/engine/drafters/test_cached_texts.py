"""Guesses behind a text that the prefix cache has are as good as those behind a computed one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.plan import RowStep
from src.engine.drafters.draft_model import ModelDrafter
from src.engine.drafters.onward import OnwardDrafter
from src.engine.speculation import effort
from tests.engine.drafters.test_exactness import counted
from tests.engine.speculation.test_exactness import answer, ask, config
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import make_eagle3, make_mtp
from tests.support.engines import assert_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

LONG = [7 + 3 * place % 290 for place in range(45)]
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SOME = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Settings]]:
    """Who drafts -> a model, and its settings: each is mostly right."""
    llama = make_checkpoint(tmp_path_factory.mktemp("llama"), tokenizer=True, num_hidden_layers=2)
    settings = {"speculation__num_speculative_tokens": 3, "cache__block_size": 8}
    found = {
        name: (
            make_mtp(tmp_path_factory.mktemp(name), name, copies=True).path,
            settings | {"speculation__method": "mtp"},
        )
        for name in ("deepseekv3", "glm4_moe")
    }
    draft = {"speculation__method": "draft", "speculation__model": str(llama)}
    return {**found, "draft": (llama, settings | draft)}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("source", ["deepseekv3", "glm4_moe", "draft"])
async def test_as_many_guesses_are_right_behind_a_cached_text(
    source: str, served: Mapping[str, tuple[Path, Settings]]
) -> None:
    """One whose last chunk ended a request, and one whose end was an output."""
    path, settings = served[source]
    drafts: list[list[tuple[int, int]]] = []
    answers = []
    for caches in (True, False):
        changes = settings | {"cache__enable_prefix_caching": caches}
        async with AsyncEngine.open(config(path, **changes)) as engine:
            # Whatever lay in the blocks before.
            await ask(engine, [([*reversed(LONG)], SOME)] * 2)
            await engine.generate(LONG, ONE)
            before, drafted = counted(engine), []
            said, text = [], LONG
            for _ in range(2):
                result = await engine.generate(text, SOME)
                said.append(answer(result))
                assert (result.usage.cached_tokens > len(text) - 16) == caches
                await asyncio.wait_for(engine._loop.wait_idle(), 60)
                now = counted(engine)
                drafted.append((now[0] - before[0], now[1] - before[1]))
                before, text = now, [*text, *result.token_ids]
            assert_idle(engine)
        drafts.append(drafted)
        answers.append(said)
    assert answers[0] == answers[1]
    assert drafts[0] == drafts[1]
    for drafted_tokens, accepted in drafts[0]:
        assert accepted > 0.6 * drafted_tokens


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("source", ["glm4_moe", "draft"])
async def test_answers_stay_the_same_where_a_drafter_rests_now_and_then(
    source: str,
    served: Mapping[str, tuple[Path, Settings]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins in the middle of texts, behind what it has not read, and in what others left."""
    for name, steps in (("_WINDOW", 5), ("_SHORTEST", 4), ("_LONGEST", 9)):
        monkeypatch.setattr(effort, name, steps)
    monkeypatch.setattr(effort, "_TOKENS_PER_GUESS", 0)
    path, settings = served[source]
    prompts = [LONG[: 20 + 5 * place] for place in range(5)]
    asked = [(prompt, SOME) for prompt in prompts]
    results: list[Any] = []
    counts: list[int] = []
    rests: list[Any] = []
    for kind in (OnwardDrafter, ModelDrafter):
        rest = kind.rest

        def noted(self: Any, rest: Any = rest) -> None:
            rests.append(self)
            rest(self)

        monkeypatch.setattr(kind, "rest", noted)
    for changes in ({}, settings, settings | {"scheduler__max_num_batched_tokens": 13}):
        async with AsyncEngine.open(config(path, **changes)) as engine:
            said = [await ask(engine, asked) for _ in range(2)]
            results.append([[answer(each) for each in some] for some in said])
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            assert_idle(engine)
            counts.append(counted(engine)[0])
    assert results[1:] == results[:1] * 2
    assert min(counts[1:]) > 10
    assert len(rests) > 6


@pytest.mark.parametrize("source", ["eagle3", "draft"])
async def test_where_nothing_pays_a_head_computes_nothing_in_the_end(
    source: str,
    tmp_path: Path,
    served: Mapping[str, tuple[Path, Settings]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random weights, whose guesses are of no use however many are right by chance."""
    monkeypatch.setattr(effort, "_WINDOW", 64)
    monkeypatch.setattr(effort, "_TOKENS_PER_GUESS", 0)
    path, _ = served["draft"]
    if source == "eagle3":
        make_eagle3(tmp_path, taps=[0, 1, 2])
    else:
        make_checkpoint(tmp_path, num_hidden_layers=1, hidden_size=32, head_dim=8, seed=5)
    passes: list[int] = []
    for kind in (OnwardDrafter, ModelDrafter):
        name = "_run" if kind is OnwardDrafter else "_logits"
        run = getattr(kind, name)

        def noted(self: Any, steps: Sequence[RowStep], *more: Any, run: Any = run) -> Any:
            passes.append(sum(step.num_tokens for step in steps))
            return run(self, steps, *more)

        monkeypatch.setattr(kind, name, noted)
    changes = {"speculation__method": source, "speculation__model": str(tmp_path)}
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    async with AsyncEngine.open(config(path, **changes)) as engine:
        for first in (5, 105):
            await ask(engine, [([first + place], params) for place in range(4)])
        passes.clear()
        await ask(engine, [([*range(first, first + 20)], params) for first in range(200, 204)])
        assert passes == []
        speculation = engine._loop._worker._speculation
        assert speculation is not None
        assert speculation.hidden.wanted == "none"
