"""Drafts of rows with a grammar or a thinking budget: no answer changes, and forced text is one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from src import AsyncEngine, SamplingParams
from src.core.outputs import GenerationResult
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking
from src.engine import startup
from src.engine.speculation import Speculation, Widths
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import answer, ask, config, speculating, texts
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, random_prompts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "colour": {"enum": ["red", "green", "greenish"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "size"],
    "additionalProperties": False,
}
COMPACT = StructuredOutput.json(SCHEMA, any_whitespace=False)
SPACED = StructuredOutput.json(SCHEMA)
LETTERS = StructuredOutput.regex("([ab]{1,3} )+[cd]{4}")
CHOICE = StructuredOutput.choice(["yes", "yesterday", "no", "nothing at all"])
LIST = StructuredOutput.grammar('start: item (", " item)*\nitem: "é" | "日本" | /[0-9]{2}/')
# What a forced call of a tool asks of the text.
CALL = StructuredOutput.grammar(
    'start: "<call>" %json {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, '
    '"required": ["city"], "additionalProperties": false} "</call>"'
)
THINKING = Thinking(openings=("<think>",), closings=("</think>",), is_open=True, budget=6)
ASKED = {
    "schema": SamplingParams(structured_output=COMPACT, temperature=0, max_tokens=60),
    "schema, scored": SamplingParams(
        structured_output=COMPACT, seed=1, temperature=1.3, logprobs=3, max_tokens=60
    ),
    "schema with white space": SamplingParams(structured_output=SPACED, seed=2, max_tokens=40),
    "schema, penalized": SamplingParams(
        structured_output=COMPACT, temperature=0, frequency_penalty=0.4, max_tokens=60, logprobs=1
    ),
    "object": SamplingParams(
        structured_output=StructuredOutput.json_object(), seed=3, temperature=0.7, max_tokens=30
    ),
    "regex": SamplingParams(structured_output=LETTERS, temperature=0, max_tokens=20),
    "regex that goes on": SamplingParams(
        structured_output=LETTERS, temperature=0, max_tokens=30, ignore_eos=True
    ),
    "regex, few tokens": SamplingParams(
        structured_output=LETTERS, seed=4, max_tokens=30, logit_bias={5: 2.0}, min_tokens=9
    ),
    "choice": SamplingParams(structured_output=CHOICE, seed=5, temperature=2.0, max_tokens=20),
    "list": SamplingParams(structured_output=LIST, seed=6, max_tokens=30, bad_words=("1", "日")),
    "call": SamplingParams(structured_output=CALL, temperature=0, max_tokens=60, stop=("Ro",)),
    "thinking": SamplingParams(thinking=THINKING, seed=7, max_tokens=24, ignore_eos=True),
    "thinking, scored": SamplingParams(
        thinking=THINKING, temperature=0, max_tokens=24, logprobs=2, ignore_eos=True
    ),
    "no thinking": SamplingParams(
        thinking=msgspec.structs.replace(THINKING, budget=0), seed=8, max_tokens=20
    ),
    "thinking, then a form": SamplingParams(
        thinking=THINKING,
        structured_output=StructuredOutput.regex("[^{]*</think>\\{[a-c]{3}\\}"),
        seed=9,
        max_tokens=50,
    ),
    "free": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
}
PROMPTS = random_prompts(2 * len(ASKED), longest=24, seed=31)
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1, "scheduler__max_num_seqs": 64},
    "depth 2": {"scheduler__max_num_seqs": 64},
    "few rows": {"scheduler__max_num_seqs": 3, "scheduler__max_num_batched_tokens": 24},
    "preempted": {"cache__num_blocks": 30, "model__max_model_len": 96},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("restricted")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], SamplingParams]]:
    return list(zip(PROMPTS, [*ASKED.values()] * 2, strict=True))


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, asked: list[tuple[list[int], SamplingParams]]
) -> list[GenerationResult]:
    async def run() -> list[GenerationResult]:
        async with AsyncEngine.open(config(checkpoint)) as engine:
            return await ask(engine, asked)

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
async def test_drafts_change_no_answer_of_restricted_rows(
    way: str,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adversary = Adversary(texts(asked, expected), seed=len(way))
    changes = WAYS[way] | speculating(monkeypatch, adversary)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        for round_ in range(2):
            results = await ask(engine, asked)
            for name, got, wanted in zip([*ASKED] * 2, results, expected, strict=True):
                assert answer(got) == answer(wanted), (name, round_)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
        if way == "preempted":
            assert engine.stats.preemptions > 0


class Silent:
    """Has no idea."""

    def propose(self, row: int, tokens: Any, most: int) -> None:
        return None


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["schema", "call", "thinking", "no thinking", "schema, scored"])
async def test_what_is_forced_is_a_draft(
    name: str, depth: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for drafts in (False, True):
        changes = speculating(monkeypatch, Silent()) if drafts else {}
        changes |= {"scheduler__pipeline_depth": depth}
        async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
            result = await engine.generate(PROMPTS[0], ASKED[name])
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            records = list(engine.timeline)
            found.append((answer(result), len(records)))
            assert (sum(record.accepted_tokens for record in records) > 0) == drafts
    (off, steps), (on, fewer) = found
    assert on == off
    assert fewer < steps


async def test_a_grammar_that_is_slow_ahead_serves_without_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that drafts take is nobody's but theirs: the request does not fail."""
    monkeypatch.setattr("src.engine.grammar.follower.ORDINARY_CALL", -1.0)
    changes = speculating(monkeypatch, Silent())
    async with AsyncEngine.open(config(checkpoint)) as engine:
        wanted = await engine.generate(PROMPTS[0], ASKED["schema"])
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        got = await engine.generate(PROMPTS[0], ASKED["schema"])
        assert answer(got) == answer(wanted)
        # The first look at drafts was also the last one.
        assert sum(record.drafted_tokens > 0 for record in engine.timeline) <= 1


async def test_drafts_that_cannot_be_looked_at_end_no_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncEngine.open(config(checkpoint)) as engine:
        wanted = await engine.generate(PROMPTS[0], ASKED["schema"])

    def fail(*_: object) -> Any:
        raise RuntimeError("a library's fault")

    for method in ("drafts", "masks_behind"):
        with monkeypatch.context() as patch:
            patch.setattr(f"src.engine.grammar.follower.Follower.{method}", fail)
            changes = speculating(patch, Silent())
            async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
                got = await engine.generate(PROMPTS[0], ASKED["schema"])
        assert answer(got) == answer(wanted), method
    assert "could not be looked at" in caplog.text
    assert "behind a row's drafts could not be computed" in caplog.text


@pytest.mark.parametrize("method", ["suffix", "ngram", "auto"])
async def test_the_real_drafters_serve_restricted_rows(
    method: str,
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
) -> None:
    changes = {"speculation__method": method, "scheduler__max_num_seqs": 64}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
        for name, got, wanted in zip([*ASKED] * 2, results, expected, strict=True):
            assert answer(got) == answer(wanted), name


async def test_without_the_library_s_c_interface_it_is_the_same(
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("constraints", "grammar_steps"):
        monkeypatch.setattr(f"src.engine.grammar.{module}.c_interface", lambda: None)
    adversary = Adversary(texts(asked, expected), seed=3)
    made = partial(Speculation, (adversary,), widths=Widths(always=True))
    monkeypatch.setattr(startup, "choose_speculation", lambda *_, **__: made)
    changes = {"speculation__method": "suffix", "scheduler__max_num_seqs": 64}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
