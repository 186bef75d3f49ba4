"""Whatever path a request takes, it gets what transformers gives on the same weights."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from src import AsyncEngine, FinishReason, SamplingParams
from src.compile import Compilation
from src.core.config import Config
from src.core.plan import StepPlan
from src.engine.execution import step_computer
from src.engine.execution.compilation import ProgramCompilation
from src.engine.execution.kv_cache import plan_kv_cache
from src.engine.execution.step_computer import StepComputer
from src.engine.sampling.prompt_logprobs import PromptLogprobs, score_prompts
from src.models import load_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.families import QUICK, SHORT_SIGHTED, families

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHORT = SamplingParams(temperature=0, max_tokens=12)

PATHS = {
    "plain": {},
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "chunked, depth 1": {"scheduler__max_num_batched_tokens": 8, "scheduler__pipeline_depth": 1},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
    "preempted, chunked": {
        "cache__num_blocks": 18,
        "model__max_model_len": 64,
        "scheduler__max_num_batched_tokens": 8,
    },
    "uncached": {"cache__enable_prefix_caching": False},
    "large blocks": {"cache__block_size": 64},
    "block of one": {"cache__block_size": 1},
    "one row": {"scheduler__max_num_seqs": 1},
    "by priority": {"scheduler__policy": "priority"},
}

Family = tuple[str, Path, Any]
# Ways that every family goes, each of them twice: the second time prefixes are cached.
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1},
    "depth 2": {"scheduler__pipeline_depth": 2},
    "chunked": PATHS["chunked"],
    "preempted": PATHS["preempted"],
    "deterministic": {"model__deterministic": True},
}

# How much memory is too little, in sequences, differs by groups of layers and by when requests
# arrive: first what is mostly so, then whatever is left.
TOO_LITTLE = (1.75, 1.625, 2.25, 2.375, *(1 + step / 16 for step in range(2, 28)))


@pytest.mark.parametrize("path", PATHS)
async def test_greedy_tokens_are_those_of_transformers(
    path: str, checkpoint: Path, reference: Any
) -> None:
    prompts = random_prompts(12, longest=40)
    async with AsyncEngine.open(small_config(checkpoint, **PATHS[path])) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        if path.startswith("preempted"):
            assert engine.stats.preemptions > 0
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 24), prompt
        ended = result.token_ids[-1] == 2
        assert result.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


async def test_cached_prefixes_change_no_token(checkpoint: Path, reference: Any) -> None:
    shared = random_prompts(1, longest=1, seed=5)[0] * 3 + list(range(20, 60))
    prompts = [[*shared, 100 + i] for i in range(6)]
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        first = [await engine.generate(prompt, GREEDY) for prompt in prompts]
        again = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        salted = await engine.generate(prompts[0], GREEDY, cache_salt="other tenant")
        assert_idle(engine)
    assert first[0].usage.cached_tokens == 0
    assert all(result.usage.cached_tokens == 40 for result in first[1:])
    assert all(result.usage.cached_tokens >= 40 for result in again)
    assert salted.usage.cached_tokens == 0
    for prompt, one, other in zip(prompts, first, again, strict=True):
        assert one.token_ids == other.token_ids == greedy(reference, prompt, 24)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A family, a checkpoint of it, and transformers' model of that."""
    directory = make_checkpoint(
        tmp_path_factory.mktemp(request.param),
        request.param,
        tokenizer=True,
        **SHORT_SIGHTED[request.param],
    )
    return request.param, directory, load_reference(directory)


def with_little_memory(config: Config, times: float) -> Config:
    """As many blocks as one whole sequence takes, whatever groups of layers there are, and more."""
    model = load_model(Path(config.model.path), LoadOptions(load_format="dummy"))
    plan, length = plan_kv_cache(
        model.kv_cache_spec(),
        replace(config.cache, num_blocks=10_000),
        device=torch.device("cpu"),
        max_num_seqs=1,
        max_model_len=64,
        max_model_len_is_fixed=True,
    )
    blocks = int(times * plan.blocks_held(length))
    return replace(config, cache=replace(config.cache, num_blocks=blocks))


async def answered_twice(
    config: Config, prompts: list[list[int]], params: SamplingParams
) -> tuple[Any, Any, int]:
    """The prompts' answers, and again with what is cached; and how many were preempted."""
    async with AsyncEngine.open(config) as engine:
        first, again = [
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            for _ in range(2)
        ]
        assert not engine.stats.compiled
        assert_idle(engine)
        return first, again, engine.stats.preemptions


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family", families(unmarked=QUICK, mark=pytest.mark.compilers), indirect=True, scope="module"
)
async def test_every_architecture_through_the_whole_engine(family: Family, way: str) -> None:
    _, directory, model = family
    prompts = random_prompts(6, longest=30, seed=2)
    config = small_config(directory, compile__enforce_eager=True, **WAYS[way])
    # With little memory what grows has to outgrow what windows give back.
    params = SHORT.__replace__(max_tokens=34) if way == "preempted" else SHORT
    if way == "preempted":
        # A row whose layers all have windows is admitted with what it will ever hold.
        layers = load_model(directory, LoadOptions(load_format="dummy")).kv_cache_spec()
        grows = any(layer.per == "token" and layer.window is None for layer in layers)
        for times in TOO_LITTLE:
            first, again, preemptions = await answered_twice(
                with_little_memory(config, times), prompts, params
            )
            if preemptions or not grows:
                break
        assert (preemptions > 0) == grows
    else:
        first, again, preemptions = await answered_twice(config, prompts, params)
        assert preemptions == 0
        # Where requests lack memory, none is left for prefixes.
        assert sum(result.usage.cached_tokens for result in again) > 0
    for prompt, one, other in zip(prompts, first, again, strict=True):
        assert one.token_ids == other.token_ids, prompt
    wanted = [greedy(model, prompt, params.max_tokens) for prompt in prompts]
    assert [result.token_ids for result in first] == wanted


async def test_logprobs_are_those_of_transformers(checkpoint: Path, reference: Any) -> None:
    prompt = random_prompts(1, longest=40, seed=3)[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=4, prompt_logprobs=3)
    async with AsyncEngine.open(
        small_config(checkpoint, scheduler__max_num_batched_tokens=8)
    ) as engine:
        result = await engine.generate(prompt, params)
        # Reading the cache would skip logits that it asks for.
        again = await engine.generate(prompt, params)
    assert again == result.__replace__(request_id=again.request_id)
    ids = prompt + result.token_ids
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), dim=-1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    scored = [*result.prompt_logprobs[1:], *(result.completions[0].logprobs or [])]
    assert len(scored) == len(ids) - 1
    for position, entry in enumerate(scored):
        assert entry is not None
        row = wanted[position]
        assert entry.token_id == ids[position + 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        count = 3 if position < len(prompt) - 1 else 4
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(count).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("path", ["preempted", "preempted, chunked"])
async def test_delivered_scores_are_not_computed_again(
    path: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who resumes with output has got the scores of its prompt; one without has not."""
    scored = []

    def counting(*given: Any) -> PromptLogprobs | None:
        scores = score_prompts(*given)
        if scores is not None:
            parts = [part for slices in scores.slices.values() for part in slices]
            scored.append(sum(len(part.token_ids) for part in parts))
        return scores

    monkeypatch.setattr(step_computer, "score_prompts", counting)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=2)
    prompts = random_prompts(12, longest=40)

    async def run(**changes: Any) -> list[Any]:
        config = small_config(checkpoint, model__deterministic=True, **changes)
        async with AsyncEngine.open(config) as engine:
            results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            if changes:
                assert engine.stats.preemptions > 0
            assert_idle(engine)
        return [(result.token_ids, result.prompt_logprobs) for result in results]

    wanted = await run()
    num_scores = sum(len(prompt) - 1 for prompt in prompts)
    assert sum(scored) == num_scores
    scored.clear()
    assert await run(**PATHS[path]) == wanted
    # Who lost its row within its prompt computes that again; whole prompts have none within.
    assert sum(scored) == num_scores or (path.endswith("chunked") and sum(scored) > num_scores)


async def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, dtype=torch.bfloat16)
    model = load_reference(directory)
    prompts = random_prompts(4, longest=30, seed=4)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    async with AsyncEngine.open(small_config(directory)) as engine:
        assert engine.model_info.dtype == "bfloat16"
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    with torch.inference_mode():
        for prompt, result in zip(prompts, results, strict=True):
            if len(prompt) == 1:
                continue
            rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
            wanted = [float(rows[i, prompt[i + 1]]) for i in range(len(prompt) - 1)]
            scored = [entry.logprob for entry in (result.prompt_logprobs or [])[1:] if entry]
            # bfloat16 keeps 8 bits: three layers of rounding move a log-probability by under 0.25.
            assert scored == pytest.approx(wanted, abs=0.25)


@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
async def test_compiled_calls_give_the_same_tokens(checkpoint: Path, reference: Any) -> None:
    prompts = random_prompts(12, longest=40)
    config = small_config(checkpoint, compile__enforce_eager=False, compile__startup="wait")
    async with AsyncEngine.open(config) as engine:
        assert engine.stats.compiled
        for count in (1, 2, 12):
            results = await asyncio.gather(
                *(engine.generate(prompt, GREEDY) for prompt in prompts[:count])
            )
            for prompt, result in zip(prompts, results, strict=False):
                assert result.token_ids == greedy(reference, prompt, 24)


@pytest.mark.timeout(900)
async def test_the_compiler_swaps_its_code_in_while_requests_run(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From wherever the code comes: it is let in once all requests run, which wait for it a bit."""
    may_load, is_settled = threading.Event(), threading.Event()
    load, finish, compute = Compilation.load, ProgramCompilation.finish, StepComputer.compute
    # Per step: whether it ran compiled, and what it computed of which rows.
    steps: list[tuple[bool, dict[int, int]]] = []

    def load_late(self: Compilation, caller: Any) -> Any:
        assert may_load.wait(120)
        return load(self, caller)

    def settle(self: ProgramCompilation, *parts: Any) -> None:
        finish(self, *parts)
        is_settled.set()

    def compute_slowly(self: StepComputer, plan: StepPlan, *given: Any, **named: Any) -> Any:
        steps.append((self.code.step is not None, {row.row: row.start for row in plan.rows}))
        if len(steps) == 20:
            may_load.set()
        if len(steps) > 20 and not is_settled.is_set():
            time.sleep(0.02)
        if len(steps) == 120:
            is_settled.wait(600)
        return compute(self, plan, *given, **named)

    monkeypatch.setattr(Compilation, "load", load_late)
    monkeypatch.setattr(ProgramCompilation, "finish", settle)
    monkeypatch.setattr(StepComputer, "compute", compute_slowly)
    prompts = random_prompts(4, longest=40)
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    config = small_config(checkpoint, compile__enforce_eager=False, compile__startup="background")
    async with AsyncEngine.open(config) as engine:
        assert not engine.stats.compiled
        results = await asyncio.gather(*(engine.generate(p, params) for p in prompts))
        assert engine.stats.compiled
    before = [rows for is_compiled, rows in steps if not is_compiled]
    after = [rows for is_compiled, rows in steps if is_compiled]
    # One swap, in the middle of all four.
    assert [is_compiled for is_compiled, _ in steps] == [False] * len(before) + [True] * len(after)
    assert len(before) >= 20
    assert len(before[-1]) == len(after[0]) == 4
    assert {row: start + 1 for row, start in before[-1].items()} == after[0]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 160, end=None)
