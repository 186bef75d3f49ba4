"""Gets a program's calls compiled while the engine starts and serves, and swaps them in.

On the CPU other processes compile, from the configuration alone, so that they need not wait for the
weights. On CUDA this process compiles just in time; where nobody is served before, as soon as there
is room for the weights: calls on what that memory holds leave nothing anywhere but their code.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from src.compile import (
    Compilation,
    CompilationClosedError,
    CompilationError,
    Job,
    without_data,
)
from src.core.errors import forget_locals
from src.core.start_timeline import StartTimeline
from src.engine.execution.forward_pass import Code
from src.engine.execution.worker import MOST_WARM_UP_TOKENS, Worker
from src.models import Call, Model
from src.models.program import run_chain
from src.ops.cpu.build import (
    ensure_built,
    is_building,
    kernel_library,
    kernel_status,
    takes_strips,
)
from src.ops.cpu.compiled import Caller, CompiledCodeError
from src.ops.cpu.kernel_library import KernelLibrary

if TYPE_CHECKING:
    from src.compile.just_in_time import CompiledFunction

logger = logging.getLogger(__name__)

# For the shapes alone: no more is known of the dimension that it stands for.
_NUM_TOKENS = 8
_NICENESS = 10
_POLL = 0.1  # seconds
HEAD_START = 3.0
"""Seconds that weights and the first request have before compilers take processor time.

A model that fits a small machine is ready by then; it took three times as long beside compilers.
"""
_NONE_LEFT = object()


class ProgramCompilation:
    """The compiled code of one engine, on its way.

    Parameters
    ----------
    outline
        The model that will be served, without its weights; on CUDA None, and nothing begins before
        `begin_just_in_time`, or `finish`.
    num_threads
        That kernels compute with.
    root
        Of the caches.
    timeline
        Is told when compilation begins, and when its code serves or it has failed.
    awaited
        Whether nobody is served meanwhile, to whom compilers would have to yield. Otherwise they
        begin a little later, see ``HEAD_START``.
    most_tokens
        Of a step, padding included; what is compiled ahead of time takes any number.
    in_strips
        Whether compiled code takes weights in strips, see `Model.lay_out`; then those of the
        model are laid out before it serves.
    """

    def __init__(
        self,
        outline: Model | None,
        num_threads: int,
        root: Path,
        timeline: StartTimeline,
        *,
        awaited: bool,
        most_tokens: int,
        in_strips: bool = False,
    ) -> None:
        self._timeline = timeline
        self._most_tokens = most_tokens
        self._started = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._ahead: Compilation | None = None
        # What is compiled just in time, per call of the program, and the seconds that it took.
        self._just_in_time: Future[tuple[list[CompiledFunction], float]] | None = None
        # Per call of the program, the number of its job.
        self._jobs_of_calls: list[int] = []
        self._num_threads = num_threads
        # What is laid out is what compiled code was made for: whether the head is the embedding may
        # be known from the weights alone, and then it stays in rows.
        self._in_strips = in_strips and outline is not None and outline.spec.dtype == torch.bfloat16
        self._lays_out_head = outline is not None and not outline.aliases
        if outline is not None:
            self._begin()
            if self._in_strips:
                deque(outline.lay_out(), maxlen=0)
            self._jobs_of_calls = _numbers(_alike(outline))
            jobs = [
                Job.of(
                    run_chain,
                    outline.call_arguments(calls[0], _NUM_TOKENS),
                    _token_arguments(calls[0]),
                    calls[0].chain.functions,
                )
                for calls in _alike(outline)
            ]
            self._ahead = (
                Compilation(jobs, root, 0)
                if awaited
                else Compilation(jobs, root, _NICENESS, HEAD_START)
            )

    def finish(self, worker: Worker, model: Model) -> None:
        """Wait for the compiled code, and have ``worker`` use it from its next step on. Blocks.

        Whatever goes wrong is logged, and the model goes on uncompiled.
        """
        try:
            if self._ahead is None:
                self._compile_just_in_time(worker, model)
            else:
                self._load(self._ahead, worker, model)
        except CompilationClosedError:
            logger.debug("closed while compiling")
        except (CompilationError, CompiledCodeError) as error:
            logger.error("the model goes on uncompiled: %s", error)
            self._timeline.end("compile", error)
            forget_locals(error)
        except Exception as error:
            # Whatever a compiler says that the end of the process has overtaken is of no interest.
            if not self._closed.is_set() and threading.main_thread().is_alive():
                logger.exception("compilation failed: the model goes on uncompiled")
                self._timeline.end("compile", error)
            forget_locals(error)
        else:
            self._timeline.end("compile")
            logger.info("compiled in %.1f s", worker.compile_seconds)

    def begin_just_in_time(self, model: Model) -> None:
        """Compile in a thread, by calls on ``model``, whose weights need not have a value yet.

        Once, and not where code is compiled ahead of time. `finish` tells what goes wrong.
        """
        self._begin()
        regions: Future[tuple[list[CompiledFunction], float]] = Future()

        def run() -> None:
            try:
                compiled = self._compiled(model)
                regions.set_result((compiled, time.monotonic() - self._started))
            except BaseException as error:
                regions.set_exception(error)

        # No daemon, see `finish_in_background`.
        threading.Thread(target=run, name="slipstream-compile-regions").start()
        self._just_in_time = regions

    def wait_just_in_time(self) -> None:
        """Wait for what `begin_just_in_time` has begun, if it has. Blocks."""
        regions = self._just_in_time
        if regions is not None:
            wait([regions])

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._timeline.begin("compile")

    def finish_in_background(
        self, worker: Worker, model: Model, then: Callable[[], None] = lambda: None
    ) -> None:
        """As `finish`, in a thread; ``then`` is called there once it is known which code serves."""

        def finish() -> None:
            self.finish(worker, model)
            if not self._closed.is_set():
                then()

        self._thread = threading.Thread(
            target=finish,
            name="slipstream-compile",
            # One that waits for other processes may be left behind. One that compiles may not: a
            # process that ends in the middle of generated code is aborted by the C++ runtime.
            daemon=self._ahead is not None,
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread of `finish_in_background`. Blocks."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop; processes are killed. Blocks for steps that are launched, and one trial of code.

        What compiles just in time goes on to the end of the region that it is in, for which this
        waits: the model is its until then.
        """
        self._closed.set()
        if self._ahead is not None:
            self._ahead.close()
        self.join()
        self.wait_just_in_time()
        self._just_in_time = None

    def _load(self, ahead: Compilation, worker: Worker, model: Model) -> None:
        try:
            library = self._library()
            if self._in_strips and not takes_strips():
                raise CompilationError(
                    f"it is compiled for weights in strips, which {kernel_status()} does not take"
                )
            caller = Caller(library.path, self._num_threads)
        except (CompilationError, CompiledCodeError):
            ahead.close()
            raise
        loaded = ahead.load(caller)
        if self._in_strips:
            left = model.lay_out(library.lay_out, includes_head=self._lays_out_head)
            self._lay_out(worker, left)
        functions = [loaded[number] for number in self._jobs_of_calls]
        code = Code(functions, worker.compiled_step(caller, functions))
        if self._closed.is_set():
            raise CompilationClosedError("closed while loading compiled code")
        worker.swap_in(code, time.monotonic() - self._started)

    def _lay_out(self, worker: Worker, matrices: Iterator[None]) -> None:
        """One matrix after another, between steps."""
        started = time.monotonic()
        is_done = False
        while not is_done:
            try:
                laid_out = worker.call(lambda: next(matrices, _NONE_LEFT))
            except RuntimeError:
                raise CompilationClosedError("the worker was closed") from None
            is_done = laid_out.result() is _NONE_LEFT
            if self._closed.is_set():
                raise CompilationClosedError("closed while laying weights out")
        logger.info("weights laid out in strips in %.2f s", time.monotonic() - started)

    def _library(self) -> KernelLibrary:
        """The compiled CPU kernels, which compiled code calls."""
        while ensure_built(wait=False) == "reference" and is_building():
            if self._closed.wait(_POLL):
                raise CompilationClosedError("closed while building the CPU kernels")
        library = kernel_library()
        if library is None:
            raise CompilationError("compiled code needs the compiled CPU kernels")
        return library

    def _compile_just_in_time(self, worker: Worker, model: Model) -> None:
        if self._just_in_time is None:
            self.begin_just_in_time(model)
        regions, self._just_in_time = self._just_in_time, None
        assert regions is not None
        compiled, seconds = regions.result()
        if self._closed.is_set():
            raise CompilationClosedError("closed while compiling")
        worker.swap_in(Code(compiled), seconds)

    def _compiled(self, model: Model) -> list[CompiledFunction]:
        """Per call of the program its function: one for all that are alike, each compiled once."""
        # Here and not at the top: it brings the compiler in.
        from src.compile.just_in_time import CompiledFunction

        if model.spec.device.type == "cpu":
            # It generates code for as many threads.
            torch.set_num_threads(self._num_threads)
        most = max(self._most_tokens, MOST_WARM_UP_TOKENS)
        alike = _alike(model)
        compiled = [
            CompiledFunction(run_chain, _token_arguments(calls[0]), most) for calls in alike
        ]
        with torch.inference_mode():
            for function, calls in zip(compiled, alike, strict=True):
                if self._closed.is_set():
                    break
                function(*model.call_arguments(calls[0], _NUM_TOKENS))
        return [compiled[number] for number in _numbers(alike)]


def _alike(model: Model) -> list[list[Call]]:
    """The calls of a program, by what code for them depends on: chain, and shapes of weights."""
    groups: dict[Any, list[Call]] = {}
    for call in model.program.calls:
        key = (call.chain, without_data(model.bound[call.slot]))
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _numbers(alike: list[list[Call]]) -> list[int]:
    """Per call, by its slot, the number of its group."""
    of_slot = {call.slot: number for number, calls in enumerate(alike) for call in calls}
    return [of_slot[slot] for slot in range(len(of_slot))]


def _token_arguments(call: Call) -> tuple[int, ...]:
    """Positions of `run_chain`'s arguments that count tokens."""
    return tuple(range(2, 2 + len(call.chain.reads)))
