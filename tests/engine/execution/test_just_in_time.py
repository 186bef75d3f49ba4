"""Code that is compiled in the serving process, as on CUDA: forced here, where the CPU runs it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from src import AsyncEngine, SamplingParams
from src.core.errors import EngineDeadError
from src.engine import startup
from src.engine.execution.compilation import ProgramCompilation
from src.models import Implementation, Model, load_model
from src.models.loading import loader
from src.models.loading.filling import fill
from src.models.loading.options import LoadHooks, LoadOptions
from src.ops.build.cache_root import cache_root
from tests.models.test_quantized_checkpoints import GPTQ
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.probe import Probe
from tests.support.quantized import gptq, write_quantized

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def compile_before_reading(
    monkeypatch: pytest.MonkeyPatch, made: list[ProgramCompilation], functions: int = 4
) -> None:
    """All is compiled, to so many functions, before a weight has its value."""

    def load(path: Path, options: LoadOptions, hooks: LoadHooks) -> Model:
        return load_model(path, options, replace(hooks, when_allocated=made[0].begin_just_in_time))

    def fill_late(*given: Any) -> None:
        compiled = made[0]._just_in_time
        assert compiled is not None
        assert len(set(compiled.result()[0][0])) == functions
        fill(*given)

    implementation = Implementation("native", is_program=True, load=load)
    monkeypatch.setattr(startup, "choose_implementation", lambda *_: implementation)
    monkeypatch.setattr(loader, "fill", fill_late)


@pytest.mark.parametrize("mode", ["wait", "background", "early"])
async def test_tokens_are_those_of_transformers_and_no_step_compiles(
    mode: str, checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ProgramCompilation] = []

    def begin(_config: Any, _path: Any, _device: Any, timeline: Any, *_: Any, **__: Any) -> Any:
        made.append(
            ProgramCompilation(None, 1, cache_root(), timeline, awaited=True, most_tokens=24)
        )
        return made[0]

    monkeypatch.setattr(startup, "_begin_compilation", begin)
    if mode == "early":
        mode = "wait"
        compile_before_reading(monkeypatch, made)
    config = small_config(
        checkpoint,
        compile__enforce_eager=False,
        compile__startup=mode,
        scheduler__max_num_batched_tokens=24,
    )
    prompts = random_prompts(12, longest=40)
    counters.clear()
    async with AsyncEngine.open(config) as engine:
        parts = Probe(engine).parts
        assert parts.compilation is not None
        await asyncio.to_thread(parts.compilation.join)
        assert engine.stats.compiled
        assert parts.worker.code.num_graphs == 4
        attempts = counters["stats"]["unique_graphs"]
        assert attempts == 4
        for count in (1, 2, 12):
            results = await asyncio.gather(
                *(engine.generate(prompt, GREEDY) for prompt in prompts[:count])
            )
            for prompt, result in zip(prompts, results, strict=False):
                assert result.token_ids == greedy(reference, prompt, 24)
        # What the code was not compiled for fails the step, says why, and nobody compiles.
        model = Probe(engine).model
        (name, table), *others = model.buffers().items()
        assert not others
        model.replace(name, table.double())
        with pytest.raises(EngineDeadError, match="a step of this request failed") as failed:
            await engine.generate(prompts[0], GREEDY)
        model.replace(name, table)
        assert "float64" in str(failed.value.__cause__)
        result = await engine.generate(prompts[0], GREEDY)
        assert result.token_ids == greedy(reference, prompts[0], 24)
        assert counters["stats"]["unique_graphs"] == attempts
        assert_idle(engine)


@pytest.mark.parametrize("differ", [False, True])
async def test_weights_whose_values_decide_how_they_are_held(
    differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Queries, keys and values of different orders are decoded when these are known."""
    seeds = itertools.count() if differ else itertools.repeat(0)
    pack = gptq(shuffled=True, seed=lambda: next(seeds))
    plain = make_checkpoint(tmp_path / "plain", tokenizer=True, num_hidden_layers=2)
    directory = write_quantized(plain, tmp_path / "packed", GPTQ | {"desc_act": True}, pack)
    made: list[ProgramCompilation] = []

    def begin(_config: Any, _path: Any, _device: Any, timeline: Any, *_: Any, **__: Any) -> Any:
        made.append(
            ProgramCompilation(None, 1, cache_root(), timeline, awaited=True, most_tokens=24)
        )
        return made[0]

    monkeypatch.setattr(startup, "_begin_compilation", begin)
    compile_before_reading(monkeypatch, made)
    config = small_config(
        directory,
        compile__enforce_eager=False,
        compile__startup="wait",
        scheduler__max_num_batched_tokens=24,
    )
    oracle, prompts = load_reference(plain), random_prompts(4, longest=40)
    with caplog.at_level("INFO", "src.engine"):
        async with AsyncEngine.open(config) as engine:
            assert engine.stats.compiled
            results = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
    assert caplog.text.count("compiling once more") == differ
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(oracle, prompt, 24)
