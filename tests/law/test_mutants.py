"""The table of mutations follows the code: each names one place of a file, and tests that exist."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from src.core.settings import CHECKOUT
from tests.mutants.mutation import Mutation
from tests.mutants.table import MUTATIONS

NAMES = [f"{mutation.file}: {mutation.what}" for mutation in MUTATIONS]


def test_they_are_told_apart_by_their_names() -> None:
    assert len(MUTATIONS) >= 150
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
        name, _, test = argument.partition("::")
        path = CHECKOUT / name
        if not path.exists() or (test and not re.search(rf"def {test}\b", path.read_text())):
            missing.append(argument)
    assert missing == []
