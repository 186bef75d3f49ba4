"""On which CPUs the event loop and the thread that computes steps run."""

from __future__ import annotations

import ctypes
from pathlib import Path


class Places:
    """Has the device thread leave the event loop's CPU, if they meet there again and again.

    A step's end wakes the loop, and a system may let it run where the step was computed, which then
    stands still meanwhile. Only on Linux; elsewhere nothing happens.

    Parameters
    ----------
    library
        File of the kernel library, `pool.cpp`.

    Attributes
    ----------
    loop_is_here
        Called by the event loop.
    """

    def __init__(self, library: Path) -> None:
        # To release the interpreter lock would take longer than these two.
        quick = ctypes.PyDLL(str(library))
        self.loop_is_here = quick.slipstream_loop_is_here
        self._meets_loop = quick.slipstream_meets_loop
        self._move = ctypes.CDLL(str(library)).slipstream_change_cpu
        for function in (self.loop_is_here, self._move):
            function.argtypes, function.restype = (), None
        self._meets_loop.argtypes, self._meets_loop.restype = (), ctypes.c_int

    def leave_loop(self) -> bool:
        """Called by the device thread before a step: move, after three meetings in a row.

        Not twice within 2 ms. The CPUs that the thread may use are the same afterwards as before.
        """
        if not self._meets_loop():
            return False
        self._move()
        return True
