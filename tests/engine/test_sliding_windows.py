"""Layers with sliding windows, alone and beside layers that see everything, in a whole engine.

Whatever path a request takes, its log-probabilities are those of transformers on the same weights.
KV memory is full of NaN before it is written, and what a window has gone past belongs to others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, GenerationResult, SamplingParams
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
BLOCK_SIZE = 4
WINDOW = 10
# A row alone needs no more blocks of a group with this window at a time.
MOST = 4

# Architecture, what its configuration says, and the windows of the groups that this makes.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "window": ("mistral", {"sliding_window": WINDOW}, (WINDOW,)),
    # Two layers see everything, four do not: groups of two.
    "by layer": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "num_hidden_layers": 6,
        },
        (None, WINDOW, WINDOW),
    ),
    # Three and two: one slot of three is empty in the second group's part.
    "uneven": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 7,
            "layer_types": [
                *["sliding_attention", "full_attention"] * 2,
                *["sliding_attention"] * 3,
            ],
        },
        (WINDOW, WINDOW, WINDOW, None),
    ),
    # Every third layer sees everything; chunks that no number of blocks fills.
    "chunks": (
        "llama4",
        {"attention_chunk_size": WINDOW, "num_hidden_layers": 6},
        (WINDOW, WINDOW, None),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the checkpoint is, transformers' model of it, and the windows of its groups."""
    architecture, fields, windows = MODELS[request.param]
    directory = make_checkpoint(
        tmp_path_factory.mktemp("windows"), architecture, tokenizer=True, **fields
    )
    return directory, load_reference(directory), windows


def check(reference: Any, prompt: list[int], result: GenerationResult) -> None:
    """Every token's log-probability is what transformers computes, of the prompt too if asked."""
    ids = prompt + result.token_ids
    with torch.inference_mode():
        rows = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), dim=-1)
    scored = [*(result.prompt_logprobs or [])[1:], *(result.completions[0].logprobs or [])]
    first = len(ids) - len(scored)
    for position, entry in enumerate(scored, first):
        assert entry is not None
        assert entry.token_id == ids[position]
        wanted = float(rows[position - 1, entry.token_id])
        assert entry.logprob == pytest.approx(wanted, abs=1e-4), position
    for position in range(len(prompt), len(ids)):
        assert ids[position] == int(rows[position - 1].argmax())


def config_of(directory: Path, **changes: Any) -> Any:
    return small_config(directory, cache__block_size=BLOCK_SIZE, **changes)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 2048])
async def test_logprobs_are_those_of_transformers(model: Any, depth: int, budget: int) -> None:
    directory, reference, windows = model
    prompts = random_prompts(6, longest=60, seed=1)
    params = PARAMS.__replace__(prompt_logprobs=0)
    config = config_of(
        directory, scheduler__pipeline_depth=depth, scheduler__max_num_batched_tokens=budget
    )
    async with AsyncEngine.open(config) as engine:
        pool = await engine.inspector.pool()
        assert tuple(pool.windows) == windows
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        check(reference, prompt, result)


@pytest.mark.parametrize("depth", [1, 2])
async def test_cached_prefixes_change_nothing(model: Any, depth: int) -> None:
    """Hits, whole ones and such of which the first or the last blocks have been evicted."""
    directory, reference, windows = model
    shared = random_prompts(1, longest=1, seed=5)[0] * 3 + list(range(20, 60))
    prompts = [[*shared, 100 + i] for i in range(3)]
    others = random_prompts(8, longest=60, seed=6)
    blocks = 60 if windows[0] is None or None in windows else 24
    config = config_of(directory, scheduler__pipeline_depth=depth, cache__num_blocks=blocks,
                       model__max_model_len=96)  # fmt: skip
    hits = []
    async with AsyncEngine.open(config) as engine:
        for turn in range(3):
            for prompt in prompts:
                result = await engine.generate(prompt, PARAMS)
                hits.append(result.usage.cached_tokens)
                check(reference, prompt, result)
            if turn:
                for prompt in others[4 * (turn - 1) : 4 * turn]:
                    check(reference, prompt, await engine.generate(prompt, PARAMS))
        assert_idle(engine)
    assert hits[:3] == [0, 40, 40]
    assert all(hit <= 40 for hit in hits)
    assert hits[3] == 40


# Rows with chunks are preempted in test_oracle.py, which finds out how much memory is too little.
@pytest.mark.parametrize("model", [name for name in MODELS if name != "chunks"], indirect=True)
async def test_who_is_preempted_goes_on_where_it_was(model: Any) -> None:
    directory, reference, windows = model
    prompts = random_prompts(12, longest=6, seed=2)
    params = PARAMS.__replace__(max_tokens=24)
    blocks = {1: 12, 3: 21, 4: 26}[len(windows)]
    for depth, budget in ((1, 2048), (2, 5)):
        config = config_of(
            directory,
            scheduler__pipeline_depth=depth,
            scheduler__max_num_batched_tokens=budget,
            cache__num_blocks=blocks,
            model__max_model_len=32,
        )
        async with AsyncEngine.open(config) as engine:
            results = await asyncio.gather(*(engine.generate(one, params) for one in prompts))
            assert engine.stats.preemptions > 0
            assert_idle(engine)
        for prompt, result in zip(prompts, results, strict=True):
            check(reference, prompt, result)


async def test_a_row_with_a_window_holds_no_more_of_a_longer_context(model: Any) -> None:
    """A pool of a window's blocks serves contexts of many times as many."""
    directory, reference, windows = model
    full = windows.count(None) * 200 // BLOCK_SIZE
    blocks = full + MOST * (len(windows) - windows.count(None))
    prompt = random_prompts(1, longest=1, seed=7)[0] * 150
    params = PARAMS.__replace__(max_tokens=48)
    async with AsyncEngine.open(
        config_of(directory, cache__num_blocks=blocks, model__max_model_len=200)
    ) as engine:
        check(reference, prompt, await engine.generate(prompt, params))
        assert_idle(engine)


@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
@pytest.mark.parametrize("model", [name for name in MODELS if name != "chunks"], indirect=True)
async def test_compiled_steps_in_one_call_give_the_same(model: Any) -> None:
    directory, reference, _ = model
    prompts = random_prompts(6, longest=60, seed=3)
    config = config_of(
        directory,
        compile__enforce_eager=False,
        compile__startup="wait",
        scheduler__max_num_batched_tokens=24,
    )
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine.open(config) as engine:
        assert Probe(engine).computer.code.step is not None
        drawn = await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in prompts))
        for prompt, result in zip(prompts, drawn, strict=True):
            check(reference, prompt, result)
        again = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in prompts))
        assert sum(result.usage.cached_tokens for result in again) > 0
        for prompt, result in zip(prompts, again, strict=True):
            check(reference, prompt, result)
