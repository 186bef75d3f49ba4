"""Whole engines on the CUDA that computes nothing: what they launch, wait for, and leave."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.runtime.jit import JITFunction

from src import AsyncEngine, SamplingParams
from src.compile.just_in_time import CompiledFunction
from src.core.settings import CHECKOUT
from src.engine.execution.compilation import ProgramCompilation
from src.engine.execution.graphs import GraphStats
from src.engine.execution.graphs.decode import DecodeCapture
from src.engine.execution.pooling import RowPooling
from src.engine.execution.row_state import RowState
from src.models import Model
from src.models.loading import loader
from src.models.loading.filling import fill
from src.ops.attention import latent_expanded_triton as latent_expanded
from tests.compile.functions import gate_twice
from tests.null_cuda.build import LAUNCHES, REFUSALS
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules
from tests.support.engines import assert_idle, small_config
from tests.support.no_waiting import watch_on_cuda
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

CUDA: dict[str, Any] = {
    "device__type": "cuda",
    "cache__block_size": 16,
    "cache__num_blocks": 600,
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 64,
}
# One after the other, and all at once.
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9, "min_p": 0.05, "seed": 4},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"logprobs": 3, "temperature": 0},
    {"prompt_logprobs": 2},
    {"logit_bias": {5: 1.0, 7: -3.0}, "bad_words": ("the end", "foo")},
    {"min_tokens": 8, "allowed_token_ids": tuple(range(100))},
    {"n": 3},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("null") / "model", tokenizer=True, dtype=torch.bfloat16
    )


def counted(which: int) -> int:
    count = ctypes.CDLL(None).null_cuda_count
    count.restype = ctypes.c_long
    return int(count(which))


@pytest.fixture(autouse=True)
def nothing_is_refused(request: pytest.FixtureRequest) -> Iterator[None]:
    before = counted(REFUSALS)
    yield
    if "breaks" not in request.keywords:
        assert counted(REFUSALS) == before


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What waits for a collector is not gone."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    yield
    gc.enable()


def stats_of(engine: AsyncEngine) -> GraphStats:
    return Probe(engine).code.graph_stats


async def ask(engine: AsyncEngine, source: random.Random) -> None:
    """Requests of every kind in random company, some of which are given up."""

    async def one(wishes: dict[str, Any]) -> None:
        await asyncio.sleep(source.random() / 4)
        prompt = [source.randrange(3, 320) for _ in range(source.choice((1, 5, 40, 200)))]
        length = source.randint(1, 24)
        wishes = {**wishes, "max_tokens": max(length, wishes.get("min_tokens", 1))}
        answer = asyncio.create_task(
            engine.generate(prompt, SamplingParams(ignore_eos=True, **wishes))
        )
        if source.random() < 0.15:
            await asyncio.sleep(source.random() / 10)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            return
        result = await answer
        assert all(len(choice.token_ids) == wishes["max_tokens"] for choice in result.completions)

    await asyncio.gather(*(one(wishes) for wishes in 4 * WISHES))


@pytest.mark.parametrize("graphs", ["off", "wait", "background"])
@pytest.mark.parametrize("code", ["off", "wait", "background"])
async def test_no_step_waits_and_nothing_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, code: str, graphs: str
) -> None:
    changes = {"compile__startup": code, "compile__cuda_graphs": graphs}
    source = random.Random(f"{code}{graphs}")
    async with AsyncEngine.open(small_config(checkpoint, **(CUDA | changes))) as engine:
        await ask(engine, source)
        if Probe(engine).parts.compilation is not None:
            # And have it captured, where that comes after it.
            await asyncio.to_thread(Probe(engine).parts.compilation.join)
        seen = watch_on_cuda(monkeypatch)
        bound: list[str] = []
        run = JITFunction.run

        def bind(kernel: Any, *args: Any, **named: Any) -> Any:
            bound.append(kernel.__name__)
            return run(kernel, *args, **named)

        monkeypatch.setattr(JITFunction, "run", bind)
        await ask(engine, source)
        stats = stats_of(engine)
        assert len(seen) > 30
        # Kept kernels are launched without Triton's binder.
        assert not bound
        assert (stats.steps["decode"] > 0) == (graphs != "off")
        assert engine.stats.compiled == (code != "off")
        assert_idle(engine)


async def test_prompts_of_latent_attention_are_expanded_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decoding rows, in captured pieces and without."""
    expanded: list[int] = []
    expand = latent_expanded.run

    def noted(*given: Any) -> None:
        expanded.append(given[-1])
        expand(*given)

    monkeypatch.setattr(latent_expanded, "run", noted)
    path = make_checkpoint(tmp_path / "model", "deepseekv3", tokenizer=True, dtype=torch.bfloat16)
    async with AsyncEngine.open(small_config(path, **CUDA)) as engine:
        # Warming up compiles what prompts will launch.
        assert expanded
        assert not any(expanded)
        await ask(engine, random.Random(4))
        seen = watch_on_cuda(monkeypatch)
        expanded.clear()
        await ask(engine, random.Random(5))
        assert len(seen) > 30
        assert max(expanded) >= 200
        assert stats_of(engine).steps["decode"] > 0
        assert_idle(engine)


async def embed_beside(engine: AsyncEngine, source: random.Random) -> None:
    """Vectors of texts and of their tokens, some given up, beside requests for text."""

    async def one(task: str) -> None:
        await asyncio.sleep(source.random() / 4)
        prompts = [
            [source.randrange(3, 320) for _ in range(source.choice((1, 5, 40, 200)))]
            for _ in range(6)
        ]
        asked = asyncio.ensure_future(
            engine.embed(prompts) if task == "embed" else engine.encode(prompts, task=task)  # type: ignore[arg-type]
        )
        if source.random() < 0.15:
            await asyncio.sleep(source.random() / 10)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            return
        assert len(await asked) == len(prompts)

    await asyncio.gather(ask(engine, source), *map(one, 6 * ["embed", "token_embed"]))


@pytest.mark.parametrize("graphs", ["off", "wait"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
async def test_steps_that_pool_do_not_wait_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: str, graphs: str
) -> None:
    path = make_checkpoint(tmp_path / "model", tokenizer=True, dtype=torch.bfloat16)
    save_modules(path, pooling={"pooling_mode": pooling})
    pooled: list[int] = []
    pool = RowPooling.pool

    def noted(self: RowPooling, *given: Any) -> Any:
        vectors = pool(self, *given)
        pooled.append(0 if vectors is None else len(vectors.rows))
        return vectors

    monkeypatch.setattr(RowPooling, "pool", noted)
    changes = {"compile__cuda_graphs": graphs, "scheduler__max_num_batched_tokens": 64}
    async with AsyncEngine.open(small_config(path, **(CUDA | changes))) as engine:
        await embed_beside(engine, random.Random(6))
        seen = watch_on_cuda(monkeypatch)
        pooled.clear()
        await embed_beside(engine, random.Random(7))
        assert len(seen) > 30
        # Chunks of a text, several texts of one step.
        assert min(pooled) == 0
        assert max(pooled) > 1
        assert (stats_of(engine).steps["decode"] > 0) == (graphs != "off")
        assert_idle(engine)


async def test_an_encoders_steps_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_encoder(tmp_path / "encoder", "bert")
    save_encoder_tokenizer(path)
    save_modules(path, pooling={"pooling_mode": "mean"})
    async with AsyncEngine.open(small_config(path, **CUDA, model__dtype="bfloat16")) as engine:
        prompts = [[5 + number % 90] * (1 + number % 90) for number in range(60)]
        assert len(await engine.embed(prompts)) == len(prompts)
        seen = watch_on_cuda(monkeypatch)
        assert len(await engine.embed(prompts)) == len(prompts)
        assert len(await engine.encode(prompts[:9], task="token_embed")) == 9
        assert seen
        assert_idle(engine)


@pytest.mark.parametrize("tokens", [2048, 8192])
async def test_steps_that_pool_take_no_more_memory_than_was_left_for_them(
    tmp_path: Path, tokens: int
) -> None:
    """Results of all tokens are the largest; two of such steps are in flight."""
    path = make_checkpoint(
        tmp_path / "model", tokenizer=True, dtype=torch.bfloat16, max_position_embeddings=1024
    )
    changes = {
        "scheduler__max_num_batched_tokens": tokens,
        "scheduler__max_num_seqs": 32,
        "cache__num_blocks": 4000,
        "cache__enable_prefix_caching": False,
        "compile__cuda_graphs": "off",
    }
    async with AsyncEngine.open(small_config(path, **(CUDA | changes))) as engine:
        left = Probe(engine).parts.memory.step
        prompts = [[5 + number % 90] * 1000 for number in range(48)]
        await engine.embed(prompts)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # Rows and sampling state are there for good, and were part of what was left.
        before = torch.cuda.memory_allocated()
        await engine.encode(prompts, task="token_embed")
        taken = torch.cuda.max_memory_allocated() - before
        hidden = tokens * Probe(engine).model.spec.hidden_size * 2
        assert taken > 2 * hidden
        assert taken <= left
        assert_idle(engine)


@pytest.mark.parametrize("times", [False, True])
def test_candidates_of_a_kernel_are_timed_only_where_nothing_else_runs(
    monkeypatch: pytest.MonkeyPatch, times: bool
) -> None:
    timed: list[int] = []
    choose = CachingAutotuner.autotune_to_one_config

    def note(self: CachingAutotuner, *args: Any, **named: Any) -> Any:
        timed.append(len(self.launchers))
        return choose(self, *args, **named)

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", note)
    # Kept choices of earlier runs would need no timing.
    with inductor_config.patch(force_disable_caches=True), torch.inference_mode():
        compiled = CompiledFunction(gate_twice, (0, 1), 300, times=times)
        compiled(*(torch.ones(256, width, device="cuda") for width in (144, 72)),
                 torch.ones(72, device="cuda"))  # fmt: skip
    assert bool(timed) is times


@pytest.mark.parametrize("code", ["background", "wait"])
async def test_an_engine_times_nothing_while_it_serves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    times: set[bool] = set()
    make = CompiledFunction.__init__

    def note(self: CompiledFunction, *args: Any, **named: Any) -> None:
        times.add(named["times"])
        make(self, *args, **named)

    monkeypatch.setattr(CompiledFunction, "__init__", note)
    config = small_config(checkpoint, **(CUDA | {"compile__startup": code}))
    async with AsyncEngine.open(config) as engine:
        compilation = Probe(engine).parts.compilation
        assert compilation is not None
        await asyncio.to_thread(compilation.join)
        assert engine.stats.compiled
    assert times == {code == "wait"}


async def test_who_awaits_code_has_it_compiled_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    compile_calls = ProgramCompilation._compiled

    def compile_and_tell(self: ProgramCompilation, model: Model) -> Any:
        result = compile_calls(self, model)
        compiled.set()
        return result

    def fill_late(*given: Any) -> None:
        assert compiled.wait(120)
        fill(*given)

    monkeypatch.setattr(ProgramCompilation, "_compiled", compile_and_tell)
    monkeypatch.setattr(loader, "fill", fill_late)
    changes = {"compile__startup": "wait"}
    async with AsyncEngine.open(small_config(checkpoint, **(CUDA | changes))) as engine:
        assert engine.stats.compiled
        await engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))


async def test_a_captured_step_has_ten_kernels_a_layer_and_twenty_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of nothing costs as long as reading a megabyte of weights.

    One of the twenty-one makes a harmless token of what could not be sampled, for the step behind.
    """
    launched: dict[int, int] = {}
    capture = DecodeCapture._compute

    def count(self: DecodeCapture, buffer: torch.Tensor, *, adapts: bool = False) -> Any:
        before = counted(LAUNCHES)
        output = capture(self, buffer, adapts=adapts)
        launched[layers] = counted(LAUNCHES) - before
        return output

    monkeypatch.setattr(DecodeCapture, "_compute", count)
    for layers in (2, 5):
        path = make_checkpoint(
            tmp_path / str(layers), tokenizer=True, dtype=torch.bfloat16, num_hidden_layers=layers
        )
        async with AsyncEngine.open(small_config(path, **(CUDA | {"compile__startup": "wait"}))):
            pass
    assert launched == {2: 41, 5: 71}


async def test_engines_at_once_have_streams_of_their_own(checkpoint: Path) -> None:
    """Also behind one that was closed; what one of them captures the others do not meet."""

    def stream_of(engine: AsyncEngine) -> int:
        stream: int = Probe(engine).worker._device._stream.cuda_stream
        return stream

    config = small_config(checkpoint, **CUDA)
    async with AsyncEngine.open(config) as before:
        first = stream_of(before)
    async with AsyncEngine.open(config) as engine:
        assert stream_of(engine) == first
        serving = asyncio.create_task(ask(engine, random.Random(2)))
        async with AsyncEngine.open(config) as other:
            assert stream_of(other) != first
            await ask(other, random.Random(3))
        await serving
        assert_idle(engine)


@pytest.mark.parametrize("code", ["off", "wait"])
async def test_engines_that_follow_one_another_leave_nothing(
    checkpoint: Path, no_collector: None, code: str
) -> None:
    free = []
    # So many that two workspaces of 32 MiB each would show.
    for _ in range(8):
        changes = {
            "cache__num_blocks": 10**6,
            "scheduler__max_num_seqs": 64,
            "compile__startup": code,
        }
        async with AsyncEngine.open(small_config(checkpoint, **(CUDA | changes))) as engine:
            await engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
            kv_bytes = Probe(engine).parts.kv_plan.total_bytes
            before = torch.cuda.mem_get_info()[0]
            given_up = asyncio.create_task(
                engine.generate([5, 6, 8], SamplingParams(max_tokens=500))
            )
            await asyncio.sleep(0.01)
        free.append(torch.cuda.mem_get_info()[0])
        await asyncio.gather(given_up, return_exceptions=True)
        assert kv_bytes > 2**32
        assert free[-1] - before >= kv_bytes
    # torch has workspaces for each thread that multiplies, and they start in any of a few.
    assert min(free) > max(free) - 2**28


@pytest.mark.breaks
async def test_a_capture_that_waits_leaves_an_engine_without_graphs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = RowState.gather

    def waiting(self: RowState, rows: torch.Tensor, positions: torch.Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            positions.sum().item()
        return gather(self, rows, positions)

    monkeypatch.setattr(RowState, "gather", waiting)
    async with AsyncEngine.open(small_config(checkpoint, **CUDA)) as engine:
        await ask(engine, random.Random(1))
        assert stats_of(engine).captured.total() == 0
        assert_idle(engine)
    torch.cuda.empty_cache()


def test_the_acceptance_of_a_gpu_runs_to_its_table() -> None:
    """Its figures mean nothing here, and its exit code says so."""
    sections = ("--only", "graphs", "vectors", "start")
    command = ("-m", "benchmarks.gpu", "--quick", "--shape", "tiny", "--no-save", *sections)
    ended = subprocess.run(
        [sys.executable, *command], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, timeout=280
    )
    assert ended.returncode == 3, ended.stdout
    assert "warm start to first token" in ended.stdout
    assert "vector of a lone text" in ended.stdout
    assert "failed" not in ended.stdout
    assert "not run" not in ended.stdout
