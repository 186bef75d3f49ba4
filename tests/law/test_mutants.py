"""The table of mutations follows the code: each names one place of a file, and tests that exist."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections import Counter

import pytest

from src.core.settings import CHECKOUT
from tests.mutants.mutation import Mutation
from tests.mutants.rewriting import definition, rewritten
from tests.mutants.table import MUTATIONS
from tests.mutants.trial import Outcome, Verdict, outcome_of

NAMES = [f"{mutation.file}: {mutation.what}" for mutation in MUTATIONS]


def test_they_are_told_apart_by_their_names() -> None:
    assert len(MUTATIONS) >= 300
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


@functools.cache
def code_of(file: str) -> ast.Module:
    return ast.parse((CHECKOUT / file).read_text())


@functools.cache
def plain(file: str) -> str:
    """Its code without layout and comments."""
    return ast.unparse(code_of(file))


@functools.cache
def names_of(file: str) -> set[str]:
    return names_in(code_of(file)) | set(dir(builtins))


def names_in(code: ast.AST) -> set[str]:
    """Variables, arguments, and what is imported; no holes of a pattern."""
    found = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    found |= {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}
    found |= {node.name for node in ast.walk(code) if isinstance(node, ast.alias)}
    return {name for name in found if len(name) > 1}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_each_can_be_made_and_is_another_program(mutation: Mutation) -> None:
    text = (CHECKOUT / mutation.file).read_text()
    mutated = mutation.mutated(text)
    assert mutated != text
    if mutation.is_python:
        compile(mutated, mutation.file, "exec")
        made = mutated if mutation.function is not None else ast.unparse(ast.parse(mutated))
        assert made != plain(mutation.file), "the same program"


def test_no_fault_is_a_name_that_is_not_there() -> None:
    """Tests would notice such a fault for another reason than it is there for."""
    for each in MUTATIONS:
        if each.function is not None:
            assert names_in(ast.parse(each.after)) <= names_of(each.file), each.what


def test_where_code_changes_often_a_mutation_names_a_function() -> None:
    """Outside of these a renamed variable is no reason to look at the faults again."""
    pinned = ("src/engine/scheduling/", "src/engine/kv/", "src/engine/sampling/")
    text = {each.file for each in MUTATIONS if each.is_python and each.function is None}
    text -= {file for file in text if file.startswith(pinned)} | {"src/engine/loop.py"}
    assert not text, "write these with rewrites_of: see tests/mutants/README.md"


def test_a_variable_may_be_renamed() -> None:
    """Patterns find code by what it does, and have holes for variables of functions."""
    for each in MUTATIONS:
        if each.function is None:
            continue
        within = definition(code_of(each.file), each.function)
        if isinstance(within, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [node for node in ast.walk(within) if isinstance(node, ast.Name)]
            stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} - {"self"}
            assert not names_in(ast.parse(each.before)) & stored, each.what


CODE = """
class Pool:
    limit = 4

    def take(self, first, *others, key=None):
        if first < self.limit:
            self.held.add(first)
        for each in others:
            if each < key:
                return each
        return f"{first} of {self.limit}"

    def give(self, each):
        self.held.add(each)
"""


@pytest.mark.parametrize(
    ("function", "before", "after", "line"),
    [
        ("Pool.take", "A < self.limit", "A <= self.limit", "if first <= self.limit:"),
        ("Pool.take", "if A < self.limit: B", "if True:\n    B", "if True:"),
        ("Pool.take", "if A: return B", "return A", "return each < key"),
        ("Pool.take", "self.held.add(A)", "", "pass"),
        ("Pool.take", 'f"{A} of {B}"', 'f"{B} of {B}"', "return f'{self.limit} of {self.limit}'"),
        ("Pool.take", "for A in B: C", "for A in B[1:]: C", "for each in others[1:]:"),
        ("Pool.give", "A.add(*B)", "A.add(self, *B)", "self.held.add(self, each)"),
        ("Pool", "limit = A", "limit = A + 1", "limit = 4 + 1"),
        ("", "limit = A", "limit = A + 1", "limit = 4 + 1"),
    ],
)
def test_code_is_found_whatever_is_in_the_holes(
    function: str, before: str, after: str, line: str
) -> None:
    made = rewritten(CODE, function, before, after)
    lines = [each.strip() for each in ast.unparse(ast.parse(CODE)).splitlines()]
    found = [each.strip() for each in made.splitlines()]
    assert found.count(line) == lines.count(line) + 1
    # Every name of a variable is another: the same place is found.
    renamed = CODE.replace("first", "one").replace("each", "two").replace("others", "three")
    assert rewritten(renamed, function, before, after) == (
        made.replace("first", "one").replace("each", "two").replace("others", "three")
    )


@pytest.mark.parametrize(
    ("function", "before", "after", "said"),
    [
        ("Pool.take", "A < B", "A <= B", "2 places in Pool.take"),
        ("Pool.take", "A > B", "A < B", "0 places in Pool.take"),
        ("Pool.take", "A < A", "A <= A", "0 places"),
        ("", "self.held.add(A)", "", "2 places in the file"),
        ("Pool.gone", "A", "B", "0 definitions of Pool.gone"),
        ("Pool.take", "A < self.limit", "B < self.limit", "the hole B"),
    ],
)
def test_a_pattern_must_occur_once(function: str, before: str, after: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rewritten(CODE, function, before, after)


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
