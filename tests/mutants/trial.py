"""Runs tests on a copy of the tree that has one fault in it."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from src.core.settings import CHECKOUT
from src.ops.build.cache_root import cache_root
from tests.mutants.mutation import Mutation

# What tests read of a checkout.
_PARTS: Final = ("src", "tests", "benchmarks", "configs", "docs")
_IGNORED: Final = shutil.ignore_patterns("__pycache__", ".*_cache", "*.pyc")
# Seconds for tests that passed in so many without a mutation: a fault may make them hang.
_SLOWER: Final = 3.0
_GRACE: Final = 30.0
# Compilers included.
_COMPILING: Final = 900.0
_UNTRIED: Final = 600.0
# Failures are not explained, and copies side by side.
_ENVIRONMENT: Final = {"HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}


class Outcome(enum.Enum):
    """What tests made of a mutation."""

    KILLED = "killed"
    HUNG = "killed by the time limit"
    SURVIVED = "survived"
    # The tests did not run: a mutation must leave them something to run.
    BROKEN = "broken"


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation, and the end of what pytest said."""

    mutation: Mutation
    outcome: Outcome
    seconds: float
    said: str

    @property
    def is_at_fault(self) -> bool:
        """Whether somebody has to look at it."""
        if self.outcome is Outcome.SURVIVED:
            return not self.mutation.reason
        return self.outcome is Outcome.BROKEN or bool(self.mutation.reason)

    @property
    def line(self) -> str:
        """In one line."""
        mutation = self.mutation
        return f"{self.outcome.value:>8} {self.seconds:6.1f} s  {mutation.file}: {mutation.what}"

    @property
    def explanation(self) -> str:
        """What somebody who looks at it wants to see."""
        mutation = self.mutation
        if self.outcome is not Outcome.SURVIVED and mutation.reason:
            return f"it has a reason to survive, and does not: {mutation.reason}"
        shown = [f"- {line}" for line in mutation.before.splitlines()]
        shown += [f"+ {line}" for line in mutation.after.splitlines()]
        if self.outcome is Outcome.BROKEN:
            shown.append(self.said)
        return "\n".join([*shown, f"pytest {' '.join(mutation.tests)}"])


class Tree:
    """A copy of what tests read of the checkout, and the process that runs them there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in _PARTS:
            shutil.copytree(CHECKOUT / part, path / part, ignore=_IGNORED)
        for file in CHECKOUT.iterdir():
            if file.is_file() and file.suffix in (".py", ".toml", ".md"):
                shutil.copy(file, path)
        self._nursery = subprocess.Popen(
            [sys.executable, str(path / "tests" / "mutants" / "nursery.py")],
            cwd=path,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, tests: tuple[str, ...], seconds: float, variables: dict[str, str] | None = None
    ) -> tuple[int | None, str]:
        """Exit status of pytest and the end of what it said; no status if the time was over."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        request = {"tests": tests, "seconds": seconds, "variables": variables or {}}
        self._nursery.stdin.write(json.dumps(request) + "\n")
        self._nursery.stdin.flush()
        code, said = json.loads(self._nursery.stdout.readline())
        return code, said

    def cache_of_kernels(self) -> Path:
        """A cache for kernels that nobody else is to find, with the objects that there are.

        So only the units that a fault is in are compiled.
        """
        cache, objects = self.path / "kernels", Path("cpu-kernels", "objects")
        if not cache.exists() and (cache_root() / objects).exists():
            shutil.copytree(cache_root() / objects, cache / objects)
        return cache

    def close(self) -> None:
        """Run no more tests."""
        self._nursery.communicate()


class Trials:
    """Copies of the tree, one for each worker.

    Parameters
    ----------
    scratch
        Where they are made.
    num_copies
        How many tests may run at once.
    """

    def __init__(self, scratch: Path, num_copies: int) -> None:
        self._seconds: dict[tuple[str, ...], float] = {}
        self._trees = [Tree(scratch / str(number)) for number in range(num_copies)]
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in self._trees:
            self._free.put(tree)

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether tests pass as they are; how long they take is their mutations' measure."""
        with self._tree() as tree:
            started = time.monotonic()
            code, said = tree.run(tests, _UNTRIED)
            self._seconds[tests] = time.monotonic() - started
        if code != 0:
            print(said)
        return code == 0

    def judge(self, mutation: Mutation) -> Verdict:
        """Try one mutation."""
        limit = _SLOWER * self._seconds[mutation.tests] + _GRACE
        with self._tree() as tree, _mutated(tree.path / mutation.file, mutation):
            started = time.monotonic()
            variables = {}
            if not mutation.is_python:
                limit = _COMPILING
                variables["SLIPSTREAM_CACHE_DIR"] = str(tree.cache_of_kernels())
            code, said = tree.run(mutation.tests, limit, variables)
            seconds = time.monotonic() - started
        return Verdict(mutation, outcome_of(code, said), seconds, said)

    def close(self) -> None:
        """Once nothing runs any more."""
        for tree in self._trees:
            tree.close()

    @contextmanager
    def _tree(self) -> Iterator[Tree]:
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


@contextmanager
def _mutated(file: Path, mutation: Mutation) -> Iterator[None]:
    text = file.read_text()
    try:
        file.write_text(mutation.mutated(text))
        _forget_compiled(file)
        yield
    finally:
        file.write_text(text)
        _forget_compiled(file)


def _forget_compiled(file: Path) -> None:
    """Bytecode is told from outdated one by size and second, which may be the same."""
    if file.suffix == ".py":
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def outcome_of(code: int | None, said: str) -> Outcome:
    """What an exit status of pytest, none where the time was over, and its words mean."""
    if code is None:
        return Outcome.HUNG
    if code == 0:
        return Outcome.SURVIVED
    if code > 1 or "ERROR collecting" in said:
        return Outcome.BROKEN
    return Outcome.KILLED
