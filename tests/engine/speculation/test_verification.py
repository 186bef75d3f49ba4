"""A plan's bounds become an exact plan, and sampled tokens are compared with its drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from src.core.plan import RowStep, StepPlan
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.grammar.look_ahead import Wanted
from src.engine.speculation import SURE, BatchDrafter, Guess, Speculation, Widths
from src.engine.speculation.drafter import KeptHidden
from src.engine.speculation.guess import FORCED

POISON = -1


class Restricting:
    """Restricts no row, or all of them to what it is given."""

    def __init__(self, possible: list[int] | None = None) -> None:
        self.possible = possible
        self.wanted: list[Wanted] = []
        self.never = False

    def never_drafts(self, row: int) -> bool:
        return self.never

    def leaves_free(self, row: int, position: int) -> bool:
        return self.possible is None

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.wanted += wanted
        return [self.possible or []] * len(wanted)


FREE = Restricting()


class Counting:
    """Guesses the numbers that follow the last token."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        last = int(tokens[-1])
        return Guess(list(range(last + 1, last + 9)), 3)


def speculation(tokens: np.ndarray, restrictions: Restricting = FREE) -> Speculation:
    widths = Widths(always=True)
    return Speculation((Counting(),), tokens, restrictions, POISON, widths)


def buffer(length: int, room: int = 12) -> np.ndarray:
    """One row: tokens 10, 11, ... and room behind them."""
    tokens = np.full((1, room), POISON, np.int32)
    tokens[0, :length] = range(10, 10 + length)
    return tokens


def plan(*steps: RowStep) -> StepPlan:
    return StepPlan(1, [], [], list(steps))


def test_a_plan_without_drafts_is_left_as_it_is() -> None:
    assert speculation(buffer(4)).begin(plan(RowStep(0, 1, 3, 1, True))) is None


def test_drafts_are_written_behind_the_newest_token() -> None:
    tokens = buffer(4)
    verification = speculation(tokens).begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert verification is not None
    assert verification.plan.rows == [RowStep(0, 1, 3, 4, True, 3)]
    assert tokens[0].tolist() == [*range(10, 17), *[POISON] * 5]


@pytest.mark.parametrize(("limit", "drafts"), [(12, 3), (7, 2), (6, 1), (5, 0)])
def test_a_row_never_gets_longer_than_it_may(limit: int, drafts: int) -> None:
    tokens = buffer(4)
    verification = speculation(tokens).begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, limit)))
    assert verification is not None
    assert verification.plan.rows == [RowStep(0, 1, 3, 1 + drafts, True, drafts)]
    assert (tokens[0, 4 + drafts :] == POISON).all()


@pytest.mark.parametrize(
    ("possible", "source", "count"),
    # Nobody has guessed what is forced behind a guess.
    [([14], "", 1), ([14, 99], "", 1), ([98, 99], FORCED, 2), ([], None, 0)],
)
def test_a_row_that_something_restricts_has_the_drafts_that_are_possible(
    possible: list[int], source: str | None, count: int
) -> None:
    tokens, restrictions = buffer(4), Restricting(possible)
    made = speculation(tokens, restrictions).begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert made is not None
    assert restrictions.wanted == [Wanted(0, [14, 15, 16], 3)]
    assert made.plan.rows == [RowStep(0, 1, 3, 1 + count, True, count)]
    [guess] = made.drafts
    assert (None if guess is None else guess.source) == source
    assert ([] if guess is None else guess.token_ids) == possible[:count]
    assert tokens[0, 4:].tolist() == [*possible[:count], *[POISON] * (8 - count)]


def test_nobody_waits_for_a_row_that_never_has_drafts() -> None:
    restrictions = Restricting([14, 15])
    made = Speculation((Counting(),), buffer(4), restrictions, POISON)
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e-3)
    restrictions.never = True
    step = RowStep(0, 1, 3, 4, True, 3, 0, 12)
    for _ in range(40):
        verification = made.begin(plan(step))
        assert verification is not None
        assert verification.plan.num_drafts == 0
    assert restrictions.wanted == []
    # Nor are steps planned for its drafts all the time.
    assert made.rests(0) > 0


def test_of_rows_without_drafts_too_a_verification_says_what_they_take() -> None:
    tokens = np.concatenate((buffer(4), buffer(4)))
    made = speculation(tokens).begin(
        plan(
            RowStep(0, 1, 3, 4, True, 3, 0, 12),
            RowStep(1, 1, 2, 1, False),
            RowStep(1, 1, 3, 1, True),
        )
    )
    assert made is not None
    made.kept = [3, 0, 1]
    assert made.taken([14, 15, 99, 7, 50]) == [[14, 15, 99], [50]]


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [
        ([14, 15, 16, 17], 4),
        ([14, 15, 99, 17], 3),
        ([99, 15, 16, 17], 1),
        # Behind a token that could not be drawn there is nothing; the next step says so.
        ([14, -1, 16, 17], 1),
        ([-1, 15, 16, 17], 1),
    ],
)
def test_tokens_count_up_to_the_first_that_was_not_guessed(sampled: list[int], kept: int) -> None:
    tokens = buffer(4)
    made = speculation(tokens)
    first = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert first is not None
    # As the step does.
    tokens[0, 4:8] = np.maximum(sampled, 0)
    made.settle(first, sampled)
    assert list(first.kept) == [kept]
    assert tokens[0, 4 : 4 + kept].tolist() == np.maximum(sampled[:kept], 0).tolist()
    assert (tokens[0, 4 + kept :] == POISON).all()
    assert (made.counts.rows, made.counts.drafted, made.counts.accepted) == (1, 3, kept - 1)
    assert made.counts.accepted_at == [1] * (kept - 1) + [0] * (4 - kept)
    # The next step begins where the row ends, wherever its plan says that it may.
    behind = made.begin(plan(RowStep(0, 1, 4, 1, True, 0, 3, 12)))
    assert behind is not None
    assert behind.plan.rows == [RowStep(0, 1, 3 + kept, 1, True)]


def test_a_row_that_is_as_long_as_it_may_be_computes_nothing() -> None:
    tokens = buffer(4)
    made = speculation(tokens)
    first = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 8)))
    assert first is not None
    made.settle(first, [14, 15, 16, 17])
    behind = made.begin(plan(RowStep(0, 1, 4, 4, True, 3, 3, 8)))
    assert behind is not None
    assert (behind.plan.rows, behind.index) == ([], [-1])
    made.settle(behind, [])


class Failing:
    def __init__(self) -> None:
        self.asked = 0

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        self.asked += 1
        raise RuntimeError("no idea at all")


def test_a_drafter_that_fails_is_left_alone_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, tokens = Failing(), buffer(4)
    made = Speculation((failing, Counting()), tokens, FREE, POISON, Widths(always=True))
    step = plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))
    for _ in range(3):
        verification = made.begin(step)
        assert verification is not None
        assert verification.plan.rows == [RowStep(0, 1, 3, 4, True, 3)]
    assert failing.asked == 1
    [record] = caplog.records
    assert "the drafter Failing failed" in record.getMessage()
    assert record.exc_info is not None


def test_without_a_drafter_rows_go_on_token_by_token() -> None:
    failing = Failing()
    made = Speculation((failing,), buffer(4), FREE, POISON)
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e-3)
    for _ in range(40):
        verification = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
        assert verification is not None
        assert verification.plan.rows == [RowStep(0, 1, 3, 1, True)]
    assert failing.asked == 1


def test_a_row_whose_grammar_allows_no_guess_is_asked_again_soon() -> None:
    made = Speculation((Counting(),), buffer(4), Restricting([]), POISON)
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e-3)
    for _ in range(40):
        assert made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))) is not None
        assert made.rests(0) < 3


def test_a_step_without_rows_says_nothing_of_what_steps_take() -> None:
    widths = Widths()
    taken: list[int] = []
    widths.took = lambda tokens, *_: taken.append(tokens)  # type: ignore[method-assign]
    made = Speculation((Counting(),), buffer(4), FREE, POISON, widths)
    made.observe(plan(), 1e-6)
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e-3)
    assert taken == [1]


class Sure:
    """Guesses one token, from a match of so many."""

    def __init__(self, token: int, match: int) -> None:
        self.guess = Guess([token], match, f"match of {match}")

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess:
        return self.guess


@pytest.mark.parametrize(
    ("matches", "taken"), [((3, 20), 20), ((20, 3), 20), ((3, 1), 3), ((9, 20), 9)]
)
def test_a_likely_guess_is_taken_and_else_the_likeliest(
    matches: tuple[int, int], taken: int
) -> None:
    drafters = [Sure(match, match) for match in matches]
    made = Speculation(drafters, buffer(4), FREE, POISON, Widths(always=True))
    first = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert first is not None
    assert first.drafts == [Guess([taken], taken, f"match of {taken}")]
    made.settle(first, [taken, 1])
    assert made.counts.by_source == {f"match of {taken}": (1, 1)}


class Following(Counting):
    """Is told of a row's requests."""

    def __init__(self, *, reads_texts: bool = True) -> None:
        self.reads_texts = reads_texts
        self.told: list[tuple[object, ...]] = []

    def install(self, row: int, request: DeviceRequest) -> None:
        self.told.append((row, request.key))

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        self.told.append((row, request.key, tokens.tolist()))

    def catch_up(self) -> None:
        self.told.append(())


class Fifty(BatchDrafter):
    """Guesses 50 for whatever row it is asked for."""

    source = "computing"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[int, int]] = []

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        self.asked.append(dict(asked))
        self.guesses = {row: Guess([50], SURE, self.source) for row in asked}


@pytest.mark.parametrize(
    ("match", "asked", "taken"), [(20, {}, 9), (1, {0: 3}, 50), (None, {0: 3}, 50)]
)
@pytest.mark.parametrize("is_first", [False, True])
def test_nobody_computes_for_a_row_with_a_likely_guess(
    match: int | None, asked: dict[int, int], taken: int, is_first: bool
) -> None:
    computing = Fifty()
    drafters: list[Any] = [computing] if match is None else [computing, Sure(9, match)]
    drafters = drafters[:: 1 if is_first else -1]
    made = Speculation(drafters, buffer(4), FREE, POISON, Widths(always=True))
    first = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert first is not None
    assert computing.asked == [asked]
    [guess] = first.drafts
    assert guess is not None
    assert guess.token_ids == [taken]


class Silent:
    """Has no idea."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> None:
        return None


class Weak(BatchDrafter):
    """Reads texts and hidden states, puts things off, and fails at some call of one method.

    Attributes
    ----------
    called
        Names of its methods in the order of their calls, that of the failure last.
    """

    reads_texts = True

    def __init__(self, wants_hidden: KeptHidden, fails_in: str = "", call: int = 1) -> None:
        super().__init__()
        self.wants_hidden = wants_hidden
        self.fails_in, self.call = fails_in, call
        self.called: list[str] = []

    def _note(self, name: str) -> None:
        self.called.append(name)
        if name == self.fails_in and self.called.count(name) >= self.call:
            raise RuntimeError("a drafter's fault")

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        self._note("propose")
        return None

    def compute(self, rows: Sequence[RowStep], asked: Mapping[int, int]) -> None:
        self._note("compute")

    def finish(self, ends: Callable[[int], bool]) -> None:
        self._note("finish")

    def vacate(self, row: int) -> None:
        self._note("vacate")

    def keep(self, last: Mapping[int, tuple[int, int]], hidden_s: torch.Tensor) -> None:
        self._note("keep")

    def keep_all(self, computed: Mapping[int, Any], hidden_t: torch.Tensor) -> None:
        self._note("keep_all")

    def install(self, row: int, request: DeviceRequest) -> None:
        self._note("install")

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        self._note("leave")

    def catch_up(self) -> None:
        self._note("catch_up")


CALLS = ("install", "vacate", "finish", "propose", "compute", "leave", "catch_up")


@pytest.mark.parametrize("is_first", [False, True])
# The second call of two of them is at the end of a request.
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("fails_in", [*CALLS, "keep", "keep_all"])
def test_a_drafter_that_fails_is_asked_no_more_and_others_are(
    fails_in: str, call: int, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hidden: KeptHidden = "all" if fails_in == "keep_all" else "sampled"
    weak, sound = Weak(hidden, fails_in, call), Weak(hidden)
    drafters = [weak, sound] if is_first else [sound, weak]
    made = Speculation(drafters, buffer(4), FREE, POISON, Widths(always=True))
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    rounds: list[list[str]] = []
    for _ in range(2):
        sound.called.clear()
        made.install(0, request)
        bounded = plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))
        made.finish(bounded)
        verification = made.begin(bounded)
        assert verification is not None
        made.settle(verification, [14])
        assert made.hidden.wanted == hidden
        made.hidden.keep(verification.plan, torch.zeros(1, 8), verification.kept)
        made.catch_up()
        made.leave(0, request)
        rounds.append([*sound.called])
    # It has failed once, and nothing came behind that.
    assert weak.called.count(fails_in) == call
    assert weak.called[-1] == fails_in
    assert rounds[0] == rounds[1]
    kept = "keep_all" if hidden == "all" else "keep"
    assert {*rounds[0]} == {*CALLS, kept}
    assert caplog.text.count("the drafter Weak failed, and is not asked any more") == 1


def test_asking_in_vain_is_no_part_of_what_steps_take_without_drafts() -> None:
    widths = Widths()
    taken: list[tuple[int, int]] = []
    made = Speculation((Silent(),), buffer(4), FREE, POISON, widths)
    step = RowStep(0, 1, 3, 1, True)
    made.observe(plan(step), 1e-3)
    widths.took = lambda tokens, drafts, _: taken.append(  # type: ignore[method-assign]
        (tokens, drafts)
    )
    assert made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))) is not None
    made.observe(plan(step), 2e-3)
    assert taken == []
    # Nobody is asked in the pause.
    assert made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))) is not None
    made.observe(plan(step), 1e-3)
    assert taken == [(1, 0)]


def test_rows_of_a_failed_step_have_no_text() -> None:
    following, tokens = Following(), buffer(4)
    made = Speculation((following,), tokens, FREE, POISON, Widths(always=True))
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    made.install(0, request)
    made.fail(plan(RowStep(0, 1, 3, 1, True)))
    tokens[tokens == POISON] = 0
    made.leave(0, request)
    made.install(0, request)
    made.leave(0, request)
    made.catch_up()
    assert following.told == [(0, 7), (0, 7, []), (0, 7), (0, 7, tokens[0].tolist()), ()]


def test_a_drafter_that_follows_is_told_who_comes_and_goes() -> None:
    following, tokens = Following(), buffer(4)
    made = Speculation((following,), tokens, FREE, POISON, Widths(always=True))
    request = DeviceRequest(key=7, prompt_len=2, params=SamplingParams())
    made.install(0, request)
    made.install(0, None)
    made.leave(0, request)
    tokens[0] = 5
    made.leave(0, request)
    assert following.told == [(0, 7), (0, 7, [10, 11, 12, 13]), (0, 7, [5] * 12)]


@pytest.mark.parametrize("reads", [[False], [True, False], [False, True]])
def test_no_text_is_looked_for_that_nobody_reads(reads: list[bool]) -> None:
    drafters = [Following(reads_texts=each) for each in reads]
    made = Speculation(drafters, buffer(4), FREE, POISON, Widths(always=True))
    made.leave(0, DeviceRequest(key=7, prompt_len=2, params=SamplingParams()))
    text = [10, 11, 12, 13] if any(reads) else []
    assert [each.told for each in drafters] == [[(0, 7, text)]] * len(reads)


class OnlyFirst:
    """Guesses for the first row only."""

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        return Guess([50] * most, 9) if row == 0 else None


class Choosing(Widths):
    """Chooses as many drafts as it is told, and notes what it was asked."""

    def __init__(self, chosen: int, *, has_held_back: bool = False) -> None:
        super().__init__()
        self._chosen, self._has_held_back = chosen, has_held_back
        self.noted: list[tuple[Any, ...]] = []

    def choose(self, guesses: Any, num_rows: int, num_tokens: int, *_: Any, others: Any) -> Any:
        self.noted.append((num_rows, num_tokens, others))
        self.has_held_back = self._has_held_back
        return [self._chosen] * len(guesses)

    def charge(self, rows: Sequence[int], num_tokens: int, drafts: int) -> None:
        self.noted.append((list(rows), num_tokens, drafts))


@pytest.mark.parametrize(
    ("chosen", "held_back", "rests"), [(2, False, 0), (0, True, 3), (0, False, 16)]
)
def test_rows_without_guesses_count_and_a_row_that_they_hold_back_is_soon_asked_again(
    chosen: int, held_back: bool, rests: int
) -> None:
    widths = Choosing(chosen, has_held_back=held_back)
    made = Speculation((OnlyFirst(),), buffer(4).repeat(4, 0), FREE, POISON, widths)
    widths.took(3, 0, 0.01)
    drafting = [RowStep(row, 1, 3, 3, True, 2, 0, 12) for row in (0, 2)]
    verification = made.begin(plan(*drafting, RowStep(1, 1, 3, 1, True)))
    assert verification is not None
    assert widths.noted == [(3, 3, [2, 1]), ([0, 2, 1], 3, chosen)]
    assert [step.drafts for step in verification.plan.rows] == [chosen, 0, 0]
    assert widths.rests(0) <= rests
    assert widths.rests(0) > rests // 2 or not rests


class AtTimes(Restricting):
    """Two tokens are possible each ``period``-th time that it is asked, and no others."""

    def __init__(self, period: int) -> None:
        super().__init__([])
        self.period = period
        self.times = 0

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.times += 1
        return [[14, 15] if self.times % self.period == 0 else []] * len(wanted)


def steps_with_asking(
    period: int, vain: float, found: float, rows: int = 1, disturbed: int = -1
) -> list[int]:
    """Steps of 512 in which restricted rows are asked for; all that is found is right.

    ``vain`` and ``found``: how long such a step takes, in steps; ``disturbed``: which time of
    asking something else takes the machine.
    """
    restrictions = AtTimes(period)
    tokens = np.concatenate([buffer(4) for _ in range(rows)])
    made = Speculation((Silent(),), tokens, restrictions, POISON)
    plain = plan(*(RowStep(row, 1, 3, 1, True) for row in range(rows)))
    bounded = plan(*(RowStep(row, 1, 3, 4, True, 3, 0, 12) for row in range(rows)))
    asked = []
    for step in range(512):
        made.observe(plain, 1e-3)
        before = restrictions.times
        verification = made.begin(bounded)
        assert verification is not None
        counts = [each.num_sampled for each in verification.plan.rows]
        made.settle(verification, [14 + place for count in counts for place in range(count)])
        taken = 1.0
        if restrictions.times > before:
            asked.append(step)
            taken = found if verification.plan.num_drafts else vain
            if len(asked) == disturbed:
                taken = 1000.0
        made.observe(verification.plan, taken * 1e-3)
    return asked


@pytest.mark.parametrize(("vain", "is_often"), [(1.0, True), (1.5, False)])
def test_rows_with_a_grammar_wait_longer_where_asking_costs_and_brings_nothing(
    vain: float, is_often: bool
) -> None:
    asked = steps_with_asking(1000, vain, vain)
    assert (len(asked) > 150) is is_often
    assert (len(asked) < 100) is not is_often
    # It takes some times to find that out.
    assert len([step for step in asked if step < 16]) > 4


@pytest.mark.parametrize(
    ("vain", "is_often"),
    # Of four times one saves 1.9 steps, and the others take 1.5 or 3.
    [(1.5, True), (2.0, False)],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_what_asking_saves_is_weighed_against_what_it_takes(
    rows: int, vain: float, is_often: bool
) -> None:
    asked = steps_with_asking(4, vain, 1.1, rows)
    assert (len(asked) > 150) is is_often
    assert (len(asked) < 100) is not is_often


def test_a_row_whose_drafts_are_right_is_not_asked_at_once_where_asking_costs_more() -> None:
    asked = steps_with_asking(4, 5.0, 1.1)
    late = [step for step in asked if step > 100]
    assert late
    assert all(after - step > 4 for step, after in pairwise(late))


def test_where_asking_costs_more_the_next_request_waits_before_it_is_asked_for() -> None:
    """It is asked for later on, so that what is known of it gets no older."""
    restrictions = Restricting([])
    made = Speculation((Silent(),), buffer(4), restrictions, POISON)
    plain, bounded = plan(RowStep(0, 1, 3, 1, True)), plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))

    def step() -> None:
        made.observe(plain, 1e-3)
        before = len(restrictions.wanted)
        verification = made.begin(bounded)
        assert verification is not None
        made.settle(verification, [14])
        made.observe(verification.plan, 3e-3 if len(restrictions.wanted) > before else 1e-3)

    for key, is_asked_for in enumerate([True, False]):
        made.install(0, DeviceRequest(key=key, prompt_len=2, params=SamplingParams()))
        restrictions.wanted.clear()
        step()
        assert bool(restrictions.wanted) is is_asked_for
        for _ in range(200):
            step()
        assert 0 < len(restrictions.wanted) < 60


def test_one_disturbed_step_does_not_end_asking() -> None:
    assert len(steps_with_asking(2, 1.2, 1.2, disturbed=40)) > 200


@pytest.mark.parametrize("room", [1, 2, 40, 4096])
@pytest.mark.parametrize("prompt_len", [1, 2, 33])
def test_a_text_that_is_left_ends_where_its_tokens_do(room: int, prompt_len: int) -> None:
    following = Following()
    request = DeviceRequest(key=7, prompt_len=prompt_len, params=SamplingParams())
    for length in {prompt_len, prompt_len + 1, prompt_len + room - 1, prompt_len + room}:
        tokens = buffer(length, prompt_len + room)
        made = Speculation((following,), tokens, FREE, POISON, Widths(always=True))
        made.leave(0, request)
        assert following.told.pop() == (0, 7, list(range(10, 10 + length)))


class Compared(np.ndarray):
    """Tokens that count how many of them are compared in arrays."""

    count = 0

    def __eq__(self, other: object) -> Any:
        Compared.count += self.size
        return super().__eq__(other)


@pytest.mark.parametrize("length", [2, 9, 100_000, 2**17])
def test_who_leaves_a_long_context_does_not_have_it_read(length: int) -> None:
    following = Following()
    tokens = buffer(length, 2**17).view(Compared)
    made = Speculation((following,), tokens, FREE, POISON, Widths(always=True))
    Compared.count = 0
    made.leave(0, DeviceRequest(key=7, prompt_len=2, params=SamplingParams()))
    [(_, _, text)] = following.told
    assert text == list(range(10, 10 + length))
    assert Compared.count < 4096


class Turning:
    """Guesses from some step on only; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.knows = False

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        self.asked += 1
        return Guess([int(tokens[-1]) + 1] * 3, 9) if self.knows else None


def resting_row(drafter: Turning) -> tuple[Speculation, np.ndarray]:
    """A row of 4 tokens that had no guess in a step that asked for it."""
    tokens = buffer(4)
    made = Speculation((drafter,), tokens, FREE, POISON)
    # Longer than asking takes on any machine, so that pauses are the shortest ones.
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e3)
    assert made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))) is not None
    assert drafter.asked == 1
    return made, tokens


def test_a_row_without_guesses_rests_until_one_is_found_beside_exact_steps() -> None:
    drafter = Turning()
    made, _ = resting_row(drafter)
    assert made.rests(0) > 10**6
    for _ in range(100):
        assert made.begin(plan(RowStep(0, 1, 3, 1, True))) is None
        assert not made.has_news
    # Every 8th step at least, after shorter pauses.
    assert 10 <= drafter.asked <= 20
    drafter.knows = True
    woken = 0
    while not made.has_news:
        assert made.begin(plan(RowStep(0, 1, 3, 1, True))) is None
        woken += 1
    assert woken <= 9
    assert made.rests(0) == -1
    # It is said once, and from then on the row is asked where drafts are planned.
    assert not made.has_news
    assert made.rests(0) == 0
    assert made.begin(plan(RowStep(0, 1, 3, 1, True))) is None
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e3)
    verification = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert verification is not None
    assert verification.plan.num_drafts > 0


def test_drafts_that_were_planned_already_wake_a_row_too() -> None:
    drafter = Turning()
    made, _ = resting_row(drafter)
    assert made.rests(0) > 10**6
    drafter.knows = True
    for _ in range(3):
        verification = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
        assert verification is not None
    assert verification.plan.num_drafts > 0
    made.settle(verification, [14, 14, 14, 14])
    assert made.rests(0) == -1


def test_a_row_whose_guesses_were_wrong_rests() -> None:
    drafter = Turning()
    drafter.knows = True
    tokens = buffer(4)
    made = Speculation((drafter,), tokens, FREE, POISON)
    made.observe(plan(RowStep(0, 1, 3, 1, True)), 1e-3)
    verification = made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12)))
    assert verification is not None
    assert verification.plan.num_drafts > 0
    made.settle(verification, [99] * (1 + verification.plan.num_drafts))
    assert made.rests(0) > 10**6


def test_a_row_that_rests_is_forgotten_with_its_request() -> None:
    drafter = Turning()
    made, _ = resting_row(drafter)
    made.install(0, None)
    assert made.rests(0) == 0
    for _ in range(80):
        assert made.begin(plan(RowStep(0, 1, 3, 1, True))) is None
    assert drafter.asked == 1


def test_steps_that_look_are_no_base_and_others_are_measured() -> None:
    widths = Widths()
    drafter, taken = Turning(), []
    took = widths.took
    made = Speculation((drafter,), buffer(4), FREE, POISON, widths)
    step = plan(RowStep(0, 1, 3, 1, True))
    made.observe(step, 1e3)
    assert made.begin(plan(RowStep(0, 1, 3, 4, True, 3, 0, 12))) is not None

    def noted(tokens: int, drafts: int, seconds: float) -> None:
        taken.append(seconds)
        took(tokens, drafts, seconds)

    widths.took = noted  # type: ignore[method-assign]
    for _ in range(400):
        asked = drafter.asked
        assert made.begin(step) is None
        made.observe(step, 1e6 if drafter.asked > asked else 1e3, verified=False)
    assert len(taken) >= 40
    assert max(taken) == 1e3


def test_a_row_that_missed_its_step_is_looked_at_in_its_next_one() -> None:
    drafter = Turning()
    made, _ = resting_row(drafter)
    for _ in range(5):
        assert made.begin(plan()) is None
    assert made.begin(plan(RowStep(0, 1, 3, 1, True))) is None
    assert drafter.asked == 2


def test_rows_are_looked_at_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many pauses end together, the rest is looked at in the steps behind."""
    now = [0.0]
    monkeypatch.setattr("src.engine.speculation.asking.time.monotonic", lambda: now[0])

    class Slow(Turning):
        def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
            now[0] += 6e-4
            return super().propose(row, tokens, most)

    # Not so many that no draft would pay.
    drafter, count = Slow(), 5
    tokens = np.concatenate([buffer(4)] * count)
    made = Speculation((drafter,), tokens, FREE, POISON)
    made.observe(plan(*(RowStep(row, 1, 3, 1, True) for row in range(count))), 1e3)
    drafted = [RowStep(row, 1, 3, 2, True, 1, 0, 12) for row in range(count)]
    assert made.begin(plan(*drafted)) is not None
    assert drafter.asked == count
    exact = plan(*(RowStep(row, 1, 3, 1, True) for row in range(count)))
    counts = []
    for _ in range(6):
        asked = drafter.asked
        assert made.begin(exact) is None
        counts.append(drafter.asked - asked)
    assert max(counts) == 2
    assert sum(counts) >= count
