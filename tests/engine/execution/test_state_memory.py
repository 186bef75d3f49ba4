"""Memory of recurrent states: how it is divided, what plans copy in it, and engines on it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from src import AsyncEngine, SamplingParams
from src.core.config import MIB
from src.core.errors import ConfigError
from src.core.plan import RowInstall, StateCopy, StepPlan
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.kv_cache import allocate_kv_cache, plan_kv_cache
from src.engine.execution.memory_profile import compute_largest_step
from src.engine.execution.state_memory import StateMemory, StatePlan, plan_states
from src.models import load_model
from src.models.layer_kv import KVTensor, LayerKVSpec, keys_and_values
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.probe import Probe

CPU = torch.device("cpu")
STATES = LayerKVSpec(
    "recurrent states",
    (
        KVTensor("inputs", (3, 10), torch.bfloat16),
        KVTensor("states", (2, 4, 8), torch.float32),
    ),
    per="sequence",
)
LAYERS = (STATES, keys_and_values(2, 16, torch.float32), STATES)
# Each tensor begins at a multiple of 64 bytes.
SLOT = 2 * (64 + 256)


@pytest.mark.parametrize(
    ("slots", "rows", "snapshots"), [(2, 1, 0), (4, 1, 1), (16, 6, 2), (200, 8, 32)]
)
def test_half_of_the_memory_is_for_states(slots: int, rows: int, snapshots: int) -> None:
    plan = plan_states(LAYERS, slots * SLOT, 8, snapshots=True)
    assert plan == StatePlan(SLOT, rows, snapshots)
    assert plan.total_bytes <= slots * SLOT // 2


def test_without_a_prefix_cache_all_of_it_is_for_rows() -> None:
    assert plan_states(LAYERS, 12 * SLOT, 8, snapshots=False) == StatePlan(SLOT, 6, 0)
    assert plan_states(LAYERS[1:2], 0, 8, snapshots=True) is None
    with pytest.raises(ConfigError, match=r"recurrent states of one sequence .*cache.memory_bytes"):
        plan_states(LAYERS, 2 * SLOT - 1, 8, snapshots=True)


def test_memory_is_divided_and_told(caplog: pytest.LogCaptureFixture) -> None:
    section = small_config(Path("unused"), cache__memory_bytes=MIB).cache
    with caplog.at_level(logging.INFO, "src"):
        plan, _ = plan_kv_cache(
            LAYERS,
            section,
            device=CPU,
            max_num_seqs=2000,
            max_model_len=64,
            max_model_len_is_fixed=True,
        )
    assert plan.states is not None
    assert plan.num_rows(2000) == plan.states.num_rows < 2000
    assert MIB - plan.bytes_per_block < plan.total_bytes <= MIB
    told = "\n".join(caplog.messages)
    assert f"recurrent states of {plan.states.num_rows} rows and " in told
    assert f"at most {plan.states.num_rows} requests run at once" in told
    cache = allocate_kv_cache(LAYERS, plan, CPU)
    assert cache.layout.group_of[1] == 0
    slots = plan.states.num_rows + plan.states.num_snapshots
    assert cache.layers[0]["states"].shape == (slots, 2, 4, 8)
    assert cache.layers[2]["inputs"].shape == (slots, 3, 10)


def test_plans_zero_load_and_save_whole_sequences() -> None:
    memory = StateMemory(LAYERS, StatePlan(SLOT, 2, 2), CPU, poison=True)
    tensors = [each for tensors in memory.layers.values() for each in tensors.values()]
    assert all(each.isnan().all() for each in tensors)

    def install(row: int) -> RowInstall:
        return RowInstall(row, 1, row, [1], 1, [])

    memory.begin(StepPlan(1, [install(1)], [], []))
    assert all((each[1] == 0).all() and each[0].isnan().all() for each in tensors)
    for number, each in enumerate(tensors):
        each[1] = number + 1
    memory.end(StepPlan(1, [], [], [], [], [StateCopy(1, 0)]))
    # What is read before it is written over is what was there: loads come before saves.
    plan = StepPlan(2, [install(0), install(1)], [], [], [StateCopy(0, 0)], [StateCopy(1, 0)])
    memory.begin(plan)
    memory.end(plan)
    for number, each in enumerate(tensors):
        assert (each[0] == number + 1).all()
        assert (each[1] == 0).all()
        assert (each[2] == 0).all()
        assert each[3].isnan().all()


def test_who_resumes_without_a_snapshot_begins_with_zeros() -> None:
    """After preemption as at first: another request had the row meanwhile."""
    memory = StateMemory(LAYERS, StatePlan(SLOT, 2, 1), CPU, poison=True)
    tensors = [each for tensors in memory.layers.values() for each in tensors.values()]
    # Of 3 tokens one was the prompt, and the row's third request is that of key 0 again.
    resumed = RowInstall(1, 3, 0, [1, 2, 3], 1, [])
    memory.begin(StepPlan(5, [resumed], [], []))
    assert all((each[1] == 0).all() and each[0].isnan().all() for each in tensors)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("hybrid"), "granite_moehybrid", tokenizer=True
    )
    return directory, load_reference(directory)


def test_the_largest_step_is_tried_without_states_of_its_own(hybrid: tuple[Path, Any]) -> None:
    config = small_config(hybrid[0], scheduler__max_num_batched_tokens=40)
    model = load_model(hybrid[0])
    with torch.inference_mode():
        compute_largest_step(config, model)


@pytest.mark.parametrize(("method", "again"), [("off", 0), ("suffix", 64)])
def test_the_largest_step_computes_tokens_again(
    hybrid: tuple[Path, Any], method: str, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind wrong drafts, of which no plan knows."""
    counts: list[int] = []
    forward = ForwardPass.__call__

    def counting(self: ForwardPass, inputs: Any, functions: Any) -> Any:
        counts.append(len(inputs.input_ids_t))
        return forward(self, inputs, functions)

    monkeypatch.setattr(ForwardPass, "__call__", counting)
    config = small_config(
        hybrid[0], scheduler__max_num_batched_tokens=40, speculation__method=method
    )
    model = load_model(hybrid[0])
    with torch.inference_mode():
        compute_largest_step(config, model)
    assert set(counts) == {40 + again}


@pytest.mark.anyio
async def test_a_conversation_goes_on_from_copies(hybrid: tuple[Path, Any]) -> None:
    directory, model = hybrid
    turn = random_prompts(1, longest=40, seed=9)[0] * 2
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    async with AsyncEngine.open(small_config(directory)) as engine:
        tokens, cached = list(turn), []
        for _ in range(3):
            result = await engine.generate(tokens, params)
            assert result.token_ids == greedy(model, tokens, 10, end=None)
            cached.append((result.usage.cached_tokens, len(tokens)))
            tokens += [*result.token_ids, 7, 8, 9]
        assert_idle(engine)
    assert cached[0][0] == 0
    before = cached[0][1]
    for found, length in cached[1:]:
        assert found == (before - 1) // 4 * 4
        before = length


@pytest.mark.anyio
async def test_little_memory_means_fewer_rows(hybrid: tuple[Path, Any]) -> None:
    directory, model = hybrid
    prompts = random_prompts(6, longest=20, seed=3)
    params = SamplingParams(temperature=0, max_tokens=8)
    size = plan_states(load_model(directory).kv_cache_spec(), 1 << 40, 1, snapshots=False)
    assert size is not None
    config = small_config(
        directory, cache__memory_bytes=10 * size.bytes_per_slot, model__max_model_len=64
    )
    async with AsyncEngine.open(config) as engine:
        assert Probe(engine).parts.scheduler.limits.max_num_seqs == 3
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(model, prompt, 8)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3next")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(4, 4)}, file, {"format": "pt"})
    assert load_model(directory).config.unread == ("mtp.",)


def test_scheduler_limits_survive_a_plan_log() -> None:
    from tests.engine.scheduling.simulation import make_limits

    limits = make_limits(num_snapshots=3, snapshot_interval=5)
    again = msgspec.json.decode(msgspec.json.encode(limits), type=type(limits))
    assert again == limits


@pytest.mark.anyio
@pytest.mark.parametrize("caching", [False, True])
async def test_preempted_requests_begin_again(hybrid: tuple[Path, Any], caching: bool) -> None:
    """Their rows had other owners meanwhile, and nothing is left of their own states."""
    prompts = random_prompts(8, longest=24, seed=5)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for num_blocks in (200, 18):
        config = small_config(
            hybrid[0],
            cache__num_blocks=num_blocks,
            cache__enable_prefix_caching=caching,
            model__max_model_len=64,
            scheduler__max_num_seqs=3,
            compile__enforce_eager=True,
        )
        async with AsyncEngine.open(config) as engine:
            results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            assert (engine.stats.preemptions > 0) == (num_blocks == 18)
            assert_idle(engine)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]
