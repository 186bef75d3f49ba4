"""Captured steps give the tokens that uncaptured ones give, and are captured when they should be.

The fake capture replays on the CPU what a GPU would, and refuses what a GPU would not do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.compile import ahead
from src.compile.graphs import GraphShape, PaddingLadder
from src.core.structured_output import StructuredOutput
from src.engine import startup
from src.engine.devices.host import HostDevice
from src.engine.execution import idle_work
from src.engine.execution.graphs import GraphPool, GraphStats
from tests.support.encoders import make_encoder, save_encoder_tokenizer
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.fake_capture import FakeCapture
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LETTERS = StructuredOutput(kind="regex", value="[ab]+")
CAPTURED = {
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 40,
}

PATHS = {
    "plain": {},
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "chunked, depth 1": {"scheduler__max_num_batched_tokens": 8, "scheduler__pipeline_depth": 1},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
    "preempted, depth 1": {
        "cache__num_blocks": 18,
        "model__max_model_len": 64,
        "scheduler__pipeline_depth": 1,
    },
    "decode only": {"compile__cuda_graph_max_tokens": 0},
    "an odd number of rows": {"scheduler__max_num_seqs": 5},
    "block of one": {"cache__block_size": 1},
}

Install = Callable[[FakeCapture], FakeCapture]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def installed(backend: FakeCapture) -> FakeCapture:
        monkeypatch.setattr(startup, "capture_backend", lambda device: backend)
        return backend

    return installed


def stats_of(engine: AsyncEngine) -> GraphStats:
    return Probe(engine).code.graph_stats


async def generate(engine: AsyncEngine, prompts: list[Any], params: list[Any]) -> list[Any]:
    return await asyncio.gather(
        *(engine.generate(p, q) for p, q in zip(prompts, params, strict=True))
    )


@pytest.mark.parametrize("path", PATHS)
async def test_greedy_tokens_are_those_of_transformers(
    path: str, checkpoint: Path, reference: Any, install: Install
) -> None:
    install(FakeCapture())
    prompts = random_prompts(12, longest=40)
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED | PATHS[path])) as engine:
        results = await generate(engine, prompts, [GREEDY] * 12)
        stats = stats_of(engine)
        if path.startswith("preempted"):
            assert engine.stats.preemptions > 0
        assert_idle(engine)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 24), prompt
    assert stats.steps["decode"] > 0
    assert (stats.steps["mixed"] > 0) == (path != "decode only")


async def test_whatever_rows_ask_for_they_get_with_graphs_as_without(
    checkpoint: Path, install: Install
) -> None:
    prompts = random_prompts(10, longest=30, seed=9)
    params = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16),
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, top_p=0.8, top_k=30, seed=3, max_tokens=12),
        SamplingParams(temperature=1.1, seed=4, max_tokens=24, min_tokens=9),
        SamplingParams(temperature=0.7, seed=5, max_tokens=16, presence_penalty=0.9),
        SamplingParams(temperature=1.0, seed=6, max_tokens=8, logit_bias={7: 3.0}),
        SamplingParams(temperature=1.0, seed=7, max_tokens=16, min_p=0.05),
        SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=8, max_tokens=9, allowed_token_ids=[3, 4, 5, 6]),
        SamplingParams(temperature=1.0, seed=9, max_tokens=9, structured_output=LETTERS),
    ]

    async def run(**changes: Any) -> list[Any]:
        async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
            results = await generate(engine, prompts, params)
            assert (stats_of(engine).steps["decode"] > 0) == bool(changes)
        return [completion for result in results for completion in result.completions]

    expected = await run()
    for depth in (1, 2):
        install(FakeCapture())
        got = await run(**CAPTURED, scheduler__pipeline_depth=depth)
        for one, other in zip(expected, got, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert [entry.token_id for entry in one.logprobs or []] == [
                entry.token_id for entry in other.logprobs or []
            ]


async def test_padding_is_counted(checkpoint: Path, install: Install) -> None:
    install(FakeCapture())
    prompts = random_prompts(3, longest=1, seed=1)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    config = small_config(checkpoint, **CAPTURED, scheduler__pipeline_depth=1)
    async with AsyncEngine.open(config) as engine:
        await generate(engine, prompts, [params] * 3)
        stats = stats_of(engine)
        # Prompts of one token are decode steps: five of them, or more if they came apart.
        assert stats.steps["none"] == stats.steps["mixed"] == 0
        assert stats.tokens == 15
        assert stats.padding_tokens <= stats.steps["decode"]
        value = engine.metrics.value
        assert value("slipstream_graph_steps_total", kind="decode") == stats.steps["decode"]
        assert value("slipstream_graph_tokens_total", kind="needed") == 15
        assert value("slipstream_captured_graphs", kind="decode") == 4
        assert value("slipstream_captured_graphs", kind="mixed") == 4


async def test_few_users_are_captured_first_and_the_rest_when_nobody_asks(
    checkpoint: Path, reference: Any, install: Install
) -> None:
    backend = install(FakeCapture())
    captured: list[GraphShape] = []
    capture = GraphPool.capture

    def noted(self: GraphPool, shape: GraphShape) -> Any:
        captured.append(shape)
        return capture(self, shape)

    prompts = random_prompts(4, longest=20)
    config = small_config(
        checkpoint, **CAPTURED | {"compile__cuda_graphs": "background"}, scheduler__max_num_seqs=16
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphPool, "capture", noted)
        async with AsyncEngine.open(config) as engine:
            results = await generate(engine, prompts, [GREEDY] * 4)
            async with asyncio.timeout(60):
                while stats_of(engine).captured.total() < 9:
                    await asyncio.sleep(0.02)
            again = await generate(engine, prompts, [GREEDY] * 4)
    for prompt, one, other in zip(prompts, results, again, strict=True):
        assert one.token_ids == other.token_ids == greedy(reference, prompt, 24)
    ladder = PaddingLadder(16, 40)
    # Before anything else, the trial.
    order = captured[4:]
    assert order[:4] == ladder.first
    assert order[4:] == [shape for shape in ladder.shapes if shape not in ladder.first]
    assert backend.captures


async def test_an_encoder_has_no_decode_steps_to_capture(tmp_path: Path, install: Install) -> None:
    install(FakeCapture())
    directory = make_encoder(tmp_path, "bert")
    save_encoder_tokenizer(directory)
    prompts = random_prompts(12, longest=30, seed=4)
    async with AsyncEngine.open(small_config(directory)) as engine:
        plain = await engine.embed(prompts)
    async with AsyncEngine.open(small_config(directory, **CAPTURED)) as engine:
        vectors = [(await engine.embed([prompt]))[0].vector for prompt in prompts]
        stats = stats_of(engine)
        assert stats.captured["decode"] == 0
        assert stats.captured["mixed"] > 0
        assert stats.steps["mixed"] > 0
    for vector, want in zip(vectors, plain, strict=True):
        assert vector == pytest.approx(want.vector, abs=1e-5)


async def test_what_cannot_be_compiled_is_captured_as_it_is(
    checkpoint: Path, reference: Any, install: Install, tmp_path: Path
) -> None:
    backend = install(FakeCapture())
    prompt = random_prompts(1, longest=20)[0]
    changes = CAPTURED | {"compile__startup": "background"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "cache_root", lambda: tmp_path)
        ends = tmp_path / "ends"
        wait = f"for i in $(seq 600); do [ -e {ends} ] && exit 3; sleep 0.05; done"
        patch.setattr(ahead, "_COMMAND", ("sh", "-c", wait))
        async with AsyncEngine.open(small_config(checkpoint, **changes)) as engine:
            # The trial's; the others wait for the compiler, and requests do not.
            assert len(backend.captures) == 10
            took = "slipstream_startup_phase_seconds"
            assert engine.metrics.value(took, phase="capture") == 0
            result = await engine.generate(prompt, GREEDY)
            ends.touch()
            async with asyncio.timeout(60):
                while stats_of(engine).captured.total() < 8:
                    await asyncio.sleep(0.05)
            again = await engine.generate(prompt, GREEDY)
            assert stats_of(engine).steps["decode"] > 0
            assert engine.metrics.value(took, phase="capture") > 0
    assert result.token_ids == again.token_ids == greedy(reference, prompt, 24)


async def test_a_step_is_not_kept_waiting_by_captures(
    checkpoint: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a machine stands still.
    monkeypatch.setattr(idle_work, "_IDLE_SECONDS", 0.5)
    install(FakeCapture())
    config = small_config(checkpoint, **CAPTURED | {"compile__cuda_graphs": "background"})
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def be_late() -> None:
        """Has the loop hear of steps when both have ended, so that none is outstanding."""
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop is to be late
            await asyncio.sleep(0)

    left = []
    for _ in range(3):
        counts: list[int] = []
        async with AsyncEngine.open(config) as engine:
            late = asyncio.ensure_future(be_late())
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                counts += [
                    stats_of(engine).captured.total() async for _ in engine.stream([5, 6], params)
                ]
            late.cancel()
        # One may have begun before the second step came.
        assert counts[5] == counts[-1]
        left.append(len(PaddingLadder(16, 40).shapes) - counts[0])
    assert any(left), "all was captured before the first token, every time"


async def test_what_cannot_be_captured_runs_without(
    checkpoint: Path, reference: Any, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    # Four captures and their pieces are the trial's.
    backend = install(FakeCapture(fail_at=12))
    prompt = random_prompts(1, longest=20)[0]
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        result = await engine.generate(prompt, GREEDY)
        assert stats_of(engine).steps["none"] > 0
    assert result.token_ids == greedy(reference, prompt, 24)
    assert len(backend.captures) == 12
    assert "could not be captured" in caplog.text


async def test_a_trial_that_fails_leaves_an_engine_without_graphs(
    checkpoint: Path,
    reference: Any,
    install: Install,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abandoned_in: list[bool] = []
    inside = False

    @contextlib.contextmanager
    def stream(device: HostDevice) -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    class Breaking(FakeCapture):
        def abandon(self) -> None:
            abandoned_in.append(inside)
            super().abandon()

    monkeypatch.setattr(HostDevice, "stream", stream)
    install(Breaking(fail_at=0))
    prompt = random_prompts(1, longest=20)[0]
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        result = await engine.generate(prompt, GREEDY)
        assert stats_of(engine) == GraphStats()
    assert result.token_ids == greedy(reference, prompt, 24)
    assert "run without graphs" in caplog.text
    # A stream whose capture is ended from another one stays in it.
    assert abandoned_in == [True]


@pytest.mark.parametrize("off", [{"compile__cuda_graphs": "off"}, {"compile__enforce_eager": True}])
async def test_off_captures_nothing(
    checkpoint: Path, install: Install, off: dict[str, Any]
) -> None:
    backend = install(FakeCapture())
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED | off)) as engine:
        await engine.generate([5], GREEDY)
    assert backend.captures == []


async def test_the_host_captures_nothing(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        await engine.generate([5], GREEDY)
        assert stats_of(engine) == GraphStats()


async def test_the_collector_works_again_after_everything(
    checkpoint: Path, install: Install
) -> None:
    install(FakeCapture())
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        await engine.generate([5], GREEDY)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


async def test_a_tensor_that_is_replaced_is_found(checkpoint: Path, install: Install) -> None:
    install(FakeCapture())
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        await engine.generate([5], GREEDY)
        cache = Probe(engine).kv_cache
        cache.layers[1]["keys"] = torch.zeros_like(cache.layers[1]["keys"])
        with pytest.raises(Exception, match="a step of this request failed") as failure:
            await engine.generate([5], GREEDY)
    assert "keys.1" in str(failure.value.__cause__)


async def test_the_start_says_that_it_captures(checkpoint: Path, install: Install) -> None:
    install(FakeCapture())
    async with AsyncEngine.open(small_config(checkpoint, **CAPTURED)) as engine:
        name = "slipstream_startup_phase_seconds"
        assert engine.metrics.value(name, phase="capture") > 0
        assert engine.metrics.value(name, phase="compile") == 0
        began = "slipstream_startup_phase_began_seconds"
        phases = ["importing", "configuration", "weights", "kv_cache", "capture", "ready"]
        moments = [engine.metrics.value(began, phase=phase) for phase in phases]
        assert moments == sorted(set(moments))
