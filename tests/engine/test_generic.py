"""Models that transformers computes go every way of the engine, and get what transformers gives."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.core.errors import ConfigError, ModelLoadError
from src.core.structured_output import StructuredOutput
from tests.architectures.check import largest_error
from tests.architectures.tiny import make_tiny
from tests.support.checkpoints import load_reference
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-3
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
WITH_PROMPT = PARAMS.__replace__(prompt_logprobs=3)
# Each for something that the others lack: learned positions, a part of a head rotated, parallel
# blocks, layer norms, multipliers of logits, layers without RoPE, windows, soft caps, keys of other
# layers, one key head, experts, attention sinks, values narrower than keys, positions behind a
# padding token's, chunks, positions counted from a cache.
ARCHITECTURES = (
    *("gpt2", "gpt_neox", "phi", "stablelm", "starcoder2", "cohere2", "granite", "smollm3"),
    *("gemma3n_text", "gpt_bigcode", "qwen2_moe", "gpt_oss", "deepseek_v3", "roberta"),
    *("llama4_text", "bart"),
)
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1},
    "depth 2": {"scheduler__pipeline_depth": 2},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "one block more than a sequence": {"model__max_model_len": 64},
}


def generic(directory: Path, **changes: Any) -> Config:
    """A configuration with which transformers computes, also where there is a native family."""
    return small_config(directory, model__implementation="transformers", **changes)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    make_tiny(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with windows, sinks and experts, and transformers' model of it."""
    directory = tmp_path_factory.mktemp("experts")
    make_tiny(directory, "gpt_oss")
    return directory, load_reference(directory)


async def test_chunked_and_cached(checkpoint_of: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = random_prompts(5, longest=40, seed=3)
    config = generic(checkpoint_of, scheduler__max_num_batched_tokens=8)
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(config) as engine:
            assert engine.model_info.implementation == "transformers"
            first = await asyncio.gather(*(engine.generate(p, WITH_PROMPT) for p in prompts))
            again = await asyncio.gather(*(engine.generate(p, PARAMS) for p in prompts))
            assert_idle(engine)
    assert any("is served by transformers" in line for line in caplog.messages)
    assert sum(result.usage.cached_tokens for result in again) > 0
    reference = load_reference(checkpoint_of)
    for prompt, one, other in zip(prompts, first, again, strict=True):
        assert one.token_ids == other.token_ids
        assert largest_error(reference, prompt, one) < TOLERANCE
        assert largest_error(reference, prompt, other) < TOLERANCE


async def test_temperature_that_counts_tokens_of_a_step_is_left_out(tmp_path: Path) -> None:
    """Llama 4 scales queries from a length on, and counts by the tokens of a pass."""
    make_tiny(tmp_path, "llama4_text")
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | {"floor_scale": 32, "attn_scale": 2.0}
    file.write_text(json.dumps(raw))
    prompts = random_prompts(6, longest=20, seed=5)
    async with AsyncEngine.open(generic(tmp_path)) as engine:
        assert engine.model_info.max_model_len == 31
        results = await asyncio.gather(*(engine.generate(p, WITH_PROMPT) for p in prompts))
    assert sum(map(len, prompts)) > 40
    reference = load_reference(tmp_path)
    for prompt, result in zip(prompts, results, strict=True):
        assert largest_error(reference, prompt, result) < TOLERANCE


@pytest.mark.parametrize("way", WAYS)
async def test_every_way(experts: tuple[Path, Any], way: str) -> None:
    directory, reference = experts
    prompts = random_prompts(6, longest=30, seed=2)
    params = PARAMS.__replace__(max_tokens=34)
    # Full attention and windows: blocks of both for one sequence of 64, and little more.
    blocks = {"cache__num_blocks": 36} if "block" in way else {}
    async with AsyncEngine.open(generic(directory, **WAYS[way], **blocks)) as engine:
        results = await asyncio.gather(*(engine.generate(p, params) for p in prompts))
        assert (engine.stats.preemptions > 0) == bool(blocks)
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert largest_error(reference, prompt, result) < TOLERANCE


async def test_sampling_and_structure_hold(experts: tuple[Path, Any]) -> None:
    directory, _ = experts
    drawn = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    bound = SamplingParams(
        temperature=1.0, seed=7, max_tokens=40, structured_output=StructuredOutput.regex("[0-9]{4}")
    )
    texts = []
    for depth in (1, 2):
        config = generic(
            directory,
            scheduler__pipeline_depth=depth,
            compile__enforce_eager=False,
            compile__startup="wait",
        )
        async with AsyncEngine.open(config) as engine:
            # There is nothing to wait for.
            assert not engine.stats.compiled
            results = await asyncio.gather(
                *(engine.generate([5, 6, 7], one) for one in (drawn, bound))
            )
            texts.append([result.token_ids for result in results])
            digits = results[1].text
            assert len(digits) == 4
            assert digits.isdigit()
    assert texts[0] == texts[1]


async def test_a_native_family_is_preferred_and_agrees(checkpoint: Path) -> None:
    prompt = random_prompts(1, longest=30, seed=4)[0]
    found = {}
    for wish, name in (("auto", "native"), ("native", "native"), ("transformers", "transformers")):
        config = small_config(checkpoint, model__implementation=wish)
        async with AsyncEngine.open(config) as engine:
            assert engine.model_info.implementation == name
            found[wish] = (await engine.generate(prompt, PARAMS)).token_ids
    assert found["auto"] == found["native"] == found["transformers"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model__quantization": "int8"}, "model.quantization is for native families"),
        ({"model__deterministic": True}, "model.deterministic is for native families"),
        ({"model__max_model_len": 4096}, "exceeds"),
        ({"lora__slots": 1}, "lora: adapters are served with native .* leave .lora. out, or"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    experts: tuple[Path, Any], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ModelLoadError, ConfigError), match=reason):
        async with AsyncEngine.open(generic(experts[0], **settings)):
            pass


async def test_what_has_no_family_is_not_served_natively(tmp_path: Path) -> None:
    make_tiny(tmp_path, "stablelm")
    with pytest.raises(ModelLoadError, match="StableLmForCausalLM is not supported"):
        async with AsyncEngine.open(small_config(tmp_path, model__implementation="native")):
            pass
