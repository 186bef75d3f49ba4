"""Gets a model's regions compiled while the engine starts and serves, and swaps them in.

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
)
from src.core.errors import forget_locals
from src.core.start_timeline import StartTimeline
from src.engine.execution.forward_pass import Code
from src.engine.execution.worker import MOST_WARM_UP_TOKENS, Worker
from src.models import Decoder, Regions
from src.models.regions import TOKEN_ARGUMENTS
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


class RegionCompilation:
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
        Whether compiled code takes weights in strips, see `Decoder.lay_out`; then those of the
        model are laid out before it serves.
    """

    def __init__(
        self,
        outline: Decoder | None,
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
        # What is compiled just in time, and the seconds that it took.
        self._regions: Future[tuple[list[CompiledFunction], float]] | None = None
        self._called: list[int] = []
        self._num_threads = num_threads
        # What is laid out is what compiled code was made for: whether the head is the embedding may
        # be known from the weights alone, and then it stays in rows.
        self._in_strips = in_strips and outline is not None and outline.spec.dtype == torch.bfloat16
        self._lays_out_head = outline is not None and outline.head is not outline.embedding
        if outline is not None:
            self._begin()
            jobs = []
            if self._in_strips:
                deque(outline.lay_out(), maxlen=0)
            arguments = outline.region_arguments(_NUM_TOKENS)
            functions: tuple[Callable[..., Any], ...] = outline.regions
            for i, (function, given) in enumerate(zip(functions, arguments, strict=True)):
                if given is not None:
                    self._called.append(i)
                    jobs.append(Job.of(function, given, TOKEN_ARGUMENTS[i]))
            self._ahead = (
                Compilation(jobs, root, 0)
                if awaited
                else Compilation(jobs, root, _NICENESS, HEAD_START)
            )

    def finish(self, worker: Worker, decoder: Decoder) -> None:
        """Wait for the compiled code, and have ``worker`` use it from its next step on. Blocks.

        Whatever goes wrong is logged, and the model goes on uncompiled.
        """
        try:
            if self._ahead is None:
                self._compile_just_in_time(worker, decoder)
            else:
                self._load(self._ahead, worker, decoder)
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

    def begin_just_in_time(self, decoder: Decoder) -> None:
        """Compile in a thread, by calls on ``decoder``, whose weights need not have a value yet.

        Once, and not where code is compiled ahead of time. `finish` tells what goes wrong.
        """
        self._begin()
        regions: Future[tuple[list[CompiledFunction], float]] = Future()

        def run() -> None:
            try:
                compiled = self._compiled(decoder)
                regions.set_result((compiled, time.monotonic() - self._started))
            except BaseException as error:
                regions.set_exception(error)

        # No daemon, see `finish_in_background`.
        threading.Thread(target=run, name="slipstream-compile-regions").start()
        self._regions = regions

    def wait_just_in_time(self) -> None:
        """Wait for what `begin_just_in_time` has begun, if it has. Blocks."""
        regions = self._regions
        if regions is not None:
            wait([regions])

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._timeline.begin("compile")

    def finish_in_background(
        self, worker: Worker, decoder: Decoder, then: Callable[[], None] = lambda: None
    ) -> None:
        """As `finish`, in a thread; ``then`` is called there once it is known which code serves."""

        def finish() -> None:
            self.finish(worker, decoder)
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
        self._regions = None

    def _load(self, ahead: Compilation, worker: Worker, decoder: Decoder) -> None:
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
        functions: list[Any] = list(decoder.regions)
        for i, function in zip(self._called, ahead.load(caller), strict=True):
            functions[i] = function
        if self._in_strips:
            left = decoder.lay_out(library.lay_out, includes_head=self._lays_out_head)
            self._lay_out(worker, left)
        regions = Regions(*functions)
        code = Code(regions, worker.compiled_step(caller, regions))
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

    def _compile_just_in_time(self, worker: Worker, decoder: Decoder) -> None:
        if self._regions is None:
            self.begin_just_in_time(decoder)
        regions, self._regions = self._regions, None
        assert regions is not None
        compiled, seconds = regions.result()
        if self._closed.is_set():
            raise CompilationClosedError("closed while compiling")
        worker.swap_in(Code(Regions(*compiled)), seconds)

    def _compiled(self, decoder: Decoder) -> list[CompiledFunction]:
        """The regions, each compiled by a call of its own."""
        # Here and not at the top: it brings the compiler in.
        from src.compile.just_in_time import compile_functions

        if decoder.spec.device.type == "cpu":
            # It generates code for as many threads.
            torch.set_num_threads(self._num_threads)
        most = max(self._most_tokens, MOST_WARM_UP_TOKENS)
        compiled = compile_functions(decoder.regions, TOKEN_ARGUMENTS, most)
        with torch.inference_mode():
            arguments = decoder.region_arguments(_NUM_TOKENS)
            for function, given in zip(compiled, arguments, strict=True):
                if self._closed.is_set():
                    break
                if given is not None:
                    function(*given)
        return compiled
