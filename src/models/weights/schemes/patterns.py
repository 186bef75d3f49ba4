"""Patterns of a checkpoint, whose matching takes a bounded time.

A checkpoint is data of others. A pattern that backtracks could keep a start busy for ever, and so
could very many patterns. Therefore all patterns of a checkpoint share an allowance of time, and a
start that exceeds it ends with an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar

PREFIX: Final = "re:"
_LONGEST: Final = 1000  # characters
# Seconds of CPU. Usual patterns take millionths of one for a module.
_SECONDS: Final = 5.0

# Patterns that call themselves, which `re` does not have. They take memory without end.
_CALLS: Final = re.compile(r"\(\?(?:R\)|[0-9]|&|P[>&])")

P = ParamSpec("P")
T = TypeVar("T")


class Allowance:
    """The time that all patterns of a checkpoint may take together."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = self._left = _SECONDS if seconds is None else seconds

    @property
    def left(self) -> float:
        """Seconds of CPU that are left."""
        return max(self._left, 0.001)

    def spend(self, text: str, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call a function that works on a pattern; its text is for the error.

        Raises
        ------
        ValueError
            The time is over.
        """
        begun = time.thread_time()
        try:
            result = function(*given, **named)
        except (TimeoutError, MemoryError):
            self._left = 0.0
            raise self._over(text) from None
        self._left -= time.thread_time() - begun
        if self._left <= 0:
            raise self._over(text)
        return result

    def _over(self, text: str) -> ValueError:
        return ValueError(
            f"the pattern {text[:100]!r}, or all patterns together, took more than "
            f"{self._seconds:g} seconds"
        )


class Patterns:
    """Regular expressions of which one must match the beginning of a module's name."""

    def __init__(self, entries: Iterable[str], allowance: Allowance | None = None) -> None:
        """Compile the entries, which may begin with ``re:``.

        Raises
        ------
        ValueError
            One is malformed or too long, or the time is over.
        """
        self._allowance = allowance or Allowance()
        self._known: dict[str, bool] = {}
        self._compiled = [self._allowance.spend(each, _compiled, each) for each in entries]

    def match(self, module: str) -> bool:
        """Whether one of them matches the name of a module. Each module is matched once.

        Raises
        ------
        ValueError
            The time is over.
        """
        known = self._known.get(module)
        if known is None:
            known = any(self._matches(pattern, module) for pattern in self._compiled)
            self._known[module] = known
        return known

    def _matches(self, pattern: Any, module: str) -> bool:
        spend, left = self._allowance.spend, self._allowance.left
        # Others may run meanwhile, such as the server that answers questions about its health.
        found = spend(pattern.pattern, pattern.match, module, timeout=left, concurrent=True)
        return found is not None


def _compiled(entry: str) -> Any:
    # Few checkpoints have patterns. `re` cannot be told to give up.
    import regex

    text = entry.removeprefix(PREFIX)
    if len(text) > _LONGEST:
        raise ValueError(f"a pattern of {len(text)} characters is too long: {text[:40]}...")
    if _CALLS.search(text):
        raise ValueError(f"the pattern {text!r} calls itself")
    try:
        return regex.compile(text, cache_pattern=False)
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {text!r} is malformed: {error}") from None
