"""Drafts beside what else may go wrong: other drafters, processors, preemptions, failed steps."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.errors import EngineDeadError
from src.core.plan import RowInstall, StepPlan
from src.core.sampling_params import LogitsProcessorCall
from src.core.step_message import DeviceRequest, StepMessage
from src.engine import startup
from src.engine.drafters.draft_model import ModelDrafter
from src.engine.execution.held_adapters import HeldAdapters
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler, SamplingState
from src.engine.speculation import Guess, Speculation, Widths
from src.engine.speculation.history import SharedHistory
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import (
    ASKED,
    PROMPTS,
    answer,
    ask,
    config,
    speculating,
    texts,
)
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle
from tests.support.plugin_packages import write_package

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("together")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.mark.parametrize("depth", [1, 2])
async def test_states_a_draft_model_and_others_in_the_same_rows(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid, whose steps begin behind wrong drafts, with two that guess in turns."""
    target = make_checkpoint(tmp_path / "target", "qwen3next", tokenizer=True)
    draft = make_checkpoint(
        tmp_path / "draft", num_hidden_layers=1, hidden_size=32, head_dim=8, seed=5
    )
    asked = list(zip(PROMPTS, ASKED.values(), strict=False))
    async with AsyncEngine.open(config(target)) as engine:
        expected = await ask(engine, asked)
    adversary = Adversary(texts(asked, expected), seed=depth, spoils=0.5)
    read: list[int] = []
    compute = ModelDrafter.compute

    def noting(self: ModelDrafter, rows: Any, wanted: Any) -> None:
        compute(self, rows, wanted)
        read.append(len(self.guesses))

    monkeypatch.setattr(ModelDrafter, "compute", noting)

    def chosen(*_: Any, drafter: Any, **__: Any) -> Any:
        return partial(Speculation, (adversary, drafter), widths=Widths(always=True))

    monkeypatch.setattr(startup, "choose_speculation", chosen)
    changes = {
        "speculation__method": "draft",
        "speculation__model": str(draft),
        "speculation__num_speculative_tokens": 6,
        "scheduler__pipeline_depth": depth,
        "scheduler__max_num_seqs": 16,
    }
    async with AsyncEngine.open(config(target, **changes)) as engine:
        for round_ in range(2):
            results = await ask(engine, asked)
            for name, got, wanted in zip(ASKED, results, expected, strict=True):
                assert answer(got) == answer(wanted), (name, round_)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
        counts = engine._loop._worker.draft_counts
        assert counts is not None
        assert sum(read) > 50
        assert set(counts.by_source) >= {"", "draft"}
        assert 0 < counts.accepted < counts.drafted


# What it does depends on all tokens so far, and it does not bear one of them.
PROCESSOR = """
import torch
from src import LogitsProcessor
class It(LogitsProcessor):
    name = "it"
    def apply(self, logits, rows):
        for entry, length in enumerate(rows.lengths.tolist()):
            known = rows.tokens[entry, :length].tolist()
            if 300 in known:
                raise RuntimeError("not 300")
            logits[entry, sum(known) % 290 :] -= 3.0
            logits[entry, 300] = -torch.inf
"""


async def test_a_processor_sees_drafts_and_no_request_ends_by_what_it_says_of_them(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = "processor-beside-drafts"
    write_package(tmp_path, name, PROCESSOR, {"slipstream.logits_processors": "It"})
    calls = (LogitsProcessorCall("it", {}),)
    params = [
        SamplingParams(temperature=0, logits_processors=calls, max_tokens=40, ignore_eos=True),
        SamplingParams(seed=3, logits_processors=calls, max_tokens=40, logprobs=2),
        SamplingParams(seed=4, max_tokens=40, ignore_eos=True, allowed_token_ids=(5, 6, 7, 300)),
        SamplingParams(
            seed=5, logits_processors=calls, max_tokens=40, repetition_penalty=1.2, top_k=20
        ),
    ]
    prompts = [[each % 300 for each in prompt] for prompt in PROMPTS[:8]]
    asked = list(zip(prompts, params * 2, strict=True))
    changes: dict[str, Any] = {"plugins__enabled": (name,)}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected = await ask(engine, asked)
    adversary = Adversary(texts(asked, expected), seed=11, spoils=0.5, vocab_size=302)
    # Random guesses are often the token that the processor does not bear.
    propose = adversary.propose

    def unbearable(row: int, tokens: Any, most: int) -> Guess:
        guess = propose(row, tokens, most)
        return guess._replace(token_ids=[300 if each > 250 else each for each in guess.token_ids])

    monkeypatch.setattr(adversary, "propose", unbearable)
    changes |= speculating(monkeypatch, adversary)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
        counts = engine._loop._worker.draft_counts
        assert counts is not None
        assert counts.accepted > 20
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]


HISTORY = {"speculation__method": "auto", "speculation__shared_history_bytes": 1 << 20}


def test_what_a_preempted_request_said_is_kept_once() -> None:
    """Its tokens may stand in the rows of before, which nobody has taken since."""
    cpu = torch.device("cpu")
    rows = RowState(max_num_seqs=3, max_model_len=16, block_size=4, device=cpu)
    grammars = RowGrammars(3, 50, on_cpu=True)
    sampler = Sampler(SamplingState(3, 50, cpu))
    owners = RowOwners(rows, sampler, grammars, 50, HeldAdapters(None))
    left: list[int] = []
    owners.on_leave = lambda row, request: left.append(row)
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    try:
        for step, row in enumerate((0, 2, 0, 1), 1):
            admitted = [request] if step == 1 else []
            installed = StepPlan(step, [RowInstall(row, step, 7, [5, 6], 2, [[0, 1]])], [], [])
            owners.meet(StepMessage(installed, admitted, []))
            assert owners.apply(installed) == []
        owners.forget([7])
        assert left == [1]
        assert [owners.request_of(row) for row in range(3)] == [None] * 3
    finally:
        grammars.close()


async def test_nothing_of_a_failed_step_is_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    catch_up = SharedHistory.catch_up

    def noting(self: SharedHistory) -> None:
        kept.extend(entry[2] - entry[0] for entry in self._left)
        catch_up(self)

    monkeypatch.setattr(SharedHistory, "catch_up", noting)
    compute, calls = StepComputer.compute, 0

    def failing(self: StepComputer, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("injected")
        return compute(self, *arguments, **more)

    monkeypatch.setattr(StepComputer, "compute", failing)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    async with AsyncEngine.open(config(checkpoint, **HISTORY)) as engine:
        calls = 0
        with pytest.raises(EngineDeadError):
            await engine.generate(PROMPTS[0], params)
        await engine.generate([5, 6], params)
        await engine.generate([5], params)
    # Of the whole outputs alone, each with its prompt.
    assert kept
    assert set(kept) <= {21, 22}
