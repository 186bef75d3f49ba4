"""A step in one call of the kernel library does what its parts do one after the other."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.plan import RowFailure, RowInstall, RowStep, StepPlan
from src.core.request import Request
from src.core.step_message import DeviceRequest
from src.core.structured_output import StructuredOutput
from src.engine.execution.forward_pass import Code
from src.engine.execution.inputs import sampled_indices
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.grammar.masks import RowMasks, added_masks, packed_masks
from src.engine.speculation import KeptHidden
from src.models.program import Chain
from src.ops.build.kernels import kernel_library
from src.ops.runtime.step import CompiledStep
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompts, small_config
from tests.support.probe import Probe

T = TypeVar("T")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

NUM_ROWS = 4
LONGER = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LETTERS = StructuredOutput.regex("([ab]{1,3} )+[cd]{4}")
BLOCK_SIZE = 16
LENGTH = 40
VOCAB_SIZE = 333


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bfloat16")
    # Not a whole number of words of masks.
    return make_checkpoint(
        directory, tokenizer=True, dtype=torch.bfloat16, tie=True, vocab_size=VOCAB_SIZE
    )


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of a family whose last mixer has a recurrent state."""

    @cache
    def made(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=True)

    return made


# Of attention alone, in two dtypes; and families with recurrent states.
DTYPES = ("float32", "bfloat16")
RECURRENT = ("qwen3next", "granite_moehybrid", "lfm2")
any_mixer = pytest.mark.parametrize("engine", [*DTYPES, *RECURRENT], indirect=True)


@pytest.fixture(params=DTYPES)
async def engine(
    checkpoint: Path,
    bfloat16: Path,
    recurrent: Callable[[str], Path],
    request: pytest.FixtureRequest,
) -> AsyncIterator[AsyncEngine]:
    if request.param in RECURRENT:
        directory = recurrent(request.param)
    else:
        directory = checkpoint if request.param == "float32" else bfloat16
    config = small_config(
        directory,
        compile__enforce_eager=False,
        compile__startup="wait",
        scheduler__max_num_seqs=NUM_ROWS,
        cache__block_size=BLOCK_SIZE,
    )
    async with AsyncEngine.open(config) as engine:
        assert computer_of(engine).code.step is not None
        yield engine


def computer_of(engine: AsyncEngine) -> StepComputer:
    return Probe(engine).computer


async def on_device(engine: AsyncEngine, function: Callable[[], T]) -> T:
    def run() -> T:
        with torch.inference_mode():
            return function()

    return await asyncio.wrap_future(Probe(engine).worker.call(run))


def install(computer: StepComputer, temperatures: list[float], seed: int) -> None:
    """Every row is known up to LENGTH, and its keys and values are made up."""
    source = random.Random(seed)
    blocks = source.sample(range(20), NUM_ROWS * 3)
    for row, temperature in enumerate(temperatures):
        tokens = [source.randrange(50) for _ in range(LENGTH)]
        params = SamplingParams(temperature=temperature, max_tokens=8, seed=seed + row)
        request = Request(
            key=row, prompt_token_ids=tokens, params=params, max_tokens=8, seed=seed + row
        )
        own = blocks[3 * row : 3 * row + 3]
        computer._rows.install(RowInstall(row, 1, row, tokens, LENGTH, [own]))
        computer._sampler.state.install(row, DeviceRequest.of(request), LENGTH)
    generator = torch.Generator().manual_seed(seed)
    for kv in computer._forward_pass.kv_cache.named().values():
        kv.copy_(torch.randn(kv.shape, generator=generator))


def traces(computer: StepComputer) -> list[torch.Tensor]:
    """All that a step may write."""
    kept = computer._forward_pass.kv_cache.named().values()
    return [each.clone() for each in (computer._rows.tokens, *kept)]


STEPS = {
    "decode": [RowStep(row, 1, LENGTH - 1, 1, True) for row in (2, 0, 3)],
    "one": [RowStep(1, 1, 17, 1, True)],
    "prompt": [RowStep(3, 1, 0, LENGTH, True)],
    "chunk": [RowStep(3, 1, 5, 20, False)],
    "mixed": [
        RowStep(0, 1, LENGTH - 1, 1, True),
        RowStep(3, 1, 3, 30, False),
        RowStep(1, 1, 30, 10, True),
        RowStep(2, 1, 16, 1, False),
    ],
}


@any_mixer
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_one_call_and_its_parts_leave_the_same_bits(
    engine: AsyncEngine, steps: list[RowStep]
) -> None:
    computer = computer_of(engine)
    whole, plan = computer.code, StepPlan(1, [], [], steps)
    outcomes: list[tuple[StepOutput, list[torch.Tensor]]] = []
    for code in (whole, whole._replace(step=None)):

        def run(code: Code = code) -> None:
            install(computer, [0.0, 0.7, 1.3, 0.0], seed=3)
            computer.code = code
            outcomes.append((computer.compute(plan), traces(computer)))

        await on_device(engine, run)
    (output, left), (expected, expected_left) = outcomes
    assert (output.samples is None) == (expected.samples is None)
    if output.samples is not None and expected.samples is not None:
        assert output.samples.token_ids.tolist() == expected.samples.token_ids.tolist()
        # They are where the next step will look for them.
        sampled = [step for step in steps if step.samples]
        for step, token_id in zip(sampled, output.samples.token_ids.tolist(), strict=True):
            assert left[0][step.row, step.start + step.num_tokens] == token_id
    for mine, theirs in zip(left, expected_left, strict=True):
        assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))


def numbers_of(steps: Sequence[RowStep]) -> list[int]:
    """As a call of the kernel library has them."""
    return [
        number
        for step in steps
        for number in (step.row, step.start, step.num_tokens, step.num_sampled, step.verifies)
    ]


@any_mixer
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_logits_are_the_same_whether_other_hidden_states_are_wanted_or_not(
    engine: AsyncEngine, steps: list[RowStep]
) -> None:
    """Behind its keys and values the last layer computes what is sampled from, or all."""
    computer = computer_of(engine)
    step = computer.code.step
    assert step is not None
    count = sum(each.samples for each in steps)

    def compute(*, wants_hidden: bool) -> tuple[Any, Any, list[torch.Tensor]]:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        assert step is not None
        hidden, logits = step.compute(numbers_of(steps), count, wants_hidden=wants_hidden)
        return hidden, logits, traces(computer)

    def run() -> None:
        hidden, expected, written = compute(wants_hidden=True)
        assert len(hidden) == sum(each.num_tokens for each in steps)
        none, logits, also_written = compute(wants_hidden=False)
        assert none is None
        if count:
            torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)
        else:
            assert logits is None
            assert expected is None
        for mine, theirs in zip(also_written, written, strict=True):
            assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))

    await on_device(engine, run)


@any_mixer
@pytest.mark.parametrize("keeps", ["sampled", "all"])
@pytest.mark.parametrize("steps", [*STEPS, "drafts"])
async def test_hidden_states_are_kept_if_wanted(
    engine: AsyncEngine, steps: str, keeps: KeptHidden
) -> None:
    """By a step that draws, by one that ends with logits, and by their parts."""
    computer = computer_of(engine)
    whole = computer.code
    drafts = [RowStep(0, 1, LENGTH - 4, 4, True, 3), RowStep(3, 1, 8, 6, False)]
    plan = StepPlan(1, [], [], STEPS.get(steps, drafts))
    penalized = SamplingParams(temperature=0, max_tokens=8, presence_penalty=1.0)
    sampled = sampled_indices(plan)
    count = len(sampled) if keeps == "sampled" else plan.num_tokens
    found: list[torch.Tensor] = []

    def run(code: Code, keeps_hidden: KeptHidden, penalizes: bool) -> StepOutput:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        for row in range(NUM_ROWS if penalizes else 0):
            request = DeviceRequest(key=row, prompt_len=LENGTH, params=penalized)
            computer._sampler.state.install(row, request, LENGTH)
        computer.code = code
        return computer.compute(plan, keeps_hidden=keeps_hidden)

    def all_ways() -> None:
        for code in (whole, whole._replace(step=None)):
            for penalizes in (False, True):
                plain = run(code, "none", penalizes)
                assert plain.hidden is None
                output = run(code, keeps, penalizes)
                assert (output.samples is None) == (plain.samples is None)
                hidden = output.hidden
                if hidden is None:
                    assert count == 0
                    continue
                assert len(hidden) == count
                found.append(hidden)
                if output.samples is not None and plain.samples is not None:
                    token_ids = output.samples.token_ids.tolist()
                    assert token_ids == plain.samples.token_ids.tolist()
                    own = hidden if keeps == "sampled" else hidden[sampled]
                    logits = computer._model.logits(computer._model.functions, own)
                    if not penalizes:
                        assert logits.argmax(1).tolist() == token_ids
        for each in found:
            torch.testing.assert_close(each, found[0], atol=0.02, rtol=0.02)

    await on_device(engine, all_ways)


async def test_deterministic_logits_are_so_to_the_bit(bfloat16: Path) -> None:
    config = small_config(
        bfloat16,
        model__deterministic=True,
        compile__enforce_eager=False,
        compile__startup="wait",
        scheduler__max_num_seqs=NUM_ROWS,
        cache__block_size=BLOCK_SIZE,
    )
    async with AsyncEngine.open(config) as engine:
        computer = computer_of(engine)
        step = computer.code.step
        assert step is not None

        def run() -> None:
            for steps in STEPS.values():
                install(computer, [0.0] * NUM_ROWS, seed=3)
                count = sum(each.samples for each in steps)
                found = [
                    step.compute(numbers_of(steps), count, wants_hidden=wants_hidden)[1]
                    for wants_hidden in (True, False)
                ]
                assert count == 0 or found[0].equal(found[1])

        await on_device(engine, run)


@pytest.mark.parametrize(
    ("steps", "scores", "tokens"),
    [
        ("decode", False, [3]),
        ("prompt", False, [1]),
        ("prompt", True, [LENGTH]),
        ("chunk", False, []),
        ("mixed", False, [2]),
    ],
)
async def test_parts_of_a_step_compute_what_is_sampled_from_alone(
    engine: AsyncEngine, steps: str, scores: bool, tokens: list[int]
) -> None:
    """``tokens`` of each run of the last call."""
    computer = computer_of(engine)
    seen: list[int] = []

    def last(chain: Chain, weights: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(len(given[0]))
        assert len(given) == 2
        assert len(given[0]) == len(given[1])
        return functions[slot](chain, weights, *given)

    functions = list(computer.code.functions)
    # Behind it is the head alone.
    slot = computer._model.program.calls[-2].slot
    computer.code = Code([*functions[:slot], last, *functions[slot + 1 :]])

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        if scores:
            params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)
            prompt = computer._rows.tokens[3, :LENGTH].tolist()
            request = Request(key=3, prompt_token_ids=prompt, params=params, max_tokens=8)
            computer._unscored[3] = DeviceRequest.of(request)  # type: ignore[index]
        computer.compute(StepPlan(1, [], [], STEPS[steps]))

    await on_device(engine, run)
    assert seen == tokens


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ((1, LENGTH, 1, True), "nobody has produced"),
        ((NUM_ROWS + 1, 0, 1, True), "that is not there"),
        ((-1, 0, 1, True), "that is not there"),
        ((1, -1, 1, True), "that is not there"),
        ((1, 0, 0, False), "that is not there"),
        ((1, 10**6, 1, True), "that is not there"),
        ((1, 0, 10**6, False), "that is not there"),
    ],
    ids=str,
)
async def test_what_a_step_has_not_got_is_refused_before_anything_is_written(
    engine: AsyncEngine, step: tuple[int, ...], reason: str
) -> None:
    computer = computer_of(engine)
    sound = (0, LENGTH - 1, 1, True, False)
    assert computer.code.step is not None
    compiled = computer.code.step

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=5)
        before = traces(computer)
        with pytest.raises(ValueError, match=reason):
            compiled.draw((*sound, *step, False), 2)
        for mine, theirs in zip(traces(computer), before, strict=True):
            assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))

    await on_device(engine, run)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1])
async def test_a_token_that_is_none_is_refused(engine: AsyncEngine, token: int) -> None:
    computer = computer_of(engine)
    assert computer.code.step is not None
    compiled = computer.code.step

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=5)
        computer._rows.tokens[1, 4] = token
        with pytest.raises(ValueError, match="not in the vocabulary"):
            compiled.draw((1, 0, 6, 1, False), 1)

    await on_device(engine, run)


async def test_a_row_without_a_block_is_computed_and_written_nowhere(engine: AsyncEngine) -> None:
    computer = computer_of(engine)

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=7)
        computer._rows.block_tables[0, 2, 2] = -1
        before = traces(computer)
        with pytest.raises(ValueError, match="a block table names a block outside"):
            computer.compute(StepPlan(1, [], [], [RowStep(2, 1, LENGTH - 1, 1, True)]))
        for mine, theirs in zip(traces(computer), before, strict=True):
            assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))

    await on_device(engine, run)


SAMPLING = [RowStep(row, 1, LENGTH - 1, 1, True) for row in (2, 0, 3)]
NUMBERS = numbers_of(SAMPLING)


@pytest.fixture(params=[50.0, 0.01], ids=["one part", "many parts"])
def wake_cost(request: pytest.FixtureRequest) -> Iterator[None]:
    library = kernel_library()
    assert library is not None
    library.assume_wake_cost(request.param)
    yield
    library.assume_wake_cost()


async def test_a_step_draws_what_its_gate_lets_through(
    engine: AsyncEngine, wake_cost: None
) -> None:
    """Masks come while the step waits for them; two rows have one, and one has none."""
    computer = computer_of(engine)
    step = computer.code.step
    assert step is not None

    def run() -> None:
        install(computer, [0.0, 0.7, 1.3, 0.0], seed=3)
        none, logits = step.compute(NUMBERS, 3, wants_hidden=False)
        assert none is None
        assert logits is not None
        words = -(-logits.shape[1] // 32)
        source = torch.Generator().manual_seed(1)
        bits = torch.randint(0, 256, (6, words, 4), generator=source, dtype=torch.uint8)
        # One may draw nothing but its last token.
        bits[4] = 0
        last = logits.shape[1] - 1
        bits[4].view(-1)[last // 8] = 1 << last % 8
        table, rows = bits.view(torch.int32)[:, :, 0].contiguous(), [4, -1, 2]
        added = torch.from_numpy(
            added_masks(packed_masks(table.numpy(), rows), logits.shape[1]).copy()
        )
        rows_s = torch.tensor([2, 0, 3])
        expected = computer._sampler.draw(logits + added, rows_s, torch.full((3,), LENGTH))
        free = computer._sampler.draw(logits, rows_s, torch.full((3,), LENGTH))
        assert expected[0] == last
        assert expected[1] == free[1]
        gate = step.gate()
        opening = threading.Timer(0.05, gate.open, (table, rows))
        opening.start()
        assert step.draw(NUMBERS, 3, gate)[0].tolist() == expected.tolist()
        opening.join()
        assert computer._rows.tokens[[2, 0, 3], LENGTH].tolist() == expected.tolist()

    await on_device(engine, run)


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((6, 11), torch.int32, [0, 1]),
        ((6, 11), torch.int32, [0, 1, 2, 3]),
        ((6, 11), torch.int32, [0, 1, 6]),
        ((6, 9), torch.int32, [0, 1, 2]),
        ((6, 11), torch.int64, [0, 1, 2]),
    ],
)
async def test_masks_that_are_not_of_a_step_fail_it(
    engine: AsyncEngine, shape: tuple[int, int], dtype: torch.dtype, rows: list[int]
) -> None:
    computer = computer_of(engine)
    step = computer.code.step
    assert step is not None

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        gate = step.gate()
        gate.open(torch.full(shape, -1, dtype=dtype), rows)
        with pytest.raises(ValueError, match="masks are not of the rows"):
            step.draw(NUMBERS, 3, gate)

    await on_device(engine, run)


async def test_a_step_tells_which_grammars_failed_and_why_masks_are_missing(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer = computer_of(engine)
    awaited: Future[RowMasks] = Future()
    asked: list[bool] = []

    def masks(rows: Sequence[int], positions: Sequence[int], *, as_bits: bool) -> Future[RowMasks]:
        asked.append(as_bits)
        return awaited

    monkeypatch.setattr(computer._grammars, "masks", masks)
    plan = StepPlan(1, [], [], SAMPLING)

    def failed() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        threading.Timer(0.05, awaited.set_exception, (RuntimeError("a panic"),)).start()
        with pytest.raises(RuntimeError, match="a panic"):
            computer.compute(plan)

    await on_device(engine, failed)
    awaited = Future()
    table = torch.full((NUM_ROWS, 11), -1, dtype=torch.int32)
    awaited.set_result(RowMasks(table, [-1, 0, 1], None, [RowFailure(7, "a reason")]))

    def told() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        assert computer.compute(plan).failures == [(7, "a reason", True)]

    await on_device(engine, told)
    assert asked == [True, True]


async def test_whatever_requests_ask_for_the_tokens_are_the_same(engine: AsyncEngine) -> None:
    wishes = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0.9, seed=4, max_tokens=12),
        SamplingParams(temperature=0.9, seed=5, top_k=7, top_p=0.8, max_tokens=12),
        SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=12, max_tokens=12),
        SamplingParams(temperature=0.8, seed=6, logprobs=3, max_tokens=12),
        SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=12),
        SamplingParams(temperature=0, logit_bias={7: 4.0}, max_tokens=12),
        *(
            SamplingParams(temperature=0.9, seed=seed, structured_output=LETTERS, max_tokens=12)
            for seed in range(5)
        ),
    ]
    prompts = random_prompts(len(wishes), longest=50, seed=8)
    computer = computer_of(engine)
    whole = computer.code
    answers: list[list[list[int]]] = []
    scores: list[list[float]] = []
    for salt, code in {"a": whole, "b": whole._replace(step=None)}.items():
        computer.code = code
        results = await asyncio.gather(
            *(
                engine.generate(prompt, wish, cache_salt=salt)
                for prompt, wish in zip(prompts, wishes, strict=True)
            )
        )
        answers.append([result.token_ids for result in results])
        scores.append([entry.logprob for entry in results[4].completions[0].logprobs or []])
        scored = [entry for entry in results[5].prompt_logprobs or [] if entry is not None]
        scores[-1] += [entry.logprob for entry in scored]
    assert answers[0] == answers[1]
    # Others were in the batch, and a BLAS sums in another order then.
    assert len(scores[0]) > 12
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How steps are computed from now on: a list that grows."""
    made: list[str] = []
    draw, compute = CompiledStep.draw, CompiledStep.compute

    def drawing(self: CompiledStep, *arguments: Any, **options: Any) -> Any:
        made.append("draw")
        return draw(self, *arguments, **options)

    def computing(self: CompiledStep, *arguments: Any, **options: Any) -> Any:
        made.append("hidden" if options["wants_hidden"] else "logits")
        return compute(self, *arguments, **options)

    monkeypatch.setattr(CompiledStep, "draw", drawing)
    monkeypatch.setattr(CompiledStep, "compute", computing)
    return made


async def test_a_prompt_that_is_scored_costs_its_own_steps_only(
    engine: AsyncEngine, calls: list[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    scored, _ = await asyncio.gather(
        engine.generate([5, 6, 7, 8], params), engine.generate([5, 6], LONGER)
    )
    assert len(scored.prompt_logprobs or []) == 4
    assert calls == ["hidden"] + ["draw"] * (len(calls) - 1)
    assert len(calls) >= 12


@pytest.mark.parametrize(
    ("step", "how", "num_scores"),
    [
        (RowStep(2, 1, 30, 5, False), "hidden", 5),
        (RowStep(2, 1, 30, LENGTH - 30, True), "hidden", LENGTH - 31),
        # What it predicts is no token of the prompt.
        (RowStep(2, 1, LENGTH - 1, 1, True), "draw", None),
    ],
    ids=["chunk", "end", "last token"],
)
async def test_a_step_scores_what_is_left_of_the_prompt(
    engine: AsyncEngine, calls: list[str], step: RowStep, how: str, num_scores: int | None
) -> None:
    computer = computer_of(engine)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)

    def run() -> None:
        install(computer, [0.0] * NUM_ROWS, seed=3)
        tokens = computer._rows.tokens[2, :LENGTH].tolist()
        request = Request(key=2, prompt_token_ids=tokens, params=params, max_tokens=8)
        computer._unscored[2] = DeviceRequest.of(request)  # type: ignore[index]
        scores = computer.compute(StepPlan(1, [], [], [step])).prompt_scores
        found = None if scores is None else scores.of_row(0)
        assert (None if found is None else len(found)) == num_scores

    await on_device(engine, run)
    assert calls == [how]
