"""With a layer of the checkpoint that drafts, answers are those of `off`, and a right one is taken.

Every family whose checkpoints bring one, in the ways of `engine.speculation.test_exactness`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from src.core.plan import RowStep
from src.engine.drafters.mtp import PredictingDrafter
from tests.engine.drafters.test_exactness import ask_twice, counted
from tests.engine.drafters.test_mtp import Plain
from tests.engine.speculation.test_exactness import ASKED, FEW, PROMPTS, WAYS, answer, ask, config
from tests.support.drafts import MTP_FAMILIES, Predicting, make_mtp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

MTP = {"speculation__method": "mtp", "speculation__num_speculative_tokens": 5}
REQUESTS = [(prompt, ASKED[name]) for prompt, name in zip(PROMPTS, FEW, strict=False)]
# A way, and whether the layer computes as the model does.
CASES = [
    ("depth 1", False),
    ("depth 2", True),
    ("chunked", False),
    ("preempted", False),
    ("preempted", True),
    ("uncached", True),
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Predicting]:
    known: dict[tuple[str, bool], Predicting] = {}

    def make(family: str, *, copies: bool = False) -> Predicting:
        if (family, copies) not in known:
            path = tmp_path_factory.mktemp(family)
            known[family, copies] = make_mtp(path, family, copies=copies)
        return known[family, copies]

    return make


@pytest.fixture(scope="module")
def expected(made: Callable[..., Predicting]) -> Callable[[str, bool], list[Any]]:
    """What a model answers without drafts."""
    known: dict[tuple[str, bool], list[Any]] = {}

    async def run(path: Path) -> list[Any]:
        async with AsyncEngine.open(config(path)) as engine:
            return [answer(result) for result in await ask(engine, REQUESTS)]

    def of(family: str, copies: bool) -> list[Any]:
        if (family, copies) not in known:
            known[family, copies] = asyncio.run(run(made(family, copies=copies).path))
        return known[family, copies]

    return of


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", MTP_FAMILIES)
@pytest.mark.parametrize(("way", "copies"), CASES)
async def test_it_changes_no_bit(
    family: str,
    way: str,
    copies: bool,
    made: Callable[..., Predicting],
    expected: Callable[[str, bool], list[Any]],
) -> None:
    """Random layers, which are mostly wrong, and those that know the model, mostly right."""
    path = made(family, copies=copies).path
    wanted = await asyncio.to_thread(expected, family, copies)
    async with AsyncEngine.open(config(path, **(WAYS[way] | MTP))) as engine:
        answers = [*zip(FEW, wanted, strict=False)]
        drafted, accepted = await ask_twice(engine, REQUESTS, answers)
    assert drafted > 20
    # Half of them know that a text is penalized for what it has said; none knows how it began.
    assert (accepted > 0.4 * drafted) == copies


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", MTP_FAMILIES)
async def test_a_layer_that_computes_as_the_model_is_right(
    family: str, made: Callable[..., Predicting]
) -> None:
    """It does not see how a text begins, which matters less in a longer one."""
    path, results, steps = made(family, copies=True).path, [], []
    longest = sorted(PROMPTS, key=len)[-3:]
    for changes in ({}, MTP, MTP | {"speculation__method": "auto"}):
        async with AsyncEngine.open(config(path, **changes)) as engine:
            results.append([answer(await engine.generate(each, GREEDY)) for each in longest])
            await asyncio.wait_for(engine._loop.wait_idle(), 60)
            records = [record for record in engine.timeline if record.num_tokens]
            drafted, accepted = counted(engine)
        steps.append(len(records))
        if changes:
            assert accepted > 0.6 * drafted, changes
    assert results[1:] == results[:1] * 2
    assert steps[1] < steps[0] / 2
    assert steps[2] < steps[0] / 1.5


@pytest.mark.usefixtures("always")
async def test_a_layer_that_fails_is_switched_off_and_no_request_ends(
    made: Callable[..., Predicting],
    expected: Callable[[str, bool], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, calls = PredictingDrafter.logits, 0

    def failing(self: PredictingDrafter, hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no room left")
        return real(self, hidden)

    monkeypatch.setattr(PredictingDrafter, "logits", failing)
    wanted = await asyncio.to_thread(expected, "glm4_moe", True)
    async with AsyncEngine.open(config(made("glm4_moe", copies=True).path, **MTP)) as engine:
        for _ in range(2):
            assert [answer(result) for result in await ask(engine, REQUESTS)] == wanted
    assert calls == 4
    [record] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.getMessage() == (
        "the drafter PredictingDrafter failed, and is not asked any more"
    )


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", MTP_FAMILIES)
async def test_it_reads_the_models_own_hidden_states(
    family: str, depth: int, made: Callable[..., Predicting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was accepted, and computed again where the model has recurrent states."""
    predicting = made(family)
    seen: list[tuple[list[int], list[int]]] = []
    compute = PredictingDrafter.compute

    def recording(
        self: PredictingDrafter, rows: Sequence[RowStep], asked: Mapping[int, int]
    ) -> None:
        compute(self, rows, asked)
        for step in rows:
            if step.row in self.guesses:
                known = self._rows.tokens[step.row, : step.start + step.num_tokens].tolist()
                seen.append((known, self.guesses[step.row].token_ids))

    monkeypatch.setattr(PredictingDrafter, "compute", recording)
    allowed = (6, 9, 12)
    # Three tokens are often guessed right, and often wrong.
    params = SamplingParams(
        temperature=0, allowed_token_ids=allowed, max_tokens=40, ignore_eos=True
    )
    changes = MTP | {
        "scheduler__pipeline_depth": depth,
        "scheduler__max_num_batched_tokens": 16,
    }
    async with AsyncEngine.open(config(predicting.path, **changes)) as engine:
        await ask(engine, [(PROMPTS[3], params), (PROMPTS[6], params)])
        drafted, accepted = counted(engine)
    assert 5 < accepted < drafted
    assert len(seen) > 20
    plain = Plain(predicting)
    for known, guesses in seen[:60]:
        hidden = plain.hidden(known)[:-1]
        assert guesses == plain.said(hidden, known, len(guesses), allowed)
