"""Programs that no family writes, in an engine: compiled code gives what the interpreter does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.models.builder import ProgramBuilder
from src.models.config import ModelConfig
from src.models.families.llama import Llama
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.probe import Probe
from tests.support.segments import write_late_reader, write_two_streams

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SCORED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


async def answers(directory: Path, *, in_one_call: bool | None, **changes: Any) -> list[Any]:
    """Tokens, and scores of prompts; ``in_one_call``: how compiled code has to run, if there is."""
    config = small_config(directory, model__load_format="dummy", **changes)
    prompts = random_prompts(6, longest=30, seed=11)
    async with AsyncEngine.open(config) as engine:
        code = Probe(engine).computer.code
        assert engine.stats.compiled == (in_one_call is not None)
        assert (code.step is not None) == bool(in_one_call)
        greedy = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        scored = [await engine.generate(prompt, SCORED) for prompt in prompts]
        assert_idle(engine)
    assert [r.token_ids for r in greedy] == [r.token_ids for r in scored]
    entries = [entry for result in scored for entry in result.prompt_logprobs or [] if entry]
    return [[r.token_ids for r in greedy], [entry.logprob for entry in entries]]


@pytest.mark.parametrize(
    ("write", "in_one_call"),
    [
        pytest.param(write_two_streams, True, id="known to the kernel library"),
        pytest.param(write_late_reader, False, id="call by call", marks=pytest.mark.compilers),
    ],
)
async def test_compiled_code_computes_what_the_interpreter_does(
    write: Any, in_one_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_llama(builder: ProgramBuilder, config: ModelConfig) -> None:
        write(builder, config)

    monkeypatch.setattr(Llama, "write", staticmethod(of_llama))
    directory = make_checkpoint(tmp_path, tokenizer=True)
    expected = await answers(directory, in_one_call=None, compile__enforce_eager=True)
    assert len({tuple(tokens) for tokens in expected[0]}) > 1
    compiled = {"compile__enforce_eager": False, "compile__startup": "wait"}
    tokens, scores = await answers(directory, in_one_call=in_one_call, **compiled)
    assert tokens == expected[0]
    assert scores == pytest.approx(expected[1], abs=1e-4)
