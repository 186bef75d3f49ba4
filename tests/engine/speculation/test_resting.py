"""Rows that rest cost next to nothing: most of their steps pass by all that speculation does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src import AsyncEngine, SamplingParams
from src.core.config import CompileSection, Config, DeviceSection, ModelSection
from src.core.plan import RowInstall, RowStep, StepPlan
from src.core.step_message import DeviceRequest
from src.engine.grammar.look_ahead import Wanted
from src.engine.speculation import BatchDrafter, Guess, Speculation, Widths
from src.engine.speculation.asking import Asking
from src.engine.speculation.lookup import Lookup
from src.engine.speculation.places import ends_before, places_of
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_settings

POISON = -1
# Seconds of a step beside which asking costs nothing, and much.
LONG, SHORT = 1e3, 1e-9


class Free:
    """Restricts no row."""

    def never_drafts(self, row: int) -> bool:
        return False

    def leaves_free(self, row: int, position: int) -> bool:
        return True

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        raise AssertionError("no row is restricted")


class Turning:
    """Guesses from some moment on only; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.knows = False

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        self.asked += 1
        return Guess([7] * 3, 9) if self.knows else None


class Screening(Turning):
    """Says quickly that it has no idea."""

    def __init__(self) -> None:
        super().__init__()
        self.screened = 0

    def may_guess(self, row: int, tokens: np.ndarray) -> bool:
        self.screened += 1
        return self.knows


class Lagging(Turning):
    """Has something to do behind each step."""

    def catch_up(self) -> None:
        pass


class Computing(BatchDrafter):
    """Computes in every step."""

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        self.guesses = {}


class States:
    """Keeps nothing of rows' recurrent states."""

    num_backups = 4

    def back_up(self, rows: Sequence[int]) -> None:
        pass

    def restore(self, rows: Sequence[int]) -> None:
        pass


def exact(rows: int = 1) -> StepPlan:
    return StepPlan(1, [], [], [RowStep(row, 1, 3, 1, True) for row in range(rows)])


INSTALLING = StepPlan(
    1, [RowInstall(0, 1, 9, [10, 11, 12], 3, [[]])], [], [RowStep(0, 1, 3, 1, True)]
)


def request(key: int = 1) -> DeviceRequest:
    return DeviceRequest(key=key, prompt_len=3, params=SamplingParams())


def installed(*drafters: Any, rows: int = 1, **options: Any) -> Speculation:
    """Rows that were given to requests, of which no step has begun."""
    tokens = np.tile(np.arange(10, 22, dtype=np.int32), (rows, 1))
    made = Speculation(drafters, tokens, Free(), POISON, **options)
    for row in range(rows):
        made.install(row, request(row))
    return made


def step(made: Speculation, plan: StepPlan, seconds: float = LONG) -> bool:
    """An exact step as the worker does it: whether it has passed."""
    if made.lets_pass(plan):
        return True
    made.finish(plan)
    assert made.begin(plan) is None
    made.observe(plan, seconds, verified=False)
    for each in plan.rows if made.has_news else ():
        made.rests(each.row)
    made.catch_up()
    return False


def quiet(made: Speculation, rows: int = 1) -> None:
    """Go on until the next step would pass."""
    for _ in range(200):
        step(made, exact(rows))
        if made._idle > 1:
            return
    raise AssertionError("no step passes")


@pytest.mark.parametrize(
    ("seconds", "looks", "passing"), [(LONG, (60, 80), 0.8), (SHORT, (8, 18), 0.94)]
)
def test_most_steps_of_rows_that_rest_pass(
    seconds: float, looks: tuple[int, int], passing: float
) -> None:
    drafter = Turning()
    made = installed(drafter)
    passed = sum(step(made, exact(), seconds) for _ in range(600))
    # Every 8th step, or every 64th where asking is dear.
    assert looks[0] <= drafter.asked <= looks[1]
    assert passed >= passing * 600


@pytest.mark.parametrize(("seconds", "most"), [(LONG, 9), (SHORT, 65)])
def test_a_text_that_begins_to_repeat_is_found_while_steps_pass(seconds: float, most: int) -> None:
    drafter = Turning()
    made = installed(drafter)
    for _ in range(300):
        step(made, exact(), seconds)
    drafter.knows = True
    needed = 0
    while not made.has_news:
        needed += 1
        if made.lets_pass(exact()):
            continue
        assert made.begin(exact()) is None
        made.observe(exact(), seconds, verified=False)
    assert needed <= most
    # The next step does not pass before it was said.
    assert not made.lets_pass(exact())
    assert made.rests(0) == -1


@pytest.mark.parametrize("seconds", [LONG, SHORT])
def test_rows_are_looked_at_in_the_steps_in_which_they_would_be(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that pass count, for pauses and for what is forgotten."""
    monkeypatch.setattr("src.engine.speculation.asking.time.monotonic", lambda: 0.0)
    found = []
    for passes in (True, False):
        drafter, widths = Turning(), Widths()
        made = installed(drafter, rows=2, widths=widths)
        looked = []
        for number in range(400):
            before = drafter.asked
            # A step of one row alone in between.
            plan = exact(1 if number % 50 == 49 else 2)
            if passes:
                step(made, plan, seconds)
            else:
                made.begin(plan)
                made.observe(plan, seconds, verified=False)
                made.rests(0), made.rests(1)
            looked.append(drafter.asked - before)
        found.append(looked)
    assert found[0] == found[1]
    assert sum(found[0]) > 10


def test_rows_that_rest_are_measured_all_the_same() -> None:
    widths, taken = Widths(), 0
    made = installed(Turning(), widths=widths)
    took = widths.took

    def noted(tokens: int, drafts: int, seconds: float) -> None:
        nonlocal taken
        taken += 1
        took(tokens, drafts, seconds)

    widths.took = noted  # type: ignore[method-assign]
    for number in range(640):
        step(made, exact())
        # The first steps look.
        assert widths.may_draft(1) or number < 5
    assert 9 <= taken <= 30


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, [], [], [RowStep(0, 1, 3, 4, True, 3, 0, 12)]),
        StepPlan(1, [], [], [RowStep(0, 1, 3, 1, True, 0, 2, 12)]),
        INSTALLING,
        exact(2),
        exact(0),
    ],
    ids=["drafts", "slack", "an install", "more rows", "no rows"],
)
def test_a_step_that_is_not_like_the_last_one_does_not_pass(plan: StepPlan) -> None:
    made = installed(Turning(), rows=1)
    quiet(made)
    assert not made.lets_pass(plan)
    assert made.lets_pass(exact())


@pytest.mark.parametrize("drafter", [Lagging(), Computing()], ids=["catches up", "computes"])
def test_no_step_passes_by_a_drafter_that_works_in_every_step(drafter: Any) -> None:
    made = installed(drafter)
    assert sum(step(made, exact()) for _ in range(100)) == 0


def test_no_step_passes_while_states_are_behind() -> None:
    drafter = Turning()
    made = installed(drafter, rows=2, states=States())
    first, second = (StepPlan(1, [], [], [RowStep(row, 1, 3, 1, True)]) for row in (0, 1))
    quiet(made, rows=2)
    made._widths.took(1, 0, LONG)
    drafter.knows = True
    for _ in range(40):
        behind = made.begin(StepPlan(1, [], [], [RowStep(0, 1, 3, 4, True, 3, 0, 12)]))
        assert behind is not None
        drafts = behind.plan.num_drafts
        made.settle(behind, [99] * (1 + drafts))
        if drafts:
            break
    assert drafts
    drafter.knows = False
    # The other row goes on alone for some steps.
    for _ in range(20):
        step(made, second)
        assert not made.lets_pass(first)


def test_a_new_request_is_looked_at_at_once_while_others_rest() -> None:
    drafter = Turning()
    made = installed(drafter)
    for _ in range(100):
        step(made, exact(), SHORT)
    quiet(made)
    made.install(0, request(2))
    asked = drafter.asked
    assert not step(made, INSTALLING, SHORT)
    assert drafter.asked == asked + 1


def test_steps_that_have_passed_make_what_is_known_old() -> None:
    widths, guess = Widths(), Guess([1], 20, "suffix")
    widths.took(1, 0, 0.01)
    before = widths.likelihood(guess)
    for _ in range(60):
        widths.verified(0, guess, 0)
    widths.begin(50)
    assert widths.may_draft(1)
    assert widths.likelihood(guess) < before / 2
    widths.begin(50)
    assert not widths.may_draft(1)
    widths.begin(4000)
    assert widths.likelihood(guess) == before


def test_a_step_behind_a_failed_one_does_not_pass() -> None:
    made = installed(Turning())
    quiet(made)
    made.fail(exact())
    assert not made.lets_pass(exact())


def test_a_new_request_rests_until_it_was_looked_at() -> None:
    drafter = Turning()
    made = installed(drafter, rows=2)
    assert made.has_news
    chunk = StepPlan(1, [], [], [RowStep(0, 1, 0, 2, False), RowStep(1, 1, 0, 3, True)])
    assert made.begin(chunk) is None
    assert drafter.asked == 1
    # The result of a prompt's last step says it, whether there is a guess or not.
    assert made.rests(1) > 10**6
    assert made.has_news
    drafter.knows = True
    assert made.begin(StepPlan(1, [], [], [RowStep(0, 1, 2, 1, True)])) is None
    assert drafter.asked == 2
    assert made.rests(0) == -1
    assert not made.has_news


def test_what_is_looked_at_is_a_text_without_the_drafts_of_its_step() -> None:
    """A prompt's last token, beside which there are drafts, is looked at while they are planned."""
    lengths = []

    class Reading(Turning):
        def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
            lengths.append(len(tokens))
            return None

    made = installed(Reading())
    plan = StepPlan(
        1, [RowInstall(0, 1, 9, [10], 1, [[]])], [], [RowStep(0, 1, 0, 1 + 4, True, 4, 0, 12)]
    )
    made.begin(plan)
    assert lengths
    assert set(lengths) == {1}


def test_a_prompt_beside_it_makes_no_guess_dear() -> None:
    """What a look finds is for steps without prompts."""
    drafter = Turning()
    drafter.knows = True
    made = installed(drafter, rows=2)
    prompts = StepPlan(1, [], [], [RowStep(0, 1, 0, 300, False), RowStep(1, 1, 0, 3, True)])
    assert made.begin(prompts) is None
    assert made.rests(1) == -1


def test_who_verifies_everything_lets_no_row_rest() -> None:
    made = installed(Turning(), widths=Widths(always=True))
    assert not made.has_news
    assert made.rests(0) == 0
    assert sum(step(made, exact()) for _ in range(20)) == 0


def test_a_look_asks_nobody_who_says_quickly_that_it_has_no_idea() -> None:
    drafter = Screening()
    made = installed(drafter)
    for _ in range(200):
        step(made, exact())
    assert drafter.screened >= 20
    assert drafter.asked == 0
    drafter.knows = True
    for _ in range(9):
        if not made.has_news and not made.lets_pass(exact()):
            made.begin(exact())
            made.observe(exact(), LONG, verified=False)
    assert drafter.asked == 1
    assert made.rests(0) == -1


def test_beside_one_that_does_not_all_are_asked() -> None:
    screening, turning = Screening(), Turning()
    made = installed(screening, turning)
    step(made, exact())
    assert (screening.screened, screening.asked, turning.asked) == (0, 1, 1)


def test_one_that_fails_to_say_it_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Screening):
        def may_guess(self, row: int, tokens: np.ndarray) -> bool:
            super().may_guess(row, tokens)
            raise RuntimeError("no idea at all")

    failing = Failing()
    made = installed(failing)
    for _ in range(50):
        step(made, exact())
    assert failing.screened == 1
    [record] = caplog.records
    assert "the drafter Failing failed" in record.getMessage()


def test_what_is_screened_out_has_no_place() -> None:
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(400):
        text = random.integers(0, int(random.integers(2, 30)), random.integers(1, 40))
        text = text.astype(np.int32)
        least = int(random.integers(1, 7))
        _, length = places_of(text[:-1], text, least, 24)
        screened = ends_before(text, least)
        assert screened or not length
        outcomes.add((screened, bool(length)))
    # An end is no place of itself.
    assert outcomes >= {(True, True), (False, False)}
    assert not ends_before(np.arange(2000, dtype=np.int32), 3)
    assert not Lookup(least=3, longest=24).may_guess(0, np.arange(9, dtype=np.int32))


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_most_steps_of_a_running_engine_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, passed, asked = 0, 0, 0
    begin, lets_pass, guesses = Speculation.begin, Speculation.lets_pass, Asking.guesses

    def beginning(self: Speculation, plan: StepPlan) -> Any:
        nonlocal begun
        begun += 1
        return begin(self, plan)

    def passing(self: Speculation, plan: StepPlan) -> bool:
        nonlocal passed
        passes = lets_pass(self, plan)
        passed += passes
        return passes

    def asking(self: Asking, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return guesses(self, *arguments)

    monkeypatch.setattr(Speculation, "begin", beginning)
    monkeypatch.setattr(Speculation, "lets_pass", passing)
    monkeypatch.setattr(Asking, "guesses", asking)
    path = make_checkpoint(tmp_path, num_hidden_layers=2, tokenizer=True)
    config = Config(
        model=ModelSection(path=str(path), dtype="float32"),
        device=DeviceSection(type="cpu", num_threads=1),
        compile=CompileSection(**compile_settings()),
    )
    # Nothing in it repeats, nor in what random weights say of it.
    prompt = list(range(100, 120))
    params = SamplingParams(temperature=1, seed=1, max_tokens=200, ignore_eos=True)
    async with AsyncEngine.open(config) as engine:
        for _ in range(2):
            await engine.generate(prompt, params)
    assert begun + passed >= 400
    # Each 8th step may be looked at, and some are measured.
    assert begun <= 0.25 * (begun + passed)
    # Steps at the beginning of a text are planned as all others are.
    assert asked <= 4
