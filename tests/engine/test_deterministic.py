"""`model.deterministic`: nothing that happens to a request beside itself shows in one bit of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.errors import ConfigError
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.models.layers.activations import ACTIVATIONS, Activation, gated
from src.models.layers.recurrence import (
    RecurrenceInSpec,
    RecurrenceInWeights,
    delta_in,
    mamba_in,
)
from src.ops.build.kernels import ensure_built, kernel_library
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import save_modules
from tests.support.engines import random_prompts, small_config
from tests.support.families import SHORT_SIGHTED

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SCORED = SamplingParams(temperature=0, max_tokens=20, logprobs=20, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, max_tokens=20, logprobs=20, seed=5, ignore_eos=True
)
SHORT_SCORED = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
PROMPT_SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=5, ignore_eos=True)

# One that decodes over the end of the kernel's split of 256 keys, one that is prefilled over it.
LONG = [[3 + (7 * i) % 300 for i in range(length)] for length in (250, 300)]
PROMPTS = [*random_prompts(6, longest=60, seed=11), *LONG]

ALONE = {
    "model__deterministic": True,
    "scheduler__pipeline_depth": 1,
    "scheduler__max_num_batched_tokens": 512,
    "cache__enable_prefix_caching": False,
}
BATCHED = {"model__deterministic": True}
PATHS: dict[str, dict[str, Any]] = {
    "batched": BATCHED,
    "batched, depth 1": BATCHED | {"scheduler__pipeline_depth": 1},
    "2 threads": BATCHED | {"device__num_threads": 2},
    "chunks of 1": BATCHED | {"scheduler__max_num_batched_tokens": 8},
    "chunks of 33": BATCHED | {"scheduler__max_num_batched_tokens": 33},
    "chunks of 100": BATCHED | {"scheduler__max_num_batched_tokens": 100},
    "preempted": BATCHED
    | {
        "cache__num_blocks": 84,
        "cache__enable_prefix_caching": False,
        "model__max_model_len": 330,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"model__dtype": "float32"},
    "bfloat16": {"model__dtype": "bfloat16"},
    "int8": {"model__dtype": "bfloat16", "model__quantization": "int8"},
    "int4": {"model__dtype": "float32", "model__quantization": "int4"},
    "int4, inputs too": {
        "model__dtype": "bfloat16",
        "model__quantization": "int4",
        "model__quantize_activations": True,
    },
}
COMPILED = {"compile__enforce_eager": False}
UNCOMPILED = {"compile__enforce_eager": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deterministic")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2, max_position_embeddings=512)


async def one_by_one(engine: AsyncEngine, params: Sequence[SamplingParams]) -> list[Any]:
    return [answer(await engine.generate(prompt, p)) for p in params for prompt in PROMPTS]


async def together(engine: AsyncEngine, params: Sequence[SamplingParams]) -> list[Any]:
    calls = [engine.generate(prompt, p) for p in params for prompt in PROMPTS]
    return [answer(result) for result in await asyncio.gather(*calls)]


async def answer_to(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
    return answer(await engine.generate(prompt, params))


def answer(result: Any) -> Any:
    """Tokens and log-probabilities, which Python compares bit by bit."""
    return result.token_ids, result.completions[0].logprobs, result.prompt_logprobs


@pytest.mark.parametrize("kind", KINDS)
async def test_bits_are_those_of_the_request_alone(kind: str, directory: Path) -> None:
    params = (SCORED, SAMPLED, PROMPT_SCORED)
    async with AsyncEngine.open(small_config(directory, **ALONE, **KINDS[kind])) as engine:
        expected = await one_by_one(engine, params)
    for path, changes in PATHS.items():
        async with AsyncEngine.open(small_config(directory, **changes, **KINDS[kind])) as engine:
            assert await together(engine, params) == expected, path
            if path == "preempted":
                assert engine.stats.preemptions > 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
async def test_bits_of_a_vector_are_those_of_the_text_alone(
    kind: str, pooling: str, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    save_modules(tmp_path, pooling={"pooling_mode": pooling})
    async with AsyncEngine.open(small_config(tmp_path, **ALONE, **KINDS[kind])) as engine:
        alone = [(await engine.embed([prompt]))[0].vector for prompt in PROMPTS]
    for path in ("batched", "chunks of 1", "chunks of 33", "chunks of 100"):
        config = small_config(tmp_path, **PATHS[path], **KINDS[kind])
        async with AsyncEngine.open(config) as engine:
            made = await asyncio.gather(*(engine.embed([prompt]) for prompt in PROMPTS))
            many = await engine.embed(PROMPTS)
        assert [each.vector for (each,) in made] == alone, path
        assert [each.vector for each in many] == alone, path


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_latent_attention_keeps_the_bits_too(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    directory = make_checkpoint(tmp_path, "deepseekv2", tokenizer=True, **sizes)
    async with AsyncEngine.open(small_config(directory, **ALONE, **KINDS[kind])) as engine:
        expected = await one_by_one(engine, [SCORED])
    for path in ("2 threads", "chunks of 33", "preempted"):
        config = small_config(directory, **PATHS[path], **KINDS[kind])
        async with AsyncEngine.open(config) as engine:
            assert await together(engine, [SCORED]) == expected, path


@pytest.mark.parametrize(
    ("kind", "cache"), [("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "fp8")]
)
async def test_a_cache_in_8_bits_keeps_the_bits_too(kind: str, cache: str, directory: Path) -> None:
    changes = {**KINDS[kind], "cache__dtype": cache}
    async with AsyncEngine.open(small_config(directory, **ALONE, **changes)) as engine:
        expected = await one_by_one(engine, [SCORED])
    for path in ("2 threads", "chunks of 33", "preempted"):
        async with AsyncEngine.open(small_config(directory, **PATHS[path], **changes)) as engine:
            assert await together(engine, [SCORED]) == expected, path
            if path == "chunks of 33":  # what is cached has the same bits
                assert await together(engine, [SCORED]) == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_cached_prefixes_change_no_bit(kind: str, directory: Path) -> None:
    async with AsyncEngine.open(small_config(directory, **ALONE, **KINDS[kind])) as engine:
        expected = await one_by_one(engine, [SCORED])
    async with AsyncEngine.open(small_config(directory, **BATCHED, **KINDS[kind])) as engine:
        assert await together(engine, [SCORED]) == expected
        again = await asyncio.gather(*(engine.generate(prompt, SCORED) for prompt in PROMPTS))
        assert [answer(result) for result in again] == expected
        assert again[-1].usage.cached_tokens > 256


@pytest.fixture(scope="module")
def wide_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its projections can be laid out for products of bytes."""
    path = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return make_checkpoint(
        path, tokenizer=True, num_hidden_layers=2, max_position_embeddings=512, **sizes
    )


@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        pytest.param("float32", 3, marks=pytest.mark.compilers),
        pytest.param("bfloat16", 2, marks=pytest.mark.compilers),
        pytest.param("int8", 2, marks=pytest.mark.compilers),
        pytest.param("int4", 2, marks=pytest.mark.compilers),
        pytest.param("int4, inputs too", 3, marks=pytest.mark.compilers),
    ],
)
async def test_compiled_code_keeps_it(
    kind: str, threads: int, wide_directory: Path, request: pytest.FixtureRequest
) -> None:
    directory = wide_directory
    changes = COMPILED | KINDS[kind] | {"device__num_threads": threads}
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    # So that steps of few tokens are cut too.
    library.assume_wake_cost(0.01)
    request.addfinalizer(library.assume_wake_cost)
    async with AsyncEngine.open(small_config(directory, **ALONE, **changes)) as engine:
        # Although `compile.startup` is "background": one request must not see two kinds of code.
        assert engine.stats.compiled
        expected = await one_by_one(engine, [SCORED, SAMPLED])
    for path in ("batched", "chunks of 33", "preempted"):
        async with AsyncEngine.open(small_config(directory, **PATHS[path], **changes)) as engine:
            assert engine.stats.compiled
            assert await together(engine, [SCORED, SAMPLED]) == expected, path
            if path == "preempted":
                assert engine.stats.preemptions > 0
            if path == "batched":
                again = await asyncio.gather(*(engine.generate(p, SCORED) for p in PROMPTS))
                assert [answer(result) for result in again] == expected[: len(PROMPTS)]
                assert again[-1].usage.cached_tokens > 256


async def test_rows_of_any_length_are_summed_in_one_order(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 104, "max_position_embeddings": 512}
    directory = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=2, **sizes)
    for kind in ("float32", "bfloat16"):
        async with AsyncEngine.open(small_config(directory, **ALONE, **KINDS[kind])) as engine:
            expected = await one_by_one(engine, [SCORED])
        changes = PATHS["chunks of 33"] | KINDS[kind]
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            assert await together(engine, [SCORED]) == expected


@pytest.mark.parametrize("architecture", SHORT_SIGHTED)
async def test_every_family_keeps_the_bits_uncompiled(architecture: str, tmp_path: Path) -> None:
    """In float32: rounding to fewer bits would hide most differences."""
    sizes = {"max_position_embeddings": 512} | SHORT_SIGHTED[architecture]
    directory = make_checkpoint(tmp_path, architecture, tokenizer=True, **sizes)
    params = (SHORT_SCORED, PROMPT_SCORED)
    changes = KINDS["float32"] | UNCOMPILED
    async with AsyncEngine.open(small_config(directory, **ALONE, **changes)) as engine:
        expected = await one_by_one(engine, params)
    for path in ("batched", "2 threads", "chunks of 33"):
        async with AsyncEngine.open(small_config(directory, **PATHS[path], **changes)) as engine:
            assert not engine.stats.compiled
            assert await together(engine, params) == expected, path
            # In other company: without the longest ones, and with those that come first at last.
            fewer = [5, 4, 2, 1, 0]
            again = [answer_to(engine, PROMPTS[index], SHORT_SCORED) for index in fewer]
            assert await asyncio.gather(*again) == [expected[index] for index in fewer], path


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1000, 2816])
def test_no_thread_is_seen_in_an_activation(width: int, activation: Activation) -> None:
    gate_up = torch.randn(300, 2 * width, generator=torch.Generator().manual_seed(0)) * 3
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = torch.cat([gated(row[None], activation, deterministic=True) for row in gate_up])
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for tokens in (7, 33, 100, 299, 300):
                got = gated(gate_up[:tokens], activation, deterministic=True)
                assert torch.equal(got, expected[:tokens])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("project", [delta_in, mamba_in])
def test_no_thread_is_seen_in_a_recurrent_layers_gates(project: Any) -> None:
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    spec = RecurrenceInSpec(None, heads=3, gate=1001, channels=8, deterministic=True)
    random = torch.Generator().manual_seed(0)
    rows = spec.channels + spec.gate + spec.heads * (2 if project is delta_in else 1)
    weight = torch.randn(rows, 16, generator=random)
    weights = RecurrenceInWeights(None, weight, None, torch.ones(3), torch.ones(3))
    residual = torch.randn(100, 16, generator=random)
    threads = torch.get_num_threads()
    try:
        with library.ways.keeping_one():
            torch.set_num_threads(1)
            alone = [project(spec, weights, token[None]) for token in residual]
            for count in (1, 3):
                torch.set_num_threads(count)
                for got, parts in zip(
                    project(spec, weights, residual), zip(*alone, strict=True), strict=True
                ):
                    assert torch.equal(got, torch.cat(parts))
    finally:
        torch.set_num_threads(threads)


async def test_it_is_refused_where_it_would_not_hold(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(directory, model__deterministic=True)
    monkeypatch.setattr(startup, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"model\.deterministic.*cuda"):
        startup.build_engine(config, lambda *_: None, StartTimeline())
    monkeypatch.undo()
    monkeypatch.setattr(startup, "ensure_built", lambda wait, head_start=0.0: "reference")
    with pytest.raises(ConfigError, match=r"model\.deterministic.*kernels"):
        startup.build_engine(config, lambda *_: None, StartTimeline())
