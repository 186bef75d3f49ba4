"""Which way of multiplying quantized weights a library takes is measured and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from src.ops.build import ways
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.timed_calls import timed_calls
from src.ops.runtime.kernel_library import KernelLibrary

BYTES, TILES, BFLOAT16 = range(3)
# Seconds of a call by way, for a number of rows.
COSTS: dict[int, tuple[float, float, float]] = {
    1: (1e-3, 3e-3, 9e-3),
    8: (3e-3, 2e-3, 9e-3),
    24: (9e-3, 5e-3, 4e-3),
    64: (9e-3, 8.8e-3, 8.7e-3),
    256: (9e-3, 9e-3, 9e-3),
}


class TimedKernels:
    """Ways whose calls take their time on a clock of their own."""

    def __init__(self, ways_of: Sequence[Sequence[int]]) -> None:
        self.now = 0.0
        self.of = ways_of
        self.table = {
            (format, rows_class, same_bits): BYTES
            for format in range(len(ways.FORMATS))
            for rows_class in range(len(ways.ROWS))
            for same_bits in (False, True)
        }

    def available(self, format: int) -> Sequence[int]:
        return self.of[format]

    def _class_of(self, rows: int) -> int:
        return max(i for i, first in enumerate(ways.FIRST_ROWS) if first <= rows)

    def chosen(self, format: int, rows: int, same_bits: bool) -> int:
        return self.table[format, self._class_of(rows), same_bits]

    def choose(self, format: int, rows_class: int, same_bits: bool, way: int) -> None:
        if way not in self.of[format]:
            raise ValueError("no such way")
        self.table[format, rows_class, same_bits] = way

    def prepare(self, format: int, rows: int) -> Callable[[], object]:
        def call() -> None:
            self.now += COSTS[rows][self.chosen(format, rows, False)]

        return call


def kernels_with(*several: int) -> TimedKernels:
    """Kernels of which these formats have all three ways, the others one."""
    return TimedKernels([(0, 1, 2) if i in several else (0,) for i in range(len(ways.FORMATS))])


def test_the_fastest_way_is_chosen_where_it_gains() -> None:
    kernels = kernels_with(4)
    before = dict(kernels.table)
    choices = ways.measure(kernels, kernels.prepare, lambda: kernels.now)
    assert kernels.table == before
    assert choices == [
        ways.Choice("int4/32", 1, "fours", "fours"),
        ways.Choice("int4/32", 8, "byte tiles", "byte tiles"),
        # The fastest of all has other bits.
        ways.Choice("int4/32", 24, "bfloat16 tiles", "byte tiles"),
        # Three per cent is no gain.
        ways.Choice("int4/32", 64, "fours", "fours"),
        ways.Choice("int4/32", 256, "fours", "fours"),
    ]
    ways.apply(kernels, choices)
    assert kernels.chosen(4, 24, False) == BFLOAT16
    assert kernels.chosen(4, 24, True) == TILES
    assert kernels.chosen(4, 7, True) == TILES
    assert ways.told(kernels) == [
        "int4/32: fours, byte tiles from 5 rows on, bfloat16 tiles from 16 rows on, "
        "fours from 48 rows on"
    ]


def test_where_there_is_one_way_nothing_is_measured() -> None:
    kernels = kernels_with()
    assert ways.measure(kernels, kernels.prepare, lambda: kernels.now) == []
    assert kernels.now == 0
    assert ways.told(kernels) == []


def test_a_choice_of_a_process_with_tiles_disturbs_none_without() -> None:
    choices = [ways.Choice("int4/32", 1, "byte tiles", "byte tiles")]
    without = kernels_with()
    before = dict(without.table)
    ways.apply(without, choices)
    assert without.table == before
    assert not ways.has_several(without)
    assert ways.has_several(kernels_with(4))


def test_one_slow_turn_does_not_decide() -> None:
    kernels = kernels_with(0)
    calls = 0

    def prepare(format: int, rows: int) -> Callable[[], object]:
        call = kernels.prepare(format, rows)

        def disturbed() -> None:
            nonlocal calls
            calls += 1
            call()
            if calls % 4 == 0:
                kernels.now += 1.0

        return disturbed

    (first, second, *_) = ways.measure(kernels, prepare, lambda: kernels.now)
    assert (first.way, second.way) == ("fours", "byte tiles")


def test_what_was_never_measured_is_refused() -> None:
    kernels = kernels_with(4)
    for choice in (
        ways.Choice("int5", 1, "fours", "fours"),
        ways.Choice("int4/32", 3, "fours", "fours"),
        ways.Choice("int4/32", 1, "eights", "fours"),
    ):
        with pytest.raises(ValueError):
            ways.apply(kernels, [choice])


def test_a_build_keeps_its_choice(kernel_cache: KernelCache) -> None:
    serving, library = kernel_cache.build()
    manifest = json.loads((kernel_cache.directory() / "manifest.json").read_text())
    kept = [ways.Choice(**each) for each in manifest["ways"]]
    several = [i for i in range(len(ways.FORMATS)) if len(library.ways.available(i)) > 1]
    assert bool(several) == (serving == "amx")
    assert len(kept) == len(several) * len(ways.ROWS)
    for choice in kept:
        number = [str(each) for each in ways.FORMATS].index(choice.format)
        for first in ways.FIRST_ROWS:
            if ways.FIRST_ROWS.index(first) == ways.ROWS.index(choice.rows):
                assert library.ways.chosen(number, first, False) == ways.WAYS.index(choice.way)
                assert library.ways.chosen(number, first, True) == ways.WAYS.index(choice.same_bits)


def test_every_format_is_what_its_name_says(library: KernelLibrary) -> None:
    """The kernels take what is timed; a class begins and ends where the library has it."""
    prepare = timed_calls(library.streamed_linear)
    for number in range(len(ways.FORMATS)):
        prepare(number, 3)()
        available = library.ways.available(number)
        assert available[0] == 0
        for rows_class, first in enumerate(ways.FIRST_ROWS):
            usual = [library.ways.chosen(number, first, bits) for bits in (False, True)]
            last = [*(each - 1 for each in ways.FIRST_ROWS[1:]), 1 << 20][rows_class]
            for way in available:
                library.ways.choose(number, rows_class, False, way)
                assert library.ways.chosen(number, first, False) == way
                assert library.ways.chosen(number, last, False) == way
            library.ways.choose(number, rows_class, False, usual[0])
            assert library.ways.chosen(number, first, True) == usual[1]
            assert first <= ways.ROWS[rows_class] <= last
    with pytest.raises(ValueError, match="no format"):
        library.ways.available(len(ways.FORMATS))
    with pytest.raises(ValueError, match="no way"):
        library.ways.choose(0, 0, True, BFLOAT16)
