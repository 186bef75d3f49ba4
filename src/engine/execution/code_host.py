"""The code that steps run: compiled code is tried and swapped in, and steps are captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from src.compile import LoadedFunction
from src.compile.graphs import CaptureBackend, PaddingLadder
from src.core.collector import thaw_collector
from src.engine.devices import Device
from src.engine.devices.device_thread import DeviceThread
from src.engine.execution.forward_pass import Code, WorkerClosedError
from src.engine.execution.graphs import GraphPool, GraphStats
from src.engine.execution.step_computer import StepComputer
from src.engine.execution.warm_up import KERNEL_WARM_UP_TOKENS
from src.ops.runtime.compiled import Caller
from src.ops.runtime.step import CompiledStep

# More than one, so that the compiler takes no size for a constant. Few, since every start pays.
_WARM_UP_TOKENS = 8
MOST_WARM_UP_TOKENS = max(_WARM_UP_TOKENS, *KERNEL_WARM_UP_TOKENS)
"""The most tokens of a warm-up step, unless a step may have more."""


class CodeHost:
    """Gives a worker's steps their code, while steps go on.

    Parameters
    ----------
    computer
        Whose ``code`` and ``graphs`` are set here.
    new_pool
        Makes an empty pool of captured steps of some code, on the device thread.
    captured
        Called on the device thread once the first steps have been captured.
    use_threads
        Sets the calling thread's number of compute threads to that of a step.

    Attributes
    ----------
    compiled
        Whether compiled code is in use.
    compile_seconds
        Seconds that compilation took; 0 before it has ended.
    """

    def __init__(
        self,
        device: Device,
        device_thread: DeviceThread,
        computer: StepComputer,
        new_pool: Callable[[CaptureBackend, PaddingLadder, Code], GraphPool],
        captured: Callable[[], None],
        use_threads: Callable[[], None],
    ) -> None:
        self._device = device
        self._device_thread = device_thread
        self._computer = computer
        self._new_pool = new_pool
        self._captured = captured
        self._use_threads = use_threads
        self.compiled = False
        self.compile_seconds = 0.0

    @property
    def num_graphs(self) -> int:
        """Number of compiled graphs in use. A graph that several layers share counts once."""
        made = (getattr(each, "artifact", None) for each in self._computer.code.functions)
        return len({artifact for artifact in made if artifact is not None})

    @property
    def graph_stats(self) -> GraphStats:
        """Counters of captured steps."""
        return GraphStats() if self._computer.graphs is None else self._computer.graphs.stats

    def swap_in(self, code: Code, seconds: float | None = None) -> None:
        """Try compiled code on padding, then use it from the next step on.

        Blocks. Call it on a separate thread while steps go on with the previous code. The padding
        writes neither KV memory nor rows, so it disturbs no step. Code that is compiled at its
        first call is compiled here.

        Parameters
        ----------
        seconds
            Seconds that its compilation took before this call.
        """
        # Code that is compiled here is made for the calling thread's number of threads.
        self._use_threads()
        started = time.monotonic()
        with torch.inference_mode():
            self._computer.try_out(code, _WARM_UP_TOKENS)
        self._device.synchronize()
        assert self._computer.graphs is None, "graphs were captured of other code"
        self._computer.code = code
        self.compile_seconds = (seconds or 0.0) + time.monotonic() - started
        self.compiled = True

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Compile every kernel that a step may launch, by steps of so many tokens. Blocks.

        See `warm_up_tokens`.
        """

        def run() -> None:
            with torch.inference_mode(), self._device.stream():
                for num_tokens in sizes:
                    self._computer.warm_up(num_tokens)
            self._device.synchronize()

        self._device_thread.call(run).result()

    def compiled_step(
        self, caller: Caller, functions: Sequence[LoadedFunction], variant: int = 0
    ) -> CompiledStep | None:
        """A step in one call; ``None`` if the kernel library does not support the program."""
        return self._computer.compiled_step(caller, functions, variant)

    def capture_graphs(
        self, backend: CaptureBackend, ladder: PaddingLadder, *, everything: bool
    ) -> None:
        """Capture steps of the code in use, and replay them from the next step on. Blocks.

        Without ``everything`` only the shapes of small batches are captured now, between two steps;
        `next_capture` gives the others. No other code may be swapped in after this.

        Raises
        ------
        WorkerClosedError
            The worker was closed meanwhile.
        """

        def begin() -> None:
            # The pool's buffers are zeroed on the stream on which graphs read them.
            with torch.inference_mode(), self._device.stream():
                graphs = self._new_pool(backend, ladder, self._computer.code)
                if everything:
                    graphs.capture_all()
                else:
                    graphs.capture_first()
            self._computer.graphs = graphs
            self._captured()

        try:
            begun = self._device_thread.call(begin)
        except RuntimeError:
            raise WorkerClosedError("the worker was closed") from None
        begun.result()

    def next_capture(self) -> Callable[[], None] | None:
        """What captures the next shape; ``None`` if all are captured, or none are to be."""
        graphs = self._computer.graphs
        return None if graphs is None or graphs.is_complete else graphs.capture_next

    def close(self) -> None:
        """Release captured steps and code, behind the last step."""
        if self._computer.graphs is not None:
            self._computer.graphs = None
            thaw_collector()
        del self._computer, self._new_pool
