"""Runs tests on a copy of the tree that has one fault in it."""

from __future__ import annotations

import enum
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from src.core.settings import CHECKOUT
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
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(num_copies):
            copy = scratch / str(number)
            for part in _PARTS:
                shutil.copytree(CHECKOUT / part, copy / part, ignore=_IGNORED)
            for file in CHECKOUT.iterdir():
                if file.is_file() and file.suffix in (".py", ".toml", ".md"):
                    shutil.copy(file, copy)
            self._copies.put(copy)

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether tests pass as they are; how long they take is their mutations' measure."""
        with self._copy() as copy:
            started = time.monotonic()
            code, said = _pytest(copy, tests, _UNTRIED)
            self._seconds[tests] = time.monotonic() - started
        if code != 0:
            print(said)
        return code == 0

    def judge(self, mutation: Mutation) -> Verdict:
        """Try one mutation."""
        limit = _SLOWER * self._seconds[mutation.tests] + _GRACE
        with self._copy() as copy, _mutated(copy / mutation.file, mutation):
            started = time.monotonic()
            variables = {}
            if not mutation.is_python:
                limit = _COMPILING
                # Nobody else is to find these kernels.
                variables["SLIPSTREAM_CACHE_DIR"] = str(copy / "kernels")
            code, said = _pytest(copy, mutation.tests, limit, variables)
            seconds = time.monotonic() - started
        return Verdict(mutation, _outcome(code, said), seconds, said)

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)


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


def _pytest(
    copy: Path, tests: tuple[str, ...], limit: float, variables: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Exit status and the end of the output; no status if the time was over."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=short", *tests],
        cwd=copy,
        env={**os.environ, **_ENVIRONMENT, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # With all that the tests have started.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, said[-2000:]


def _outcome(code: int | None, said: str) -> Outcome:
    if code is None:
        return Outcome.HUNG
    if code == 0:
        return Outcome.SURVIVED
    if code > 1 or "ERROR collecting" in said:
        return Outcome.BROKEN
    return Outcome.KILLED
