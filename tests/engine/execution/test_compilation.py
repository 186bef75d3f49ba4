"""Compiled code comes from other processes, for all depths, and nothing is compiled after that."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.compile import ahead, just_in_time
from src.compile.artifacts import ArtifactCache
from src.compile.job import Job
from src.core.settings import CHECKOUT
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.engine.execution import compilation
from src.models import Implementation, Model, load_model, outline_model
from src.models.loading.options import LoadOptions
from src.models.program import run_chain
from src.ops.build.cache_root import cache_root
from src.ops.build.kernels import ensure_built
from tests.compile.test_ahead import assert_allocates_tokens_only
from tests.engine.test_strips import SIZES
from tests.models.test_quantized_checkpoints import GPTQ
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import greedy, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED, families
from tests.support.probe import Probe
from tests.support.quantized import gptq, write_quantized

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0, max_tokens=12)
UNCOMPILED = {"compile__enforce_eager": True}
COMPILED = {"compile__enforce_eager": False, "compile__startup": "wait"}
BACKGROUND = {"compile__enforce_eager": False, "compile__startup": "background"}

WARM_START = """
import asyncio, json, random, subprocess, sys
from pathlib import Path
from src import AsyncEngine, SamplingParams
from tests.support.engines import random_prompts, small_config
from tests.support.probe import Probe

started = []
popen = subprocess.Popen
class Counting(popen):
    def __init__(self, command, *args, **kwargs):
        started.append(command if isinstance(command, str) else list(command))
        super().__init__(command, *args, **kwargs)
subprocess.Popen = Counting

async def main():
    config = small_config(
        Path(sys.argv[1]),
        compile__enforce_eager=False,
        compile__startup="wait",
        scheduler__max_num_batched_tokens=96,
    )
    source = random.Random(5)
    async with AsyncEngine.open(config) as engine:
        assert engine.stats.compiled
        for length in range(1, 201):
            await engine.generate([7 + length % 50] * length, SamplingParams(max_tokens=1))
        for _ in range(200):
            prompts = random_prompts(source.randint(2, 12), longest=180, seed=source.random())
            await asyncio.gather(*(
                engine.generate(prompt, SamplingParams(max_tokens=source.randint(1, 12)))
                for prompt in prompts
            ))
        graphs = Probe(engine).code.num_graphs
        steps = [
            (step.num_rows, step.num_tokens, step.decode_rows, step.sampled_rows)
            for step in engine.timeline
        ]
    compilers = [n for n in ("torch._dynamo", "torch._inductor", "sympy") if n in sys.modules]
    print(json.dumps(
        {"started": started, "graphs": graphs, "compilers": compilers, "steps": steps}
    ))

asyncio.run(main())
"""


def jobs_of(directory: Path, *, in_strips: bool = False, **options: Any) -> list[Job]:
    outline = outline_model(directory, LoadOptions(**options))
    if in_strips:
        assert list(outline.lay_out())
    jobs = {}
    for call in outline.program.calls:
        arguments = outline.call_arguments(call, 8)
        tokens = tuple(range(2, len(arguments)))
        job = Job.of(run_chain, arguments, tokens, call.chain.functions)
        jobs[job.key] = job
    return list(jobs.values())


@pytest.mark.compilers
async def test_compiled_bfloat16_stays_close_to_uncompiled(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, dtype=torch.bfloat16, tie=True)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = random_prompts(6, longest=30, seed=4)
    scored = []
    for changes in (UNCOMPILED, COMPILED):
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            results = await asyncio.gather(*(engine.generate(p, params) for p in prompts))
            assert engine.stats.compiled == (changes is COMPILED)
        entries = [entry for result in results for entry in result.prompt_logprobs or [] if entry]
        scored.append([entry.logprob for entry in entries])
    # Compiled code rounds to bfloat16 where uncompiled code does, or less often.
    assert scored[1] == pytest.approx(scored[0], abs=0.25)


async def test_a_warm_start_imports_no_compiler_and_no_shape_brings_one(
    checkpoint: Path,
) -> None:
    async with AsyncEngine.open(small_config(checkpoint, **COMPILED)) as engine:
        assert engine.stats.compiled
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WARM_START, str(checkpoint)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["graphs"] == 4
    assert seen["compilers"] == []
    # The caches ask the C++ compiler for its name, once, and nobody asks it for more.
    arguments = [command[1:] for command in seen["started"]]
    asked = [each for each in arguments if "src.text.template_process" not in each]
    assert asked == [["--version"]]
    shapes = {tuple(step) for step in seen["steps"]}
    assert len(shapes) >= 250
    assert len({num_tokens for _, num_tokens, _, _ in shapes}) >= 90
    # Decode steps of all numbers of rows, prompts that several steps compute, and both together.
    assert {rows for rows, _, decoding, _ in shapes if rows == decoding} == set(range(1, 9))
    chunked = [shape for shape in shapes if shape[3] < shape[0]]
    assert len(chunked) >= 10
    assert len([shape for shape in shapes if 0 < shape[2] < shape[0]]) >= 100


def test_depth_needs_no_code_of_its_own(tmp_path: Path) -> None:
    keys = []
    for depth in (1, 2, 48):
        directory = make_checkpoint(tmp_path / str(depth), num_hidden_layers=depth)
        keys.append([job.key for job in jobs_of(directory)])
    one, two, many = keys
    assert two == many
    assert len(two) == 4
    assert one == [two[0], *two[2:]]


@pytest.mark.parametrize(("depth", "graphs"), [(1, 3), (48, 4)])
async def test_graphs_that_serve_are_counted_whatever_the_depth(
    depth: int, graphs: int, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=depth)
    for changes, expected in (({"compile__enforce_eager": True}, 0), (COMPILED, graphs)):
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            await engine.generate([5, 17, 3], GREEDY)
            assert Probe(engine).code.num_graphs == expected


@pytest.mark.parametrize(
    "kind",
    [
        "float32",
        pytest.param("bfloat16 in strips", marks=pytest.mark.compilers),
        pytest.param("int8", marks=pytest.mark.compilers),
    ],
)
async def test_generated_code_copies_no_weight(
    kind: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, changes, outline = checkpoint, {}, {}
    if kind != "float32":
        # Whatever this machine's kernels gain by.
        ensure_built(wait=True)
        monkeypatch.setattr(startup, "takes_strips", lambda: True)
        monkeypatch.setattr(compilation, "takes_strips", lambda: True)
        directory = make_checkpoint(tmp_path, tokenizer=True, dtype=torch.bfloat16, **SIZES)
    if kind == "int8":
        changes = {"model__quantization": "int8", "model__quantize_activations": True}
        outline = {"quantization": "int8", "rounds_inputs": True}
    async with AsyncEngine.open(small_config(directory, **COMPILED, **changes)) as engine:
        assert engine.stats.compiled
    jobs = jobs_of(directory, in_strips=kind == "bfloat16 in strips", **outline)
    assert len(jobs) == 4
    for job in jobs:
        artifact = ArtifactCache(cache_root()).find(job)
        assert artifact is not None
        assert_allocates_tokens_only(artifact.source.read_text())


async def test_one_layer_needs_no_middle(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=1)
    prompts = random_prompts(4, longest=30, seed=6)
    results = []
    for changes in (UNCOMPILED, COMPILED):
        async with AsyncEngine.open(small_config(directory, **changes)) as engine:
            results.append(await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts)))
            assert engine.stats.compiled == (changes is COMPILED)
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]


@pytest.mark.parametrize("name", families(unmarked=("llama",), mark=pytest.mark.compilers))
async def test_every_family_in_compiled_code(name: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, name, tokenizer=True, **SHORT_SIGHTED[name])
    model, prompts = load_reference(directory), random_prompts(6, longest=30, seed=2)
    async with AsyncEngine.open(small_config(directory, **COMPILED)) as engine:
        assert engine.stats.compiled
        # All of a step in one call, whatever is in its program.
        assert Probe(engine).computer.code.step is not None
        for count in (1, 6):
            results = await asyncio.gather(
                *(engine.generate(prompt, GREEDY) for prompt in prompts[:count])
            )
            expected = [greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts[:count]]
            assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("mode", [COMPILED, BACKGROUND])
async def test_a_compiler_that_fails_leaves_the_model_uncompiled(
    checkpoint: Path,
    reference: Any,
    tmp_path: Path,
    mode: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(startup, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", "echo no compiler >&2; exit 3"))
    prompt = random_prompts(1, longest=20)[0]
    with caplog.at_level(logging.ERROR):
        async with AsyncEngine.open(small_config(checkpoint, **mode)) as engine:
            parts = Probe(engine).parts
            assert parts.compilation is not None
            await asyncio.to_thread(parts.compilation.join)
            result = await engine.generate(prompt, GREEDY)
            assert not engine.stats.compiled
    assert result.token_ids == greedy(reference, prompt, 12)
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "goes on uncompiled" in told[0]
    assert "no compiler" in told[0]


async def test_requests_are_served_and_the_engine_closes_while_a_compiler_runs(
    checkpoint: Path, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(ahead, "_COMMAND", ("sleep", "600"))
    prompt = random_prompts(1, longest=20)[0]
    async with AsyncEngine.open(small_config(checkpoint, **BACKGROUND)) as engine:
        result = await engine.generate(prompt, GREEDY)
        assert not engine.stats.compiled
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert result.token_ids == greedy(reference, prompt, 12)


@pytest.mark.parametrize("mode", [COMPILED, BACKGROUND])
async def test_compilers_run_before_there_are_weights(
    checkpoint: Path, tmp_path: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    monkeypatch.setattr(startup, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", f"touch {began}; exit 3"))
    monkeypatch.setattr(compilation, "HEAD_START", 0.1)
    seen = []

    def load_slowly(*arguments: Any) -> Model:
        deadline = time.monotonic() + 60
        while not began.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(began.exists())
        return load_model(*arguments)

    implementation = Implementation("native", is_program=True, load=load_slowly)
    monkeypatch.setattr(startup, "choose_implementation", lambda *_: implementation)
    async with AsyncEngine.open(small_config(checkpoint, **mode)):
        assert seen == [True]


async def test_closing_does_not_wait_for_the_kernels(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ahead, "_COMMAND", ("sleep", "600"))
    building = threading.Event()

    def never_built(wait: bool) -> str:
        building.set()
        assert not wait
        return "reference"

    monkeypatch.setattr(compilation, "ensure_built", never_built)
    monkeypatch.setattr(compilation, "is_building", lambda: True)
    running = compilation.ProgramCompilation(
        outline_model(checkpoint), 1, tmp_path, StartTimeline(), awaited=False, most_tokens=64
    )
    nobody: Any = None
    running.finish_in_background(nobody, nobody)
    assert building.wait(20)
    began = time.monotonic()
    await asyncio.to_thread(running.close)
    assert time.monotonic() - began < 10
    assert caplog.records == []


def test_just_in_time_compilation_times_kernels_on_the_tokens_of_a_prompt(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: set[int] = set()

    class Counting:
        def __init__(self, *_: Any, times: bool) -> None:
            assert times

        def __call__(self, chain: Any, weights: Any, *tensors: torch.Tensor) -> None:
            counts.update(map(len, tensors))

    monkeypatch.setattr(just_in_time, "CompiledFunction", Counting)
    running = compilation.ProgramCompilation(
        None, 1, cache_root(), StartTimeline(), awaited=True, most_tokens=64
    )
    compiled = running._compiled(outline_model(checkpoint))
    assert compiled
    assert counts == {256}


def test_weights_that_are_held_otherwise_than_compilers_were_told_go_on_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Queries, keys and values of different orders are decoded, which no outline can tell."""
    seeds = itertools.count()
    pack = gptq(shuffled=True, seed=lambda: next(seeds))
    plain = make_checkpoint(tmp_path / "plain", num_hidden_layers=1)
    directory = write_quantized(plain, tmp_path / "packed", GPTQ | {"desc_act": True}, pack)
    closed: list[bool] = []

    class Nothing:
        def __init__(self, *_: Any) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(compilation, "Compilation", Nothing)
    running = compilation.ProgramCompilation(
        outline_model(directory), 1, cache_root(), StartTimeline(), awaited=True, most_tokens=64
    )
    worker: Any = None
    running.finish(worker, load_model(directory))
    (told,) = [line for line in caplog.messages if "uncompiled" in line]
    assert "columns of different orders are decoded" in told
    assert closed


@pytest.mark.parametrize("off", [{"compile__startup": "off"}, {}])
async def test_off_starts_no_compiler(
    checkpoint: Path, off: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_COMMAND", ("false",))
    eager = {"compile__enforce_eager": not off}
    async with AsyncEngine.open(small_config(checkpoint, **eager, **off)) as engine:
        parts = Probe(engine).parts
        assert parts.compilation is None
