"""The table of mutations follows the code: each names one place of a file, and tests that exist."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from src.core.settings import CHECKOUT
from tests.mutants.mutation import Mutation
from tests.mutants.table import MUTATIONS
from tests.mutants.trial import Outcome, Verdict, outcome_of

NAMES = [f"{mutation.file}: {mutation.what}" for mutation in MUTATIONS]


def test_they_are_told_apart_by_their_names() -> None:
    assert len(MUTATIONS) >= 300
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_each_can_be_made_and_is_another_program(mutation: Mutation) -> None:
    text = (CHECKOUT / mutation.file).read_text()
    mutated = mutation.mutated(text)
    assert mutated != text
    if mutation.is_python:
        compile(mutated, mutation.file, "exec")


def test_the_tests_nearest_to_each_exist() -> None:
    missing = []
    for argument in {argument for mutation in MUTATIONS for argument in mutation.tests}:
        name, _, test = argument.partition("[")[0].partition("::")
        path = CHECKOUT / name
        if not path.exists() or (test and not re.search(rf"def {test}\b", path.read_text())):
            missing.append(argument)
    assert missing == []


def test_an_entry_that_no_longer_fits_is_refused() -> None:
    mutation = a_mutation("a < b", "a <= b")
    assert mutation.mutated("if a < b:") == "if a <= b:"
    for text in ("if a > b:", "if a < b and a < b:"):
        with pytest.raises(ValueError, match="expected 1"):
            mutation.mutated(text)


def a_mutation(before: str, after: str, reason: str = "") -> Mutation:
    return Mutation("what", "file.py", before, after, ("tests",), reason)


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (1, "1 failed", Outcome.KILLED),
        (-11, "", Outcome.KILLED),
        (None, "", Outcome.HUNG),
        (0, "2 passed", Outcome.SURVIVED),
        (2, "1 error", Outcome.BROKEN),
        (1, "ERROR collecting tests/x.py", Outcome.BROKEN),
        (5, "no tests ran", Outcome.BROKEN),
    ],
)
def test_only_tests_that_ran_kill_and_only_survivors_have_reasons(
    code: int | None, said: str, outcome: Outcome
) -> None:
    assert outcome_of(code, said) is outcome
    for reason in ("", "it is the same program"):
        verdict = Verdict(a_mutation("a", "b", reason), outcome, 1.0, said)
        is_fine = {
            Outcome.KILLED: not reason,
            Outcome.HUNG: not reason,
            Outcome.SURVIVED: bool(reason),
            Outcome.BROKEN: False,
        }
        assert verdict.is_at_fault is not is_fine[outcome]
