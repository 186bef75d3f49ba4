"""Whole engines whose device drafts, here on the CPU: the answers are those without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.structured_output import StructuredOutput
from src.engine import startup
from src.engine.speculation import Widths, choice, on_device
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.fake_capture import FakeCapture
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

DETERMINISTIC: dict[str, Any] = {"model__deterministic": True}
CAPTURED: dict[str, Any] = {
    "compile__enforce_eager": False,
    "compile__startup": "off",
    "compile__cuda_graphs": "wait",
    "compile__cuda_graph_max_tokens": 40,
}
PATHS: dict[str, dict[str, Any]] = {
    "depth 2": {},
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 12},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
    "captured": CAPTURED,
    "captured, depth 1": CAPTURED | {"scheduler__pipeline_depth": 1},
}
NGRAM: dict[str, Any] = {
    "speculation__method": "ngram",
    "speculation__prompt_lookup_min": 1,
    "speculation__num_speculative_tokens": 4,
}
LETTERS = StructuredOutput(kind="regex", value="[ab]+")
# Outputs of so few tokens repeat themselves, but not for long: some guesses are right, some wrong,
# in whichever steps there are drafts. Of usual outputs hardly any guess is right.
FEW_TOKENS: dict[str, Any] = {"logit_bias": {7: 4.0, 9: 4.0, 11: 4.0}}
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, **FEW_TOKENS},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1, **FEW_TOKENS},
    {"temperature": 0.2, "seed": 3, "top_k": 4, **FEW_TOKENS},
    {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2, **FEW_TOKENS},
    {"temperature": 0.0, "min_tokens": 9, **FEW_TOKENS},
    {"temperature": 0.3, "seed": 5, **FEW_TOKENS},
    {"temperature": 0.0, "structured_output": LETTERS, "max_tokens": 9},
    {"temperature": 0.0, "n": 1, "logprobs": 0},
]

Drafting = Callable[[], None]


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Drafting:
    """Makes this device draft itself, whatever that costs."""

    def turned_on() -> None:
        monkeypatch.setattr(choice, "_DRAFTING_DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(on_device, "Widths", lambda: Widths(always=True))
        monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())

    return turned_on


def prompts() -> list[list[int]]:
    """Texts that repeat themselves, so that much is found in them."""
    return [(prompt * 5)[:40] for prompt in random_prompts(len(WISHES), longest=9, seed=4)]


async def answers(checkpoint: Path, **changes: Any) -> tuple[list[Any], Any, Any]:
    config = small_config(checkpoint, **(DETERMINISTIC | changes))
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(**{"max_tokens": 22, **wish}))
                for prompt, wish in zip(prompts(), WISHES, strict=True)
            )
        )
        probe = Probe(engine)
        counts, steps = probe.worker.draft_counts, probe.code.graph_stats.steps
        await Probe(engine).idle()
        assert_idle(engine)
    completions = [completion for result in results for completion in result.completions]
    return completions, counts, steps


@pytest.mark.parametrize("path", PATHS)
async def test_the_answers_are_those_without_drafts(
    checkpoint: Path, path: str, drafting: Drafting
) -> None:
    expected, none, _ = await answers(checkpoint, speculation__method="off")
    assert none is None
    drafting()
    got, counts, steps = await answers(checkpoint, **NGRAM, **PATHS[path])
    assert counts.drafted > counts.accepted > 0
    assert (steps["verify"] > 0) == path.startswith("captured")
    assert_same(got, expected)


async def test_widths_by_price_change_no_answer(checkpoint: Path, drafting: Drafting) -> None:
    expected, *_ = await answers(checkpoint, speculation__method="off")
    drafting()
    choosing = Widths()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "Widths", lambda: choosing)
        got, *_ = await answers(checkpoint, **NGRAM)
    assert_same(got, expected)


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.token_ids == other.token_ids, WISHES[number]
        assert one.finish_reason == other.finish_reason
        assert [entry.token_id for entry in one.logprobs or []] == [
            entry.token_id for entry in other.logprobs or []
        ]
