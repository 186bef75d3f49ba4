"""`cache.dtype`: keys and values in 8 bits, through every path of a request."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.config import CacheSection, DeviceSection
from src.core.errors import ConfigError
from src.engine.execution.attention_choice import choose_attention
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.startup import _content_key
from src.engine.telemetry.readings import model_facts
from src.models import load_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED
from tests.support.probe import Probe
from tests.support.rounding_cache import rounded_greedy, rounded_logits

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
# Soft caps with windows; sinks with windows; plain attention.
FAMILIES = ("llama", "gemma2", "gpt_oss")
PATHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked, depth 1": {
        "scheduler__max_num_batched_tokens": 8,
        "scheduler__pipeline_depth": 1,
    },
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = make_checkpoint(
        tmp_path_factory.mktemp(request.param),
        request.param,
        tokenizer=True,
        **SHORT_SIGHTED[request.param],
    )
    return request.param, directory, load_reference(directory)


@pytest.mark.parametrize("name", DTYPES)
async def test_tokens_are_those_of_transformers_with_rounded_keys_and_values(
    family: tuple[str, Path, Any], name: str
) -> None:
    """An exact comparison: only the rounding itself separates this from an ordinary cache."""
    of, directory, model = family
    prompts = random_prompts(5, longest=30, seed=4)
    wanted = [rounded_greedy(model, prompt, 16, DTYPES[name]) for prompt in prompts]
    for path, changes in PATHS.items():
        if path == "preempted" and of != "llama":
            continue  # how little memory is too little differs by groups of layers
        config = small_config(directory, compile__enforce_eager=True, cache__dtype=name, **changes)
        async with AsyncEngine.open(config) as engine:
            for time in ("first", "cached"):
                results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
                assert [result.token_ids for result in results] == wanted, (path, time)
            if path == "preempted":
                assert engine.stats.preemptions > 0
            else:
                assert sum(result.usage.cached_tokens for result in results) > 0
            assert_idle(engine)


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 4e-2), ("fp8", 5e-1)])
async def test_log_probabilities_stay_close_to_those_of_an_ordinary_cache(
    checkpoint: Path, reference: Any, name: str, tolerance: float
) -> None:
    prompt = random_prompts(1, longest=60, seed=3)[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    config = small_config(checkpoint, compile__enforce_eager=True, cache__dtype=name)
    async with AsyncEngine.open(config) as engine:
        result = await engine.generate(prompt, params)
    with torch.inference_mode():
        plain = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rounded = rounded_logits(reference, prompt, DTYPES[name]).log_softmax(-1)
    assert result.prompt_logprobs is not None
    differs = 0.0
    for position, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None
        token = prompt[position + 1]
        assert entry.logprob == pytest.approx(float(rounded[position, token]), abs=1e-3)
        differs = max(differs, abs(entry.logprob - float(plain[position, token])))
    # What rounding costs this model, by the comparison above to 1e-3: a half of the last of four
    # bits is 16 times as much as of the last of eight, here 0.24.
    assert 1e-6 < differs < tolerance, differs


@pytest.mark.compilers
@pytest.mark.parametrize("name", DTYPES)
async def test_compiled_steps_go_the_same_way(checkpoint: Path, name: str) -> None:
    """The one-call step against steps from Python: one op serves both."""
    prompts, answers = random_prompts(4, longest=30, seed=8), []
    for eager in (True, False):
        config = small_config(
            checkpoint,
            compile__enforce_eager=eager,
            compile__startup="wait",
            cache__dtype=name,
            model__dtype="float32",
        )
        async with AsyncEngine.open(config) as engine:
            results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
            assert engine.stats.compiled is not eager
            answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]


async def test_the_start_says_what_is_gained(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = "src.engine.execution.cache_dtype"
    caplog.set_level(logging.INFO, logger)
    # Whoever configured logs before may have taken the package off the root's handlers.
    monkeypatch.setattr(logging.getLogger(logger), "handlers", [caplog.handler])
    config = small_config(checkpoint, compile__enforce_eager=True, cache__dtype="fp8_e4m3")
    async with AsyncEngine.open(config) as engine:
        kv = engine.inspector.memory.kv
        facts = model_facts(config, Probe(engine).parts)
    assert kv is not None
    assert (kv.dtype, facts.cache_dtype) == ("fp8", "fp8")
    assert [group.kind for group in kv.groups] == ["keys and values in fp8"]
    # float32 heads of 16: 64 bytes each, now 16 and a factor of 4.
    assert "KV cache in fp8: 3.20 times the tokens of float32" in caplog.text


@pytest.mark.parametrize("name", ["auto", "int8", "fp8"])
async def test_the_generic_back_end_keeps_them_so_too(tmp_path: Path, name: str) -> None:
    directory = make_checkpoint(tmp_path, "llama", tokenizer=True)
    model = load_reference(directory)
    prompts = random_prompts(3, longest=20, seed=6)
    config = small_config(
        directory,
        model__implementation="transformers",
        compile__enforce_eager=True,
        cache__dtype=name,
    )
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
        assert engine.inspector.memory.kv is not None
        assert engine.inspector.memory.kv.dtype == ("float32" if name == "auto" else name)
    if name != "auto":
        wanted = [rounded_greedy(model, prompt, 16, DTYPES[name]) for prompt in prompts]
        assert [result.token_ids for result in results] == wanted


def test_latents_are_refused_by_name(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "deepseekv2"), LoadOptions(load_format="dummy"))
    with pytest.raises(ConfigError, match=r"cache\.dtype = 'int8'.*keeps latents"):
        set_cache_dtype(CacheSection(dtype="int8"), model)
    set_cache_dtype(CacheSection(), model)
    assert model.cache_dtype is None


def test_states_beside_attention_keep_their_dtype(tmp_path: Path) -> None:
    model = load_model(
        make_checkpoint(tmp_path, "granite_moehybrid"), LoadOptions(load_format="dummy")
    )
    before = model.kv_cache_spec()
    set_cache_dtype(CacheSection(dtype="int8"), model)
    pairs = list(zip(before, model.kv_cache_spec(), strict=True))
    assert {one.per for one in before} == {"token", "sequence"}
    for old, new in pairs:
        assert (new == old) == (old.per == "sequence")
        assert {tensor.dtype for tensor in new.tensors} == (
            {torch.int8} if old.per == "token" else {tensor.dtype for tensor in old.tensors}
        )


def test_prefixes_of_another_dtype_are_others(checkpoint: Path) -> None:
    model = load_model(checkpoint, LoadOptions(load_format="dummy"))
    config = small_config(checkpoint)
    keys = [_content_key(config, model)]
    for dtype in DTYPES.values():
        model.cache_dtype = dtype
        keys.append(_content_key(config, model))
    assert len(set(keys)) == 3


def test_only_our_own_kernels_read_them_on_a_gpu(checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    model = load_model(checkpoint, LoadOptions(load_format="dummy"))
    model.cache_dtype = torch.int8
    with pytest.raises(ConfigError, match="only Triton's kernels read a KV cache in int8"):
        choose_attention(DeviceSection(attention="flashinfer"), model, 16)
    _, described = choose_attention(DeviceSection(), model, 16)
    assert described == "triton"
