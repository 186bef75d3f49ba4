"""Whoever drafts, and whatever: tokens, text, reason and log-probabilities are those of `off`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.core.outputs import GenerationResult
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking
from src.engine import startup
from src.engine.speculation import Speculation, Widths
from src.engine.speculation.choice import Traits, choose_sources, choose_speculation
from src.engine.speculation.on_device import Bounds
from tests.engine.speculation.adversary import Adversary
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, random_prompts, small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

LETTERS = StructuredOutput.regex("([ab]{1,3} )+[cd]{4}")
THINKING = Thinking(openings=("<think>",), closings=("</think>",), is_open=True, budget=6)
# Stop tokens and stop strings are among what these texts say, so drafts reach beyond them.
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "greedy, scored": SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True),
    "seeded 0.3": SamplingParams(temperature=0.3, seed=3, max_tokens=30, ignore_eos=True),
    "seeded 1.5": SamplingParams(temperature=1.5, seed=4, max_tokens=30, logprobs=2),
    "several": SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True),
    "truncated": SamplingParams(
        temperature=0.8, seed=6, top_k=20, top_p=0.9, min_p=0.01, max_tokens=24
    ),
    "typical": SamplingParams(
        seed=7, top_p=0.8, typical_p=0.9, top_n_sigma=2.0, max_tokens=24, logprobs=1
    ),
    "penalized": SamplingParams(
        temperature=0,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        max_tokens=30,
        logprobs=1,
        ignore_eos=True,
    ),
    "biased": SamplingParams(
        seed=8, logit_bias={5: 3.0, 9: -100.0}, min_tokens=6, max_tokens=24, logprobs=3
    ),
    "few": SamplingParams(
        seed=9, allowed_token_ids=(5, 6, 7, 8), stop_token_ids=(8,), min_tokens=5, max_tokens=30
    ),
    "ends": SamplingParams(
        seed=10, allowed_token_ids=(5, 6, 7, 8), stop_token_ids=(8,), max_tokens=30, logprobs=1
    ),
    "stops": SamplingParams(seed=11, stop=("a", "e", " t"), max_tokens=30, logprobs=1),
    "bad words": SamplingParams(seed=12, bad_words=("e", "the", "a b"), max_tokens=24),
    "prompt": SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=12, ignore_eos=True),
    "grammar": SamplingParams(structured_output=LETTERS, temperature=0, max_tokens=20),
    "choice": SamplingParams(
        structured_output=StructuredOutput.choice(["yes", "no"]), seed=13, max_tokens=20
    ),
    "thinking": SamplingParams(thinking=THINKING, seed=14, max_tokens=24, ignore_eos=True),
    "one": SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    "two": SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    "penalized, drawn": SamplingParams(
        temperature=0.9,
        seed=15,
        top_p=0.95,
        presence_penalty=-0.4,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        bad_words=("e",),
        max_tokens=30,
        logprobs=2,
        ignore_eos=True,
    ),
}
PROMPTS = random_prompts(2 * len(ASKED), longest=24, seed=21)
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1, "scheduler__max_num_seqs": 64},
    "depth 2": {"scheduler__max_num_seqs": 64},
    "chunked": {"scheduler__max_num_batched_tokens": 12},
    "preempted": {"cache__num_blocks": 24, "model__max_model_len": 80},
    "uncached": {"cache__enable_prefix_caching": False, "scheduler__max_num_seqs": 3},
}
FAMILIES = ("gemma3", "mixtral", "deepseekv2")
FEW = ("greedy, scored", "seeded 1.5", "penalized", "stops", "prompt", "grammar")


def config(checkpoint: Path, **changes: Any) -> Any:
    # In 16 bits likely tokens tie, and which of them a list of the likeliest has first or last
    # depends on what else the batch asks for.
    own: dict[str, Any] = {
        "model__deterministic": True,
        "model__dtype": "float32",
        # However slow the machine is just then.
        "structured_output__compile_seconds": 120.0,
    }
    return small_config(checkpoint, **(own | changes))


def answer(result: GenerationResult) -> Any:
    return (
        [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.stop_reason)
         for c in result.completions],
        result.prompt_logprobs,
        result.usage.completion_tokens,
    )  # fmt: skip


async def ask(
    engine: AsyncEngine, asked: Sequence[tuple[list[int], SamplingParams]]
) -> list[GenerationResult]:
    return await asyncio.gather(*(engine.generate(prompt, each) for prompt, each in asked))


def speculating(monkeypatch: pytest.MonkeyPatch, drafter: Any) -> dict[str, Any]:
    made = partial(Speculation, (drafter,), widths=Widths(always=True))
    monkeypatch.setattr(startup, "choose_speculation", lambda *_, **__: made)
    return {"speculation__method": "suffix", "speculation__num_speculative_tokens": 6}


def texts(
    asked: Sequence[tuple[list[int], SamplingParams]], results: Sequence[GenerationResult]
) -> list[list[int]]:
    return [
        [*prompt, *completion.token_ids]
        for (prompt, _), result in zip(asked, results, strict=True)
        for completion in result.completions
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speculation")
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
async def test_no_draft_changes_a_bit(
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
    # A full step and a full pool leave less for drafts, which the rows share.
    assert len(set(adversary.widths)) > (2 if way in ("chunked", "preempted") else 4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_family_shows_drafts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=True)
    asked = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW * 2, strict=False)]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await ask(engine, asked)
    adversary = Adversary(texts(asked, expected), seed=5)
    # Nobody waits, so that drafts get blocks.
    changes = speculating(monkeypatch, adversary) | {"scheduler__max_num_seqs": 16}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
    assert len(set(adversary.widths)) > 4


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
async def test_keys_and_values_of_8_bits_hide_drafts(
    dtype: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rejected draft has written is overwritten, and so is its factor."""
    asked = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW * 2, strict=False)]
    changes = {"cache__dtype": dtype, "scheduler__max_num_seqs": 16}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected = await ask(engine, asked)
    adversary = Adversary(texts(asked, expected), seed=9)
    changes |= speculating(monkeypatch, adversary)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
    assert len(set(adversary.widths)) > 4


async def test_tenants_share_steps_with_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and blocks for half of them, so that owners take turns and lose rows to each other."""
    changes: dict[str, Any] = {
        "scheduler__tenant_weights": {"a": 3, "b": 1},
        "scheduler__max_num_seqs": 4,
        "cache__num_blocks": 40,
        "model__max_model_len": 80,
    }
    params = ASKED["greedy, scored"]

    async def both(engine: AsyncEngine) -> list[GenerationResult]:
        calls = [
            engine.generate(prompt, params, tenant=tenant)
            for prompt in PROMPTS[:6]
            for tenant in ("a", "b")
        ]
        return await asyncio.gather(*calls)

    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected = await both(engine)
    asked = [(prompt, params) for prompt in PROMPTS[:6] for _ in range(2)]
    adversary = Adversary(texts(asked, expected), seed=10)
    changes |= speculating(monkeypatch, adversary)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await both(engine)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
    assert len(set(adversary.widths)) > 2


async def test_adapters_are_mixed_with_the_model_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "adapter", load_reference(checkpoint), seed=1)
    changes = {"lora__adapters": {"other": str(path)}}
    prompts, params = PROMPTS[:6], ASKED["greedy, scored"]

    async def both(engine: AsyncEngine) -> list[GenerationResult]:
        calls = []
        for prompt in prompts:
            calls.append(engine.generate(prompt, params))
            calls.append(engine.generate(prompt, params, lora="other"))
        return await asyncio.gather(*calls)

    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        expected = await both(engine)
    asked = [(prompt, params) for prompt in prompts for _ in range(2)]
    adversary = Adversary(texts(asked, expected), seed=6)
    changes |= speculating(monkeypatch, adversary)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await both(engine)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]
    assert expected[0].token_ids != expected[1].token_ids


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["suffix", "ngram", "auto"])
async def test_a_text_that_repeats_itself_takes_fewer_steps(
    method: str, depth: int, checkpoint: Path
) -> None:
    params = SamplingParams(
        temperature=0, logit_bias={5: 60.0}, max_tokens=60, logprobs=1, ignore_eos=True
    )
    found = []
    for which in ("off", method):
        changes = {"speculation__method": which, "scheduler__pipeline_depth": depth}
        async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
            result = await engine.generate([5, 5, 6, 5, 5], params)
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            records = list(engine.timeline)
            found.append((answer(result), len(records)))
            drafted = sum(record.drafted_tokens for record in records)
            accepted = sum(record.accepted_tokens for record in records)
            assert (accepted > 0) == (drafted > 0) == (which != "off")
            assert all(
                record.num_tokens
                == record.decode_rows + record.prefill_tokens + record.drafted_tokens
                for record in records
            )
    (off, steps), (on, fewer) = found
    assert on == off
    assert fewer < steps


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("depth", [1, 2])
async def test_the_same_question_again_takes_fewer_steps(depth: int, checkpoint: Path) -> None:
    """For its owner, and for nobody else; and the answer is the same."""
    changes = {
        "speculation__method": "auto",
        "speculation__shared_history_bytes": 1 << 20,
        "scheduler__pipeline_depth": depth,
    }
    params = SamplingParams(seed=3, max_tokens=50, logprobs=1, ignore_eos=True)
    found: dict[str, tuple[Any, int]] = {}
    right: list[int] = []
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        for name, options in (
            ("first", {}),
            ("another owner", {"tenant": "b"}),
            ("another salt", {"cache_salt": "b"}),
            ("again", {}),
            ("forgotten", {}),
            ("kept anew", {}),
        ):
            if name == "forgotten":
                engine.inspector.reset_prefix_cache()
            before = len(engine.timeline)
            result = await engine.generate(PROMPTS[0], params, **options)  # type: ignore[arg-type]
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            counts = engine._loop._worker.draft_counts
            assert counts is not None
            right.append(counts.by_source.get("history", (0, 0))[1])
            found[name] = answer(result), len(engine.timeline) - before
    answers, steps = zip(*found.values(), strict=True)
    assert all(each == answers[0] for each in answers)
    assert steps[3] < 0.7 * min(steps[:3])
    assert right[2] == 0
    assert right[3] == right[4] > 20
    assert right[5] > right[4] + 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prediction", [None, "one two three"])
async def test_drafts_are_no_tokens_of_a_prompt(
    prediction: str | None, depth: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of a prompt may be one token; beside it is only what is predicted."""
    changes = speculating(monkeypatch, Adversary([], seed=8))
    changes |= {"scheduler__max_num_batched_tokens": 12, "scheduler__pipeline_depth": depth}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        await engine.generate(list(range(5, 18)), params, prediction=prediction)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        records = list(engine.timeline)
        assert sum(record.prefill_tokens for record in records) == 13
        last = [record for record in records if record.prefill_tokens == 1]
        assert last
        assert any(record.drafted_tokens for record in last) == (prediction is not None)
        assert any(record.drafted_tokens for record in records)


async def test_a_drafter_that_raises_ends_no_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def propose(self, row: int, tokens: Any, most: int) -> Any:
            raise RuntimeError("a drafter's fault")

    asked = list(zip(PROMPTS[:6], [ASKED["greedy, scored"]] * 6, strict=True))
    async with AsyncEngine.open(config(checkpoint)) as engine:
        expected = await ask(engine, asked)
    changes = speculating(monkeypatch, Failing())
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, asked)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in expected]


async def test_an_abort_in_mid_draft_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = speculating(monkeypatch, Adversary([], seed=7))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        for enough in (1, 3, 8):
            count = 0
            async with engine.submit(PROMPTS[0], params) as submission:
                async for delta in submission:
                    count += len(delta.token_ids)
                    if count >= enough:
                        submission.abort()
                        break
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)


@pytest.mark.parametrize("method", ["draft", "medusa", "eagle3", "mtp"])
def test_another_device_is_refused_by_name(method: str) -> None:
    section = SpeculationSection(method=method)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"speculation.method = {method} .*device.type = cpu"):
        choose_speculation(section, Traits("cuda"))


def test_a_gpu_looks_up_itself() -> None:
    def chosen(**settings: Any) -> Any:
        section = SpeculationSection(num_speculative_tokens=5, **settings)
        return choose_speculation(section, Traits("cuda"))

    assert chosen(method="off") is None
    assert chosen(method="suffix") == Bounds(3, 24, "suffix", 5)
    own = {"prompt_lookup_min": 2, "prompt_lookup_max": 7}
    assert chosen(method="ngram", **own) == Bounds(2, 7, "ngram", 5)


@pytest.mark.parametrize(
    ("has", "reason"),
    [("has_states", "recurrent states"), ("has_own_inputs", "step inputs of its own")],
)
def test_what_a_gpu_cannot_draft_for_is_refused_with_the_reason(
    has: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = Traits("cuda")._replace(**{has: True})
    with pytest.raises(ConfigError, match=f"speculation.method = suffix .*{reason}"):
        choose_speculation(SpeculationSection(method="suffix"), given)
    caplog.set_level("INFO")
    assert choose_speculation(SpeculationSection(method="auto"), given) is None
    assert f"speculation is off: the model has {reason}" in caplog.text


def test_nobody_drafts_on_a_gpu_who_was_not_asked_for_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert choose_speculation(SpeculationSection(method="auto"), Traits("cuda")) is None
    assert "no GPU has run drafts yet; speculation.method = suffix asks for them" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["suffix", "ngram", "mtp"])
def test_nobody_drafts_for_a_model_that_does_not_generate(device: str, method: str) -> None:
    traits = Traits(device, generates=False)
    assert choose_sources(SpeculationSection(method="auto"), traits) == (
        (),
        "the model does not generate",
    )
    section = SpeculationSection(method=method)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{method} cannot be served: the model does not genera"):
        choose_sources(section, traits)


def test_bounds_of_ngrams_are_in_order() -> None:
    section = SpeculationSection(prompt_lookup_min=6, prompt_lookup_max=5)
    with pytest.raises(ConfigError, match=r"prompt_lookup_min .* 5, got 6"):
        choose_speculation(section, Traits("cpu"))
