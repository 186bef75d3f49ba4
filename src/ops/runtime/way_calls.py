"""Calls by which a library is asked for its ways of multiplying quantized weights, and told one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any


class LibraryWays:
    """The ways of a library (`ways.h`); numbers are those of `ways`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._ways: Any = library.slipstream_ways
        self._ways.argtypes, self._ways.restype = (ctypes.c_int64,), ctypes.c_int64
        self._way_of: Any = library.slipstream_way_of
        self._way_of.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
        self._way_of.restype = ctypes.c_int64
        self._choose: Any = library.slipstream_choose_way
        self._choose.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
        self._keep: Any = library.slipstream_keep_one_way
        self._keep.argtypes, self._keep.restype = (ctypes.c_int,), None

    def available(self, format: int) -> list[int]:
        """The ways that a format has.

        Raises
        ------
        ValueError
            There is no such format.
        """
        bits = self._ways(format)
        if bits < 0:
            raise ValueError(f"there is no format {format}")
        return [way for way in range(bits.bit_length()) if bits >> way & 1]

    def chosen(self, format: int, rows: int, same_bits: bool) -> int:
        """The way of bfloat16 or (`same_bits`) other rows."""
        return int(self._way_of(format, rows, same_bits))

    def choose(self, format: int, rows_class: int, same_bits: bool, way: int) -> None:
        """Choose a way for a format and a class of numbers of rows, for all calls from now on.

        Raises
        ------
        ValueError
            The library has no such way.
        """
        if not self._choose(format, rows_class, same_bits, way):
            raise ValueError(f"format {format} has no way {way} for rows of class {rows_class}")

    @contextlib.contextmanager
    def keeping_one(self) -> Iterator[None]:
        """Within it, a token's result has the same bits for any number of rows.

        Otherwise it may not: a way with other bits may be faster for many rows, with quantized
        weights and with those of float32. It holds for the whole process, until the last of those
        that asked has ended.
        """
        self._keep(True)
        try:
            yield
        finally:
            self._keep(False)
