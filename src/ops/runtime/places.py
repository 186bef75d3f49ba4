"""Keeps the event loop and the thread that computes steps on different CPUs."""

from __future__ import annotations

import ctypes
from pathlib import Path


class Places:
    """Moves the device thread off the event loop's CPU if they meet there repeatedly.

    The end of a step wakes the event loop. The system may run it on the CPU that computed the step,
    which delays the next one. Does nothing except on Linux.

    Parameters
    ----------
    library
        File of the kernel library (`pool.cpp`).

    Attributes
    ----------
    loop_is_here
        To be called by the event loop.
    """

    def __init__(self, library: Path) -> None:
        # Releasing the GIL would take longer than these two calls.
        quick = ctypes.PyDLL(str(library))
        self.loop_is_here = quick.slipstream_loop_is_here
        self._meets_loop = quick.slipstream_meets_loop
        self._move = ctypes.CDLL(str(library)).slipstream_change_cpu
        for function in (self.loop_is_here, self._move):
            function.argtypes, function.restype = (), None
        self._meets_loop.argtypes, self._meets_loop.restype = (), ctypes.c_int

    def leave_loop(self) -> bool:
        """Call on the device thread before a step: moves it after three meetings in a row.

        It moves at most once per 2 ms. Afterwards the thread's CPU affinity is the same as before.
        """
        if not self._meets_loop():
            return False
        self._move()
        return True
