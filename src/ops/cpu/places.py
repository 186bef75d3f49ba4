"""On which CPUs the event loop and the thread that computes steps run."""

from __future__ import annotations

import ctypes
from pathlib import Path


class Places:
    """Has the device thread leave the event loop's CPU, if they meet there again and again.

    A step's end wakes the loop, and a system may let it run where the step was computed, which then
    stands still meanwhile. The CPUs that a thread may use are the same afterwards as before.

    Parameters
    ----------
    library
        File of the kernel library, `pool.cpp`.

    Attributes
    ----------
    loop_is_here
        Called by the event loop.
    leave_loop
        Called by the device thread before a step: where it was on the loop's CPU at three calls in
        a row, it moves to another one. Only on Linux; elsewhere nothing happens.
    """

    def __init__(self, library: Path) -> None:
        # To release the interpreter lock would take longer than these calls.
        functions = ctypes.PyDLL(str(library))
        self.loop_is_here = functions.slipstream_loop_is_here
        self.leave_loop = functions.slipstream_leave_loop
        for function in (self.loop_is_here, self.leave_loop):
            function.argtypes, function.restype = (), None
