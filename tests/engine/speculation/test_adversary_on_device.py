"""Whole engines whose device drafts, right and wrong: the answers are those of `off`, bit for bit.

Device and capture are stood in for by the CPU and a capture that replays operations there.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, GenerationResult, SamplingParams
from src.core.errors import EngineDeadError
from src.engine.execution.graphs.verify import VerifyCapture
from src.engine.execution.step_computer import StepComputer
from src.engine.speculation import choice, device_check
from src.engine.speculation.device_check import why_not
from src.engine.speculation.on_device import Bounds
from tests.engine.speculation.adversary_on_device import adversary, drafting
from tests.engine.speculation.test_engines_on_device import CAPTURED
from tests.engine.speculation.test_exactness import ASKED, PROMPTS, answer, ask, config, texts
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle
from tests.support.fake_capture import FakeCapture
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NAMES = (
    *("greedy, scored", "seeded 1.5", "several", "truncated", "penalized", "biased", "ends"),
    *("stops", "bad words", "prompt", "grammar", "thinking", "one", "two"),
)
FEW = ("greedy, scored", "seeded 1.5", "penalized", "stops")
WAYS: dict[str, dict[str, Any]] = {
    "captured": {"scheduler__max_num_seqs": 20} | CAPTURED,
    "chunked, uncached": {
        "scheduler__max_num_batched_tokens": 12,
        "cache__enable_prefix_caching": False,
    },
    "preempted": {"cache__num_blocks": 24, "model__max_model_len": 80},
}
DRAFTS: dict[str, Any] = {"speculation__method": "suffix", "speculation__num_speculative_tokens": 6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafting")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, NAMES, strict=False)]


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, asked: list[tuple[list[int], SamplingParams]]
) -> list[GenerationResult]:
    async def run() -> list[GenerationResult]:
        async with AsyncEngine.open(config(checkpoint)) as engine:
            return await ask(engine, asked)

    return asyncio.run(run())


def check_drafts(engine: AsyncEngine) -> None:
    """Some were right, and some wrong."""
    counts = Probe(engine).worker.draft_counts
    assert counts is not None
    assert counts.drafted > counts.accepted > 0


@pytest.mark.parametrize("way", WAYS)
async def test_no_draft_of_the_device_changes_a_bit(
    way: str,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting(monkeypatch, adversary(texts(asked, expected), seed=len(way)))
    async with AsyncEngine.open(config(checkpoint, **DRAFTS | WAYS[way])) as engine:
        results = await ask(engine, asked)
        await Probe(engine).idle()
        assert_idle(engine)
        check_drafts(engine)
        steps = Probe(engine).code.graph_stats.steps
        assert (steps["verify"] > 0) == ("captured" in way)
        if way == "preempted":
            assert engine.stats.preemptions > 0
    for name, got, wanted in zip(NAMES, results, expected, strict=True):
        assert answer(got) == answer(wanted), name


async def test_windows_hide_drafts_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, "gemma3", tokenizer=True)
    asked = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW * 2, strict=False)]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await ask(engine, asked)
    drafting(monkeypatch, adversary(texts(asked, expected), seed=5))
    changes = DRAFTS | CAPTURED | {"scheduler__max_num_seqs": 16}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
        check_drafts(engine)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]


async def test_latents_give_the_tokens_that_they_give_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside drafts are computed in another order, so log-probabilities are rounded so."""
    checkpoint = make_checkpoint(tmp_path, "deepseekv2", tokenizer=True)
    asked = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW * 2, strict=False)]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await ask(engine, asked)
    drafting(monkeypatch, adversary(texts(asked, expected), seed=6))
    changes = DRAFTS | CAPTURED | {"scheduler__max_num_seqs": 16}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
        check_drafts(engine)
    assert [got.token_ids for got in results] == [wanted.token_ids for wanted in expected]


async def test_adapters_draft_beside_the_model_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "adapter", load_reference(checkpoint), seed=1)
    changes = {"lora__adapters": {"other": str(path)}}
    prompts, params = PROMPTS[:4], ASKED["greedy, scored"]

    async def both(engine: AsyncEngine) -> list[GenerationResult]:
        calls = [
            engine.generate(prompt, params, lora=lora)
            for prompt in prompts
            for lora in (None, "other")
        ]
        return await asyncio.gather(*calls)

    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected = await both(engine)
    asked = [(prompt, params) for prompt in prompts for _ in range(2)]
    drafting(monkeypatch, adversary(texts(asked, expected), seed=6))
    async with AsyncEngine.open(config(checkpoint, **changes, **DRAFTS, **CAPTURED)) as engine:
        results = await both(engine)
        check_drafts(engine)
        assert Probe(engine).code.graph_stats.steps["verify"] > 0
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
    assert expected[0].token_ids != expected[1].token_ids


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_abort_amid_drafts_leaves_nothing(
    depth: int,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who gets the row next gets the answer that it would have got."""
    drafting(monkeypatch, adversary(texts(asked, expected), seed=7))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    changes = {"scheduler__pipeline_depth": depth, "scheduler__max_num_seqs": 2}
    async with AsyncEngine.open(config(checkpoint, **changes, **DRAFTS, **CAPTURED)) as engine:
        for enough in (1, 3, 8):
            count = 0
            async with engine.submit(PROMPTS[0], params) as submission:
                async for delta in submission:
                    count += len(delta.token_ids)
                    if count >= enough:
                        submission.abort()
                        break
            got = await engine.generate(*asked[1])
            assert answer(got) == answer(expected[1])
        await Probe(engine).idle()
        assert_idle(engine)
        check_drafts(engine)


class Faulty:
    """Steps with drafts fail, as many as are said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        original = StepComputer.verify

        def verify(*given: Any) -> Any:
            if not self.left:
                return original(*given)
            self.left -= 1
            raise RuntimeError("injected")

        monkeypatch.setattr(StepComputer, "verify", verify)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("times", [1, 1000])
async def test_a_failed_step_with_drafts_is_its_requests_and_failing_ones_end_drafting(
    times: int,
    depth: int,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafting(monkeypatch, adversary(texts(asked, expected), seed=8))
    caplog.set_level(logging.WARNING)
    changes = {"scheduler__pipeline_depth": depth, "scheduler__max_num_seqs": 4}
    async with AsyncEngine.open(config(checkpoint, **changes, **DRAFTS)) as engine:
        faulty, failures = Faulty(monkeypatch, times), 0
        for _ in range(12):
            # Nothing of the failed ones is left in the rows of those behind.
            calls = (engine.generate(*each) for each in asked[:3])
            results = await asyncio.gather(*calls, return_exceptions=True)
            for got, wanted in zip(results, expected, strict=False):
                if isinstance(got, BaseException):
                    assert isinstance(got, EngineDeadError)
                    failures += 1
                else:
                    assert answer(got) == answer(wanted)
            if not any(isinstance(got, BaseException) for got in results):
                break
        else:
            pytest.fail("steps with drafts fail for good")
        assert failures
        await Probe(engine).idle()
        assert_idle(engine)
        if times == 1:
            check_drafts(engine)
    said = [each for each in caplog.messages if "nothing drafts any more" in each]
    assert len(said) == (times > 1)
    assert (faulty.left > 0) == (times > 1)


@pytest.mark.parametrize("fault", ["kernel", "capture"])
async def test_where_drafting_fails_at_the_start_requests_are_served_without(
    fault: str,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(choice, "_DRAFTING_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr("src.engine.startup.capture_backend", lambda device: FakeCapture())
    if fault == "kernel":
        monkeypatch.setattr(device_check, "look_up", fails)
    else:
        monkeypatch.setattr(VerifyCapture, "capture", fails)
    caplog.set_level(logging.INFO)
    async with AsyncEngine.open(config(checkpoint, **DRAFTS, **CAPTURED)) as engine:
        assert Probe(engine).worker.draft_counts is None
        results = await ask(engine, asked[:4])
        # Steps without drafts are captured all the same.
        steps = Probe(engine).code.graph_stats.steps
        assert steps["decode"] > 0
        assert not steps["verify"]
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected[:4]]
    said = [each for each in caplog.records if "speculation is off" in each.getMessage()]
    assert [each.levelname for each in said] == ["WARNING"]
    assert "no such instruction" in said[0].getMessage()


def test_kernels_of_drafts_are_compared_with_what_they_are_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, bounds = torch.device("cpu"), Bounds(1, 24, "suffix", 5)
    assert why_not(bounds, cpu) is None
    look_up, accept = device_check.look_up, device_check.accept_drafts

    def finds_another(*given: Any) -> torch.Tensor:
        found: torch.Tensor = look_up(*given).clone()
        found[-1, -1] += 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(device_check, "look_up", finds_another)
        assert why_not(bounds, cpu) == "look_up gives wrong drafts on cpu"

    def forgets_a_row(*given: Any) -> None:
        tokens = given[5].clone()
        accept(*given)
        given[5][-1] = tokens[-1]

    monkeypatch.setattr(device_check, "accept_drafts", forgets_a_row)
    assert why_not(bounds, cpu) == "accept_drafts accepts wrong drafts on cpu"
