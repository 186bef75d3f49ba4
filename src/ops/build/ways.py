"""Measures which way of multiplying quantized weights is the fastest here, for a library to choose.

A library may have several ways for the same weights (`ways.h`): products of four bytes, tiles of
bytes, tiles of bfloat16. Which one wins depends on the format, the number of rows and the machine.
The builder of a library measures them once, and its manifest keeps the choice.

A way with other bits than the first is chosen for bfloat16 inputs only, and where results may
depend on the number of rows: not with `model.deterministic`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

WAYS: Final = ("fours", "byte tiles", "bfloat16 tiles")
"""By number, see `Way` in ways.h. The first two give the same bits."""


@dataclass(frozen=True)
class Format:
    """Weights that are measured.

    Attributes
    ----------
    number
        Key of `ops.matrix.NUMBERS`.
    group
        Inputs that share a scale; None: rows have one. Weights in larger groups are of the format
        with the largest group that divides theirs.
    """

    number: str
    group: int | None = None
    has_offsets: bool = False

    def __str__(self) -> str:
        group = "" if self.group is None else f"/{self.group}"
        return f"{self.number}{group}{' with offsets' * self.has_offsets}"


_IN_GROUPS: Final = (("int8", 16), ("int8", 32), ("int8", 64), ("int4", 32), ("int4", 64))

FORMATS: Final = (
    Format("int8"),
    *(Format(*each) for each in _IN_GROUPS),
    *(Format(*each, has_offsets=True) for each in _IN_GROUPS),
)
"""By number, see `Format` in ways.h."""

_NUMBERS: Final = {str(format): number for number, format in enumerate(FORMATS)}

ROWS: Final = (1, 8, 24, 64, 256)
"""Rows that are measured, one number for each class of ways.h."""

FIRST_ROWS: Final = (1, 5, 16, 48, 128)
"""The smallest number of rows of each class."""

_GAIN: Final = 0.95
"""Another way than the usual one must take at most this part of its time."""
_TURNS: Final = 4
_LEAST_SECONDS: Final = 200e-6  # of a turn, so that the clock's resolution does not matter
_CALLS: Final = 32  # at most, of a turn


@dataclass(frozen=True)
class Choice:
    """The ways of a format for a number of rows.

    Attributes
    ----------
    way
        The fastest, for bfloat16 inputs.
    same_bits
        The fastest of those with the same bits for any number of rows.
    """

    format: str
    rows: int
    way: str
    same_bits: str


class Kernels(Protocol):
    """What is chosen from: see `LibraryWays`."""

    def available(self, format: int) -> Sequence[int]: ...
    def chosen(self, format: int, rows: int, same_bits: bool) -> int: ...
    def choose(self, format: int, rows_class: int, same_bits: bool, way: int) -> None: ...


def measure(
    kernels: Kernels,
    prepare: Callable[[int, int], Callable[[], object]],
    clock: Callable[[], float] = time.thread_time,
) -> list[Choice]:
    """Time all ways of all formats in turns; `kernels` is left with what it had.

    Parameters
    ----------
    prepare
        From a format and a number of rows to a call of the kernel, on this thread alone.
    clock
        Seconds. The default does not count what other processes do.

    Returns
    -------
    Nothing for formats with one way.
    """
    choices = []
    for number, format in enumerate(FORMATS):
        ways = kernels.available(number)
        if len(ways) == 1:
            continue
        for rows_class, rows in enumerate(ROWS):
            usual = kernels.chosen(number, rows, False)
            call = prepare(number, rows)
            times = dict.fromkeys(ways, float("inf"))
            try:
                for _ in range(_TURNS):
                    for way in ways:
                        kernels.choose(number, rows_class, False, way)
                        times[way] = min(times[way], _seconds(call, clock))
            finally:
                kernels.choose(number, rows_class, False, usual)
            same_bits = {way: times[way] for way in ways if way < 2}
            best = _best(times, usual)
            best_same = _best(same_bits, kernels.chosen(number, rows, True))
            choices.append(Choice(str(format), rows, WAYS[best], WAYS[best_same]))
    return choices


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of a call, on average of as many as the clock can tell."""
    begin, calls = clock(), 0
    while True:
        call()
        calls += 1
        passed = clock() - begin
        if passed >= _LEAST_SECONDS or calls == _CALLS:
            return passed / calls


def _best(times: dict[int, float], usual: int) -> int:
    best = min(times, key=times.__getitem__)
    return best if times[best] <= _GAIN * times[usual] else usual


def apply(kernels: Kernels, choices: Iterable[Choice]) -> None:
    """Choose these ways; those of formats that have one way in this process stay.

    A process that may not use tiles has none, though the one that built the library had.

    Raises
    ------
    ValueError
        There is no such format, number of rows or way.
    """
    for choice in choices:
        if choice.format not in _NUMBERS:
            raise ValueError(f"expected a format of {sorted(_NUMBERS)}, got {choice.format!r}")
        if len(kernels.available(_NUMBERS[choice.format])) == 1:
            continue
        for same_bits, way in ((False, choice.way), (True, choice.same_bits)):
            kernels.choose(
                _NUMBERS[choice.format], ROWS.index(choice.rows), same_bits, WAYS.index(way)
            )


def has_several(kernels: Kernels) -> bool:
    """Whether there is anything to choose."""
    return any(len(kernels.available(number)) > 1 for number in range(len(FORMATS)))


def told(kernels: Kernels) -> list[str]:
    """A line for each format with several ways: the rows from which each is taken."""
    lines = []
    for number, format in enumerate(FORMATS):
        if len(kernels.available(number)) == 1:
            continue
        parts: list[str] = []
        before = None
        for first in FIRST_ROWS:
            way = WAYS[kernels.chosen(number, first, False)]
            if way != before:
                parts.append(way if before is None else f"{way} from {first} rows on")
            before = way
        lines.append(f"{format}: {', '.join(parts)}")
    return lines
