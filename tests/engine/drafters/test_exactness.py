"""With weights that draft, tokens, text, reason and log-probabilities are those of `off`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.outputs import GenerationResult
from src.core.plan import RowStep
from src.core.structured_output import StructuredOutput
from src.engine.drafters.draft_model import ModelDrafter
from src.engine.drafters.eagle3 import EagleDrafter
from src.engine.drafters.medusa import Head
from src.engine.speculation import choice
from src.engine.speculation.drafter import SOURCES as TABLE
from src.engine.speculation.drafter import UNDER_GRAMMARS
from tests.engine.drafters.test_eagle3 import plain
from tests.engine.speculation.test_exactness import (
    ASKED,
    FEW,
    PROMPTS,
    WAYS,
    answer,
    ask,
    config,
)
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.drafts import make_eagle3, make_medusa, write_drafter
from tests.support.engines import assert_idle
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

FAILING: dict[str, tuple[type, str, str]] = {
    "medusa": (Head, "logits", "MedusaDrafter"),
    "eagle3": (EagleDrafter, "_run", "EagleDrafter"),
    "draft": (ModelDrafter, "_logits", "ModelDrafter"),
}
Asked = Sequence[tuple[list[int], SamplingParams]]
SOURCES = ("medusa", "eagle3", "draft", "itself")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafters")
    return make_checkpoint(path, tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def sources(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings by source: random heads, a random draft model, and the model as its own draft."""
    heads, eagle, draft = (tmp_path_factory.mktemp(name) for name in ("heads", "eagle", "draft"))
    make_medusa(heads)
    make_eagle3(eagle, taps=[0, 1, 2])
    make_checkpoint(draft, num_hidden_layers=1, hidden_size=32, head_dim=8, seed=5)
    paths = {"medusa": heads, "eagle3": eagle, "draft": draft, "itself": checkpoint}
    return {
        name: {
            "speculation__method": "draft" if name == "itself" else name,
            "speculation__model": str(path),
            "speculation__num_speculative_tokens": 5,
        }
        for name, path in paths.items()
    }


@pytest.fixture(scope="module")
def asked() -> Asked:
    return list(zip(PROMPTS, [*ASKED.values()] * 2, strict=True))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, asked: Asked) -> list[GenerationResult]:
    async def run() -> list[GenerationResult]:
        async with AsyncEngine.open(config(checkpoint)) as engine:
            return await ask(engine, asked)

    return asyncio.run(run())


def counted(engine: AsyncEngine) -> tuple[int, int]:
    """Tokens that were drafted, and accepted."""
    records = list(engine.timeline)
    return (
        sum(record.drafted_tokens for record in records),
        sum(record.accepted_tokens for record in records),
    )


async def ask_twice(
    engine: AsyncEngine,
    asked: Asked,
    expected: Sequence[tuple[str, Any]],
) -> tuple[int, int]:
    """Compare answers, also behind cached prompts; returns drafts, and how many were right.

    ``expected`` are names of the requests, and their answers.
    """
    for round_ in range(2):
        results = await ask(engine, asked)
        for got, (name, wanted) in zip(results, expected, strict=True):
            assert answer(got) == wanted, (name, round_)
    await asyncio.wait_for(engine._loop.wait_idle(), 60)
    assert_idle(engine)
    return counted(engine)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
async def test_no_drafter_changes_a_bit(
    source: str,
    way: str,
    checkpoint: Path,
    sources: dict[str, Any],
    asked: Asked,
    expected: list[GenerationResult],
) -> None:
    # Each way with every kind of request; the other sources with the kinds that differ most.
    names = [*ASKED] * 2
    chosen = [
        index
        for index, name in enumerate(names)
        if source == "draft" or (name in FEW and index < len(ASKED))
    ]
    wanted = [(names[index], answer(expected[index])) for index in chosen]
    async with AsyncEngine.open(config(checkpoint, **(WAYS[way] | sources[source]))) as engine:
        drafted, accepted = await ask_twice(engine, [asked[index] for index in chosen], wanted)
    assert drafted > 20
    if source == "itself":
        assert accepted > 0.8 * drafted


# Of two letters the model may choose each time, and it repeats itself.
LETTERS = StructuredOutput.regex("[ab]{80}")


@pytest.mark.usefixtures("always", "steady")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
async def test_rows_with_a_grammar_are_guessed_from_their_own_text(
    source: str,
    depth: int,
    checkpoint: Path,
    sources: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever else drafts knows no grammar; a row without one is left to that drafter."""
    form = SamplingParams(structured_output=LETTERS, temperature=0, max_tokens=90, logprobs=1)
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias={5: 60.0})
    changes = {"scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        formed, unbound = [
            answer(each) for each in await ask(engine, [(PROMPTS[0], form), (PROMPTS[1], free)])
        ]
    lengths = []
    for without in (False, True):
        if without:
            alone = {
                method: tuple(each for each in given if each != UNDER_GRAMMARS)
                for method, given in TABLE.items()
            }
            monkeypatch.setattr(choice, "SOURCES", alone)
        async with AsyncEngine.open(config(checkpoint, **(changes | sources[source]))) as engine:
            [got] = await ask(engine, [(PROMPTS[0], form)])
            assert answer(got) == formed
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            steps = len(engine.timeline)
            counts = engine._loop._worker.draft_counts
            assert counts is not None
            right = counts.by_source.get("suffix", (0, 0))[1]
            assert (right > 20) != without
            [got] = await ask(engine, [(PROMPTS[1], free)])
            assert answer(got) == unbound
            # Its own text says the same again and again, and nobody looks there.
            assert counts.by_source.get("suffix", (0, 0))[1] == right
        lengths.append(steps)
    assert lengths[0] < 0.7 * lengths[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["greedy", "seeded 0.3", "truncated", "penalized"])
async def test_a_draft_that_is_the_model_itself_is_always_right(
    name: str,
    depth: int,
    checkpoint: Path,
    sources: dict[str, Any],
    expected: list[GenerationResult],
    always: None,
) -> None:
    place = [*ASKED].index(name)
    changes = sources["itself"] | {"scheduler__pipeline_depth": depth}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        result = await engine.generate(PROMPTS[place], ASKED[name])
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        records = list(engine.timeline)
        drafted, accepted = counted(engine)
    assert answer(result) == answer(expected[place])
    count = len(result.token_ids)
    # Behind the token that ends a request guesses are not looked at.
    assert drafted - accepted <= 5
    assert accepted >= count // 2
    assert len(records) <= 3 + count // 3


async def test_heads_that_know_the_answer_are_right(
    checkpoint: Path, tmp_path: Path, always: None
) -> None:
    """Matrices that are fitted to the hidden states of one answer, of transformers' model."""
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    prompt = PROMPTS[3]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        plain = await engine.generate(prompt, params)
        steps = len(list(engine.timeline))
    tokens = [*prompt, *plain.token_ids]
    with torch.inference_mode():
        reference = load_reference(checkpoint).model
        hidden = reference(torch.tensor([tokens])).last_hidden_state[0].double()
    tensors = {}
    for head in range(4):
        # Position p guesses the token two further, three further, and so on.
        known = range(len(prompt) - 1, len(tokens) - head - 2)
        wanted = torch.zeros(len(known), 320, dtype=torch.float64)
        for place, position in enumerate(known):
            wanted[place, tokens[position + head + 2]] = 1.0
        fitted = torch.linalg.lstsq(hidden[list(known)], wanted, driver="gelsd").solution
        tensors[f"medusa_heads.{head}.0.weight"] = fitted.T.float().contiguous()
    fields = {"medusa_num_heads": 4, "medusa_num_layers": 0}
    write_drafter(tmp_path, tensors, fields, file="model.safetensors")
    changes = {"speculation__method": "medusa", "speculation__model": str(tmp_path)}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        result = await engine.generate(prompt, params)
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        drafted, accepted = counted(engine)
        fewer = len(list(engine.timeline))
    assert answer(result) == answer(plain)
    assert drafted - accepted <= 4
    assert fewer < steps / 3


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("source", ["medusa", "eagle3", "draft"])
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "deepseekv2"])
async def test_no_family_shows_who_drafts(
    family: str, source: str, sources: dict[str, Any], tmp_path: Path
) -> None:
    """Windows, experts and latents, with a draft model of another kind in the same blocks."""
    path = make_checkpoint(tmp_path, family, tokenizer=True)
    requests = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW, strict=False)]
    async with AsyncEngine.open(config(path)) as engine:
        plain = await ask(engine, requests)
    changes = sources[source] | {"scheduler__max_num_seqs": 16}
    async with AsyncEngine.open(config(path, **changes)) as engine:
        results = await ask(engine, requests)
        assert counted(engine)[0] > 20
    assert [answer(got) for got in results] == [answer(wanted) for wanted in plain]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_head_reads_the_models_own_hidden_states(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """Whatever was accepted: guesses are those of the plain computation on transformers' model."""
    path = make_checkpoint(tmp_path / "target", tokenizer=True)
    tensors = make_eagle3(tmp_path / "head", taps=[0, 1, 2])
    seen: list[tuple[list[int], list[int]]] = []
    compute = EagleDrafter.compute

    def recording(self: EagleDrafter, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        compute(self, rows, asked)
        for step in rows:
            if step.row in self.guesses:
                known = self._rows.tokens[step.row, : step.start + step.num_tokens].tolist()
                seen.append((known, self.guesses[step.row].token_ids))

    monkeypatch.setattr(EagleDrafter, "compute", recording)
    allowed = (6, 9, 12)
    # Three tokens are often guessed right, and often wrong.
    params = SamplingParams(
        temperature=0, allowed_token_ids=allowed, max_tokens=40, ignore_eos=True
    )
    changes = {
        "speculation__method": "eagle3",
        "speculation__model": str(tmp_path / "head"),
        "speculation__num_speculative_tokens": 4,
        "scheduler__pipeline_depth": depth,
        "scheduler__max_num_batched_tokens": 16,
    }
    async with AsyncEngine.open(config(path, **changes)) as engine:
        await ask(engine, [(PROMPTS[3], params), (PROMPTS[6], params)])
        drafted, accepted = counted(engine)
    assert 10 < accepted < drafted
    assert len(seen) > 20
    reference = load_reference(path).model
    for known, guesses in seen:
        with torch.inference_mode():
            states = reference(torch.tensor([known]), output_hidden_states=True).hidden_states
            taps = torch.cat([states[layer][0, :-1] for layer in (0, 1, 2)], dim=-1)
            features = torch.nn.functional.linear(taps, tensors["fc.weight"])
            expected = plain(
                tensors,
                tensors["embed_tokens.weight"],
                features,
                known,
                len(guesses),
                allowed=allowed,
            )
        assert guesses == expected


async def test_a_draft_model_with_windows_forgets_as_the_model_does_not(
    checkpoint: Path, tmp_path: Path, always: None
) -> None:
    draft = make_checkpoint(tmp_path, "gemma3")
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    requests = [(prompt, params) for prompt in PROMPTS[:4]]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        plain = await ask(engine, requests)
    changes = {"speculation__method": "draft", "speculation__model": str(draft)}
    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        results = await ask(engine, requests)
        assert counted(engine)[0] > 50
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        assert_idle(engine)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in plain]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("source", ["medusa", "eagle3", "itself"])
async def test_adapters_beside_the_model_alone(
    source: str, checkpoint: Path, sources: dict[str, Any], tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "adapter", load_reference(checkpoint), seed=1)
    changes: dict[str, Any] = {"lora__adapters": {"other": str(path)}}
    params = ASKED["greedy, scored"]

    async def both(engine: AsyncEngine) -> list[GenerationResult]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, params, lora=name)
                for prompt in PROMPTS[:4]
                for name in (None, "other")
            )
        )

    async with AsyncEngine.open(config(checkpoint, **changes)) as engine:
        plain = await both(engine)
    async with AsyncEngine.open(config(checkpoint, **(changes | sources[source]))) as engine:
        results = await both(engine)
        assert counted(engine)[0] > 20
    assert [answer(got) for got in results] == [answer(wanted) for wanted in plain]


@pytest.mark.compilers
@pytest.mark.parametrize("source", ["medusa", "eagle3"])
async def test_hidden_states_come_out_of_compiled_steps_in_one_call(
    source: str, checkpoint: Path, sources: dict[str, Any], always: None
) -> None:
    requests = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW, strict=False)]
    compiled = {"compile__enforce_eager": False, "compile__startup": "wait"}
    answers = []
    for changes in ({}, sources[source]):
        async with AsyncEngine.open(config(checkpoint, **(compiled | changes))) as engine:
            assert Probe(engine).computer.code.step is not None
            answers.append([answer(result) for result in await ask(engine, requests)])
            assert (counted(engine)[0] > 20) == bool(changes)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("source", FAILING)
async def test_a_drafter_that_fails_is_switched_off_and_no_request_ends(
    source: str,
    checkpoint: Path,
    sources: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    always: None,
) -> None:
    owner, name, drafter = FAILING[source]
    real, calls = getattr(owner, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no room left")
        return real(*arguments)

    monkeypatch.setattr(owner, name, failing)
    requests = [(prompt, ASKED["greedy, scored"]) for prompt in PROMPTS[:4]]
    async with AsyncEngine.open(config(checkpoint)) as engine:
        plain = await ask(engine, requests)
    caplog.set_level(logging.ERROR)
    async with AsyncEngine.open(config(checkpoint, **sources[source])) as engine:
        results = await ask(engine, requests)
        results += await ask(engine, requests)
    assert [answer(got) for got in results] == [answer(wanted) for wanted in plain] * 2
    assert calls == 4
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        f"the drafter {drafter} failed, and is not asked any more"
    ]


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("source", SOURCES)
async def test_guesses_that_do_not_hold_are_asked_for_seldom(
    source: str, checkpoint: Path, sources: dict[str, Any], expected: list[GenerationResult]
) -> None:
    """As they are served: widths choose, and a row whose guesses are wrong rests."""
    async with AsyncEngine.open(config(checkpoint, **sources[source])) as engine:
        result = await engine.generate(PROMPTS[0], ASKED["greedy"])
        await asyncio.wait_for(engine._loop.wait_idle(), 60)
        drafted, accepted = counted(engine)
    assert answer(result) == answer(expected[0])
    if source == "itself":
        assert accepted > 0
    else:
        assert drafted < 40
