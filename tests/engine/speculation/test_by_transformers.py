"""Drafts for models that transformers computes, in float32: the answers are those of `off`.

Nothing fixes in which order sums are rounded there, so steps of other sizes have other last bits.
A greedy answer is compared where no two tokens are that near to each other; of the others one may
differ. Every log-probability is near transformers' own, whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.outputs import GenerationResult
from src.core.structured_output import StructuredOutput
from tests.architectures.check import largest_error
from tests.architectures.tiny import make_tiny
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import ask, speculating, texts
from tests.support.checkpoints import load_reference
from tests.support.engines import greedy, random_prompts, small_config, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

# Of a log-probability, in nats; and how much likelier than the next one a greedy token is.
TOLERANCE = 1e-3
_GAP = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
ASKED = {
    "greedy": GREEDY,
    "of a prompt": GREEDY.__replace__(max_tokens=10, prompt_logprobs=3),
    "drawn": SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True, logprobs=2),
    "truncated": SamplingParams(seed=2, top_k=20, top_p=0.9, min_p=0.01, max_tokens=24),
    "penalized": SamplingParams(
        temperature=0.7,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        max_tokens=24,
        ignore_eos=True,
    ),
    "few": SamplingParams(
        seed=4, allowed_token_ids=(5, 6, 7, 8), stop_token_ids=(8,), min_tokens=5, max_tokens=30
    ),
    "several": SamplingParams(n=2, seed=5, max_tokens=16, ignore_eos=True),
    "grammar": SamplingParams(
        structured_output=StructuredOutput.regex("([ab]{1,3} )+[cd]{4}"), seed=6, max_tokens=20
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1, "scheduler__max_num_seqs": 32},
    "depth 2": {"scheduler__max_num_seqs": 32},
    "chunked": {"scheduler__max_num_batched_tokens": 12},
    "preempted": {"model__max_model_len": 64},
    "uncached": {"cache__enable_prefix_caching": False, "scheduler__max_num_seqs": 3},
}
# Blocks of the pool in which requests are preempted: little more than one of them needs.
_TIGHT = {"gpt_oss": 30, "gemma3n_text": 30, "llama4_text": 36}
Asked = Sequence[tuple[list[int], SamplingParams]]


def is_clear(reference: Any, prompt: list[int], count: int) -> bool:
    """Whether each greedy token is likelier than any other by far more than rounding takes."""
    said = greedy(reference, prompt, count, None)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    return bool((best[:, 0] - best[:, 1]).min() > _GAP)


def different(some: Sequence[GenerationResult], others: Sequence[GenerationResult]) -> int:
    """How many answers differ in a token, a text or why they have ended."""

    def said(result: GenerationResult) -> Any:
        return [(each.token_ids, each.text, each.finish_reason) for each in result.completions]

    return sum(said(one) != said(other) for one, other in zip(some, others, strict=True))


def check(
    reference: Any, asked: Asked, got: Sequence[GenerationResult], off: Sequence[GenerationResult]
) -> None:
    """Compare answers with those without drafts, and with what transformers computes."""
    for (prompt, params), found, wanted in zip(asked, got, off, strict=True):
        if params.temperature == 0:
            said = found.token_ids
            assert said == wanted.token_ids == greedy(reference, prompt, len(said), None)
            assert largest_error(reference, prompt, found) < TOLERANCE
        if params.logprobs is not None:
            places = found.completions[0].logprobs
            assert places is not None
            assert len(places) == len(found.token_ids)
    assert different(got, off) <= 1


async def hostile(
    name: str, ways: Sequence[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve an architecture by transformers in these ways, with the adversary, against `off`."""
    make_tiny(directory, name)
    reference = load_reference(directory)
    prompts = [
        each
        for each in random_prompts(60, longest=30, seed=51)
        if is_clear(reference, each, GREEDY.max_tokens or 0)
    ]
    asked = list(zip(prompts, [*ASKED.values()] * 2, strict=False))
    assert len(asked) == 2 * len(ASKED)

    def settings(**changes: Any) -> Any:
        own: dict[str, Any] = {
            "model__implementation": "transformers",
            "model__dtype": "float32",
            # However slow the machine is just then.
            "structured_output__compile_seconds": 120.0,
        }
        return small_config(directory, **(own | changes))

    async with AsyncEngine.open(settings(scheduler__max_num_seqs=32)) as engine:
        off = await ask(engine, asked)
    async with AsyncEngine.open(settings(scheduler__max_num_seqs=3)) as engine:
        by_rows = different(await ask(engine, asked), off)
    by_drafts = []
    for way in ways:
        adversary = Adversary(texts(asked, off), seed=len(way))
        with monkeypatch.context() as patch:
            changes = WAYS[way] | speculating(patch, adversary)
            if way == "preempted":
                changes["cache__num_blocks"] = _TIGHT.get(name, 18)
            async with AsyncEngine.open(settings(**changes)) as engine:
                assert engine.model_info.implementation == "transformers"
                for _ in range(2):
                    got = await ask(engine, asked)
                    check(reference, asked, got, off)
                    by_drafts.append(different(got, off))
                await until_idle(engine)
                drafted, accepted = engine.metrics.draft_counts
                assert 0 < accepted < drafted
                assert (engine.stats.preemptions > 0) == (way == "preempted")
        assert len(set(adversary.widths)) > 2
    print(f"{name}: of {len(asked)} answers rows change {by_rows}, drafts {by_drafts}")
    # In float32 hardly any; what drafts change is of the size of what rows change.
    assert by_rows <= 1


async def test_drafts_change_no_more_than_rounding_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, sinks and experts; in the matrix there are more architectures and ways."""
    await hostile("gpt_oss", ("depth 2", "chunked"), tmp_path, monkeypatch)
