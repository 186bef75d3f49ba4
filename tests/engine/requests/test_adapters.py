"""Requests with adapters get what transformers gives with the adapter merged into its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, FinishReason, SamplingParams
from src.core.errors import ConfigError, ModelLoadError, ModelNotFoundError
from src.core.outputs import GenerationResult
from src.core.structured_output import StructuredOutput
from src.ops.projections.rounding import quantize
from tests.support.adapters import ATTENTION, make_adapter, merged
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
EAGER = {"compile__enforce_eager": True}
COMPILED = {"compile__enforce_eager": False, "compile__startup": "wait"}

WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1, **EAGER},
    "depth 2": EAGER,
    "chunked": {"scheduler__max_num_batched_tokens": 8, **EAGER},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64, **EAGER},
    "uncached": {"cache__enable_prefix_caching": False, **EAGER},
    "one slot": {"lora__slots": 1, **EAGER},
    "deterministic": {"model__deterministic": True, **EAGER},
    "compiled": {"scheduler__max_num_batched_tokens": 8, **COMPILED},
}


class World:
    """A checkpoint, its adapters, and the merged models by the adapter's name."""

    def __init__(self, directory: Path, architecture: str = "llama") -> None:
        self.checkpoint = make_checkpoint(directory / "model", architecture, tokenizer=True)
        self.models: dict[str | None, Any] = {None: load_reference(self.checkpoint)}
        self.paths: dict[str, str] = {}
        self._directory = directory

    def add(self, name: str, **fields: Any) -> None:
        path = make_adapter(self._directory / name, self.models[None], **fields)
        self.paths[name] = str(path)
        self.models[name] = merged(self.checkpoint, path)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("adapters"))
    world.add("whole", seed=1)
    world.add(
        "parts",
        targets=("q_proj", "v_proj", "up_proj"),
        rank=2,
        seed=2,
        use_rslora=True,
        rank_pattern={"v_proj": 5},
    )
    world.add(
        "patterns",
        rank=8,
        alpha=4,
        seed=3,
        rank_pattern={"layers.1.self_attn.k_proj": 3, "down_proj": 1},
        alpha_pattern={"o_proj": 16},
        within="layers.1.",
    )
    return world


NAMES: tuple[str | None, ...] = (None, "whole", "parts", "patterns")


def assert_as(model: Any, prompt: list[int], result: GenerationResult) -> None:
    """Every token is the model's choice, with the model's log-probability."""
    ids = [*prompt, *result.token_ids]
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = result.completions[0].logprobs
    assert entries is not None
    for place, (token, entry) in enumerate(zip(result.token_ids, entries, strict=True)):
        expected = scores[len(prompt) + place - 1]
        assert abs(float(expected.max()) - float(expected[token])) < 1e-3
        assert abs(float(expected[token]) - entry.logprob) < 1e-3


@pytest.mark.parametrize("way", WAYS)
async def test_a_mixed_batch_is_as_if_each_adapter_was_merged(world: World, way: str) -> None:
    prompts = random_prompts(12, longest=30, seed=4)
    names = NAMES * 3
    params = GREEDY.__replace__(max_tokens=24 if way == "preempted" else 12)
    config = small_config(world.checkpoint, lora__adapters=world.paths, **WAYS[way])
    async with AsyncEngine.open(config) as engine:
        # The second time prefixes are cached, and adapters have moved between slots.
        for _ in range(2):
            results = await asyncio.gather(
                *(
                    engine.generate(prompt, params, lora=name)
                    for prompt, name in zip(prompts, names, strict=True)
                )
            )
            for prompt, name, result in zip(prompts, names, results, strict=True):
                assert_as(world.models[name], prompt, result)
        if way == "preempted":
            assert engine.stats.preemptions > 0
        if "compiled" in way:
            assert engine.stats.compiled
        assert_idle(engine)


async def test_adapters_share_no_prefix(world: World) -> None:
    prompt = random_prompts(1, longest=1, seed=6)[0] * 40
    config = small_config(world.checkpoint, lora__adapters=world.paths, **EAGER)
    async with AsyncEngine.open(config) as engine:
        for name in NAMES:
            for cached in (0, 36):
                result = await engine.generate(prompt, GREEDY, lora=name)
                assert result.usage.cached_tokens == cached
                assert_as(world.models[name], prompt, result)


async def test_a_changed_adapter_under_an_old_name_is_never_served_stale(
    world: World, tmp_path: Path
) -> None:
    prompt = random_prompts(1, longest=1, seed=7)[0] * 40
    path = make_adapter(tmp_path / "it", world.models[None], seed=10)
    config = small_config(world.checkpoint, lora__slots=1, **EAGER)
    async with AsyncEngine.open(config) as engine:
        await engine.adapters.load("it", str(path))
        assert_as(
            merged(world.checkpoint, path), prompt, await engine.generate(prompt, GREEDY, lora="it")
        )
        make_adapter(path, world.models[None], seed=11)
        await engine.adapters.load("it", str(path), replaces=True)
        changed = await engine.generate(prompt, GREEDY, lora="it")
        assert changed.usage.cached_tokens == 0
        assert_as(merged(world.checkpoint, path), prompt, changed)
        # The same tensors once more: what they have computed may be used.
        await engine.adapters.unload("it")
        await engine.adapters.load("again", str(path))
        again = await engine.generate(prompt, GREEDY, lora="again")
        assert again.usage.cached_tokens == 36
        assert again.token_ids == changed.token_ids
        with pytest.raises(ModelNotFoundError, match="no adapter `it` is loaded"):
            await engine.generate(prompt, GREEDY, lora="it")
        assert_idle(engine)


async def test_unloading_waits_for_its_requests(world: World) -> None:
    prompt = random_prompts(1, longest=20, seed=8)[0]
    config = small_config(world.checkpoint, lora__adapters=world.paths, **EAGER)
    long = GREEDY.__replace__(max_tokens=100)
    async with AsyncEngine.open(config) as engine:
        async with engine.submit(prompt, long, lora="whole") as submission:
            await submission.take()
            unloading = asyncio.create_task(engine.adapters.unload("whole"))
            await asyncio.sleep(0)
            with pytest.raises(ModelNotFoundError):
                await engine.generate(prompt, GREEDY, lora="whole")
            assert not unloading.done()
            result = await submission.result()
        await unloading
        assert result.completions[0].finish_reason is FinishReason.LENGTH
        assert_idle(engine)


async def test_a_hundred_adapters_and_eight_slots_lose_no_request(
    world: World, tmp_path: Path
) -> None:
    base = world.models[None]
    kinds = [
        make_adapter(tmp_path / str(i), base, targets=("v_proj",), rank=1, seed=20 + i)
        for i in range(3)
    ]
    adapters = {f"adapter {i}": str(kinds[i % 3]) for i in range(100)}
    models = [merged(world.checkpoint, kind) for kind in kinds]
    config = small_config(
        world.checkpoint,
        lora__adapters=adapters,
        lora__slots=8,
        scheduler__max_num_seqs=16,
        **EAGER,
    )
    prompts = random_prompts(200, longest=12, seed=9)
    short = GREEDY.__replace__(max_tokens=4)
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(
            *(
                engine.generate(prompt, short, lora=f"adapter {i % 100}")
                for i, prompt in enumerate(prompts)
            )
        )
        for i in range(0, 200, 9):
            assert_as(models[i % 100 % 3], prompts[i], results[i])
        assert all(len(result.token_ids) == 4 for result in results)
        assert_idle(engine)


async def test_an_aborted_request_gives_its_slot_back(world: World) -> None:
    config = small_config(world.checkpoint, lora__adapters=world.paths, lora__slots=1, **EAGER)
    long = GREEDY.__replace__(max_tokens=200)
    async with AsyncEngine.open(config) as engine:
        async with engine.submit([5, 6, 7], long, lora="whole") as submission:
            await submission.take()
            waiting = asyncio.create_task(engine.generate([5, 6, 7], GREEDY, lora="parts"))
            # The model alone needs no slot, and is not held up by who waits for one.
            assert_as(world.models[None], [5, 6, 7], await engine.generate([5, 6, 7], GREEDY))
            assert not waiting.done()
        assert_as(world.models["parts"], [5, 6, 7], await waiting)
        assert_idle(engine)


async def test_structured_output_with_an_adapter(world: World) -> None:
    constraint = StructuredOutput(kind="regex", value="[ab]{6}")
    params = SamplingParams(temperature=0, max_tokens=20, structured_output=constraint)
    config = small_config(world.checkpoint, lora__adapters=world.paths, **EAGER)
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(
            *(engine.generate([7, 8, 9], params, lora=name) for name in NAMES)
        )
        ids = {letter: engine.tokenizer.encode(letter, False)[0] for letter in "ab"}
    for name, result in zip(NAMES, results, strict=True):
        known, text = [7, 8, 9], result.text
        assert len(text) == 6
        assert set(text) <= set("ab")
        model = world.models[name]
        for letter, token in zip(text, result.token_ids, strict=False):
            with torch.inference_mode():
                scores = model(torch.tensor([known])).logits[0, -1]
            if token in ids.values():
                assert token == max(ids.values(), key=lambda each: float(scores[each])), letter
            known.append(token)


@pytest.mark.parametrize(
    "code", [pytest.param(COMPILED, marks=pytest.mark.compilers, id="compiled"), EAGER]
)
async def test_beside_weights_in_int8(world: World, code: dict[str, Any]) -> None:
    models = {}
    for name in (None, "whole", "parts"):
        model = load_reference(world.checkpoint)
        update = world.models[name].state_dict()
        plain = model.state_dict()
        with torch.no_grad():
            for module_name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear):
                    stored = plain[f"{module_name}.weight"].clone()
                    rounded = quantize(stored, "int8", 32).dequantized()
                    module.weight.copy_(rounded + update[f"{module_name}.weight"] - stored)
        models[name] = model
    config = small_config(
        world.checkpoint, lora__adapters=world.paths, model__quantization="int8", **code
    )
    async with AsyncEngine.open(config) as engine:
        for name, model in models.items():
            prompts = random_prompts(2, longest=20, seed=12)
            results = await asyncio.gather(
                *(engine.generate(p, GREEDY, lora=name) for p in prompts)
            )
            for prompt, result in zip(prompts, results, strict=True):
                assert_as(model, prompt, result)


# With biases; with a rotation of neighbours; attention fused in the checkpoint; experts; latents;
# short convolutions.
@pytest.mark.parametrize(
    "architecture", ["qwen2", "glm", "phi3", "qwen2_moe", "deepseekv3", "lfm2"]
)
async def test_other_families(tmp_path: Path, architecture: str) -> None:
    world = World(tmp_path, architecture)
    targets = {
        "glm": (*ATTENTION, "gate_up_proj", "down_proj"),
        "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
        "qwen2_moe": ATTENTION,
        "deepseekv3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2"),
    }
    world.add("it", targets=targets.get(architecture, ("q_proj", "k_proj", "down_proj")), seed=3)
    prompts = random_prompts(4, longest=20, seed=5)
    config = small_config(world.checkpoint, lora__adapters=world.paths, **EAGER)
    async with AsyncEngine.open(config) as engine:
        for name in (None, "it"):
            results = await asyncio.gather(
                *(engine.generate(p, GREEDY, lora=name) for p in prompts)
            )
            for prompt, result in zip(prompts, results, strict=True):
                assert_as(world.models[name], prompt, result)


async def test_a_start_says_which_adapter_is_wrong(world: World, tmp_path: Path) -> None:
    config = small_config(world.checkpoint, lora__adapters={"it": str(tmp_path)}, **EAGER)
    with pytest.raises(ModelLoadError, match=r"lora.adapters: it: .* has no file adapter_config"):
        async with AsyncEngine.open(config):
            raise AssertionError("it started")
    config = small_config(
        world.checkpoint,
        lora__adapters=world.paths,
        model__implementation="transformers",
        **EAGER,
    )
    with pytest.raises(ConfigError, match="lora: adapters are served with native families only"):
        async with AsyncEngine.open(config):
            raise AssertionError("it started")
