"""Compiles a program's calls while the engine starts and serves, and swaps the code in.

On the CPU other processes compile. They need the configuration only, so they do not wait for the
weights. On CUDA this process compiles just in time. If requests wait for compiled code anyway, it
begins as soon as memory for the weights is allocated: the calls that compile use whatever values
that memory holds, and have no effect besides the code.
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
from src.compile.job import flatten, is_tensor, repeats
from src.core.errors import forget_locals
from src.core.start_timeline import StartTimeline
from src.engine.execution.code_host import MOST_WARM_UP_TOKENS
from src.engine.execution.forward_pass import Code
from src.engine.execution.worker import Worker
from src.models import Call, Model
from src.models.model import Variant
from src.models.program import run_chain
from src.ops.build.kernels import (
    ensure_built,
    is_building,
    kernel_library,
    kernel_status,
    takes_strips,
)
from src.ops.runtime.compiled import Caller, CompiledCodeError
from src.ops.runtime.kernel_library import KernelLibrary

if TYPE_CHECKING:
    from src.compile.just_in_time import CompiledFunction

logger = logging.getLogger(__name__)

# An example number of tokens; compiled code takes any number.
_NUM_TOKENS = 8
# The same for just-in-time compilation, which times candidates of a kernel on these tokens: as many
# as a short prompt has.
_TIMED_TOKENS = 256
_NICENESS = 10
_POLL = 0.1  # seconds
HEAD_START = 3.0
"""Seconds before compilers start, so that weights and the first request have the CPU first.

A small model is ready by then. Beside running compilers its start took three times as long.
"""
_NONE_LEFT = object()
_DECIDE = (
    "values decided how weights are held: columns of different orders are decoded, and offsets "
    "that are all zero are left out"
)


class ProgramCompilation:
    """The compilation of one engine's program.

    Parameters
    ----------
    outline
        The model that will be served, without its weights. On CUDA None; then nothing is compiled
        before `begin_just_in_time` or `finish`.
    num_threads
        Threads that kernels compute with.
    root
        Directory of the caches.
    timeline
        Records when compilation begins, and when its code is in use or it has failed.
    awaited
        Whether no request is served before compilation ends. Otherwise compilers run at low
        priority and begin later, see ``HEAD_START``, and none times candidates of a kernel beside
        served steps.
    most_tokens
        The most tokens of a step, padding included, for just-in-time compilation. Code that is
        compiled ahead of time takes any number.
    in_strips
        Whether compiled code takes weights in strips, see `Model.lay_out`. If so, the model's
        weights are laid out before the code is used.
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
        self._is_awaited = awaited
        self._started = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._ahead: Compilation | None = None
        # The compiled functions, one per variant of the program and call of it, and the seconds
        # that it took.
        self._just_in_time: Future[tuple[list[list[CompiledFunction]], float]] | None = None
        # See `_forms`: what these functions are compiled for.
        self._forms: list[Any] = []
        # Per variant of the program, and call of it: the index of its job.
        self._jobs_of_calls: list[list[int]] = []
        self._num_threads = num_threads
        # The layout must match the one that the code is compiled for. Where only the weights tell
        # whether the head is tied to the embedding, the head keeps its row layout.
        self._in_strips = in_strips and outline is not None and outline.spec.dtype == torch.bfloat16
        self._lays_out_head = outline is not None and not outline.aliases
        if outline is not None:
            self._begin()
            self._forms = _forms(outline)
            if self._in_strips:
                deque(outline.lay_out(), maxlen=0)
            kinds = _alike(outline)
            self._jobs_of_calls = _numbers(kinds)
            jobs = [
                Job.of(
                    run_chain,
                    outline.call_arguments(call, _NUM_TOKENS, variant),
                    _token_arguments(call),
                    call.chain.functions,
                )
                for (variant, call), *_ in kinds
            ]
            self._ahead = (
                Compilation(jobs, root, 0)
                if awaited
                else Compilation(jobs, root, _NICENESS, HEAD_START)
            )

    def finish(self, worker: Worker, model: Model) -> None:
        """Wait for the compiled code, and let ``worker`` use it from its next step on. Blocks.

        Every error is logged, and the model goes on uncompiled.
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
            # Errors of a compiler that was interrupted by the end of the process are not reported.
            if not self._closed.is_set() and threading.main_thread().is_alive():
                logger.exception("compilation failed: the model goes on uncompiled")
                self._timeline.end("compile", error)
            forget_locals(error)
        else:
            self._timeline.end("compile")
            logger.info("compiled in %.1f s", worker.code.compile_seconds)

    def begin_just_in_time(self, model: Model) -> None:
        """Compile in a thread, by calls on ``model``. Its weights may be uninitialized.

        Call it once, and never where code is compiled ahead of time. `finish` reports errors.
        """
        self._begin()
        regions: Future[tuple[list[list[CompiledFunction]], float]] = Future()

        def run() -> None:
            try:
                compiled = self._compiled(model)
                regions.set_result((compiled, time.monotonic() - self._started))
            except BaseException as error:
                regions.set_exception(error)

        # Not a daemon thread, see `finish_in_background`.
        threading.Thread(target=run, name="slipstream-compile-regions").start()
        self._just_in_time = regions

    def wait_just_in_time(self, model: Model | None = None) -> None:
        """Wait until just-in-time compilation has ended, if it was begun. Blocks.

        What was compiled before the weights of ``model`` were read is compiled once more if their
        values decided how they are held.
        """
        regions = self._just_in_time
        if regions is None:
            return
        wait([regions])
        is_done = not self._closed.is_set() and regions.exception() is None
        if model is not None and is_done and _forms(model) != self._forms:
            logger.info("compiling once more, since %s", _DECIDE)
            self.begin_just_in_time(model)
            self.wait_just_in_time()

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._timeline.begin("compile")

    def finish_in_background(
        self, worker: Worker, model: Model, then: Callable[[], None] = lambda: None
    ) -> None:
        """Run `finish` in a thread, and call ``then`` there, unless this was closed meanwhile."""

        def finish() -> None:
            self.finish(worker, model)
            if not self._closed.is_set():
                then()

        self._thread = threading.Thread(
            target=finish,
            name="slipstream-compile",
            # A thread that waits for other processes may be abandoned at exit. A thread that
            # compiles may not: the C++ runtime aborts a process that exits in generated code.
            daemon=self._ahead is not None,
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread of `finish_in_background`. Blocks."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop, and kill compiler processes. Blocks for launched steps and one trial of code.

        Just-in-time compilation uses the model until the end of its current function. This waits
        for that.
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
            if _forms(model) != self._forms:
                raise CompilationError(f"compilers begin before weights are read, and {_DECIDE}")
            caller = Caller(library.path, self._num_threads)
        except (CompilationError, CompiledCodeError):
            ahead.close()
            raise
        loaded = ahead.load(caller)
        if self._in_strips:
            left = model.lay_out(library.lay_out, includes_head=self._lays_out_head)
            self._lay_out(worker, left)
        codes = []
        for number, jobs in enumerate(self._jobs_of_calls):
            functions = [loaded[job] for job in jobs]
            codes.append(Code(functions, worker.code.compiled_step(caller, functions, number)))
        code = Code.of_variants(codes)
        if self._closed.is_set():
            raise CompilationClosedError("closed while loading compiled code")
        worker.code.swap_in(code, time.monotonic() - self._started)

    def _lay_out(self, worker: Worker, matrices: Iterator[None]) -> None:
        """Lay out the matrices on the device thread, one between any two steps."""
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
        worker.code.swap_in(Code.of_variants([Code(functions) for functions in compiled]), seconds)

    def _compiled(self, model: Model) -> list[list[CompiledFunction]]:
        """Per variant of the program the function of each call; calls that are alike share one."""
        # Imported here because it loads torch's compiler.
        from src.compile.just_in_time import CompiledFunction

        if model.spec.device.type == "cpu":
            # The compiler generates code for this number of threads.
            torch.set_num_threads(self._num_threads)
        most = max(self._most_tokens, MOST_WARM_UP_TOKENS)
        # First: a weight that changes meanwhile is another one than these say.
        self._forms = _forms(model)
        alike = _alike(model)
        compiled = [
            CompiledFunction(run_chain, _token_arguments(calls[0][1]), most, times=self._is_awaited)
            for calls in alike
        ]
        with torch.inference_mode():
            for function, ((variant, call), *_) in zip(compiled, alike, strict=True):
                if self._closed.is_set():
                    break
                function(*model.call_arguments(call, min(_TIMED_TOKENS, most), variant))
        return [[compiled[number] for number in numbers] for numbers in _numbers(alike)]


def _alike(model: Model) -> list[list[tuple[Variant, Call]]]:
    """Groups of calls that can share code: equal chain, and equal shapes of weights.

    A weight that comes twice must do so in all of them.
    """
    groups: dict[Any, list[tuple[Variant, Call]]] = {}
    for variant in model.variants:
        for call in variant.program.calls:
            groups.setdefault(_form(variant, call), []).append((variant, call))
    return list(groups.values())


def _form(variant: Variant, call: Call) -> Any:
    """What code depends on in a call: its chain, and the shapes and encodings of its weights."""
    weights = variant.bound[call.slot]
    return call.chain, without_data(weights), repeats(tuple(flatten(weights, is_tensor)))


def _forms(model: Model) -> list[Any]:
    """The form of each call, which a weight's value may change while weights are read."""
    return [_form(variant, call) for variant in model.variants for call in variant.program.calls]


def _numbers(alike: list[list[tuple[Variant, Call]]]) -> list[list[int]]:
    """Per variant the group's index of each call, in the order of their slots."""
    found: dict[int, dict[int, int]] = {}
    for number, calls in enumerate(alike):
        for variant, call in calls:
            found.setdefault(variant.number, {})[call.slot] = number
    return [[of_slot[slot] for slot in range(len(of_slot))] for _, of_slot in sorted(found.items())]


def _token_arguments(call: Call) -> tuple[int, ...]:
    """Indices of `run_chain`'s arguments whose first dimension is tokens."""
    return tuple(range(2, 2 + len(call.chain.reads)))
