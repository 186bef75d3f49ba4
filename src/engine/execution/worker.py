"""Runs planned steps on the device, one after the other, in order.

Steps are launched by one *device thread*. On the CPU it computes them; on an accelerator it only
enqueues them (`devices`). Either way the event loop never waits for the device, and step N+1 is
queued behind step N before the host has seen step N's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from src.compile import LoadedFunction
from src.compile.graphs import CaptureBackend, PaddingLadder
from src.core.collector import thaw_collector
from src.core.errors import EngineDeadError
from src.core.plan import RowResult, StepPlan, StepResult, StepTimes
from src.core.step_message import StepMessage
from src.engine.devices import Device, StepSpan
from src.engine.devices.device_thread import DeviceThread
from src.engine.execution.forward_pass import Code, ForwardPass, WorkerClosedError
from src.engine.execution.graphs import GraphPool, GraphStats
from src.engine.execution.held_adapters import HeldAdapters
from src.engine.execution.in_flight import InFlight
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.page_prefault import PagePrefault
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.execution.step_results import StepResults
from src.engine.execution.warm_up import KERNEL_WARM_UP_TOKENS, warm_up_tokens
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler
from src.engine.sampling.prompt_logprobs import are_sound
from src.models import ServedModel
from src.models.adapters.reader import AdapterWeights
from src.ops.cpu.build import is_building, is_compiling, kernel_library
from src.ops.cpu.calls import use_threads
from src.ops.cpu.compiled import Caller
from src.ops.cpu.places import Places
from src.ops.cpu.step import CompiledStep
from src.ops.declaration import Backend
from src.text.thinking import ThinkingGuide

logger = logging.getLogger(__name__)

T = TypeVar("T")

# More than one, so that the compiler takes no size for a constant. Few, since every start pays.
_WARM_UP_TOKENS = 8
MOST_WARM_UP_TOKENS = max(_WARM_UP_TOKENS, *KERNEL_WARM_UP_TOKENS)
"""The most tokens of a warm-up step, unless a step may have more."""
# Seconds without a step after which the device thread does idle work.
_IDLE_SECONDS = 0.05


class DeviceLostError(EngineDeadError):
    """The device is in a state from which only a restart helps."""


class Worker:
    """The only owner of the device: streams, threads, rows and KV memory.

    Parameters
    ----------
    code
        The code to begin with.
    device
        Closed with the worker.
    num_threads
        Threads that kernels compute with on the host.
    attention
        See :class:`ForwardPass`.
    """

    def __init__(
        self,
        device: Device,
        model: ServedModel,
        code: Code,
        kv_cache: KVCache,
        rows: RowState,
        sampler: Sampler,
        *,
        num_threads: int,
        attention: Backend | None = None,
    ) -> None:
        self._device = device
        self._forward_pass = ForwardPass(model, kv_cache, attention)
        for number, owner in self._forward_pass.owners.items():
            layers = len(owner.group.layers)
            logger.info("attention: %s computes group %d, %d layers", owner.name, number, layers)
        for reason in self._forward_pass.passed_over:
            logger.info("attention: %s", reason)
        self._memory = PagePrefault(kv_cache) if device.is_host else None
        self._rows = rows
        self._sampler = sampler
        vocab_size = model.spec.vocab_size
        self._grammars = RowGrammars(rows.padding_row, vocab_size, on_cpu=device.is_host)
        self._adapters = HeldAdapters(model.adapters)
        self._row_owners = RowOwners(rows, sampler, self._grammars, vocab_size, self._adapters)
        unscored = self._row_owners.unscored
        self._computer = StepComputer(
            self._forward_pass, code, rows, sampler, self._grammars, unscored
        )
        self._num_threads = num_threads
        # Whether CPU kernels may still be building. Used by the device thread only.
        self._awaits_kernels = True
        self.compiled = False
        # Seconds that compilation took; 0 before it has ended.
        self.compile_seconds = 0.0
        self._closing = False
        # Counted on the event loop: all launched steps, and those whose result has not arrived.
        self._num_launched = 0
        self._num_outstanding = 0
        self._awaits_pause = False
        self._arrivals = StepResults(self._arrive)
        # Keeps the device thread off the loop's CPU; set on the host once kernels are built.
        self._places: Places | None = None
        self._device_thread = DeviceThread(self._use_threads)
        # Weights and KV memory were written on other streams than the one of the steps.
        device.synchronize()

    @property
    def is_on_cpu(self) -> bool:
        """Whether steps are computed on the host."""
        return self._device.is_host

    @property
    def num_graphs(self) -> int:
        """Number of compiled graphs in use. A graph that several layers share counts once."""
        made = (getattr(each, "artifact", None) for each in self._computer.code.functions)
        return len({artifact for artifact in made if artifact is not None})

    @property
    def graph_stats(self) -> GraphStats:
        """Counters of captured steps."""
        return GraphStats() if self._computer.graphs is None else self._computer.graphs.stats

    def hold_grammar(self, handle: int, grammar: CompiledGrammar) -> None:
        """Keep the grammar of a request that a message will admit; ``handle`` is the request's key.

        It is released when a message, or :meth:`forget`, says that the request has ended.
        """
        self._grammars.hold(handle, grammar)

    def hold_thinking(self, handle: int, guide: ThinkingGuide) -> None:
        """The same of what ends the request's thinking."""
        self._grammars.hold_thinking(handle, guide)

    def hold_adapter(self, key: int, weights: AdapterWeights) -> None:
        """Keep an adapter that plans may name from now on. Any thread may call this."""
        self._adapters.hold(key, weights)

    def drop_adapter(self, key: int) -> None:
        """Forget an adapter that no later plan names, behind the launched steps."""
        # A worker that is closed at this moment releases everything anyway.
        with contextlib.suppress(RuntimeError):
            self._device_thread.post(partial(self._adapters.drop, key))

    def launch(self, message: StepMessage, then: Callable[[], object]) -> InFlight:
        """Queue a step behind the launched ones; returns at once.

        ``then`` is called on the event loop once the result has arrived.
        """
        self._arrivals.listen(asyncio.get_running_loop())
        if self._places is not None:
            self._places.loop_is_here()
        for key in message.ended:
            self._grammars.abandon(key)
        in_flight = InFlight(message.plan, StepTimes(launched=time.monotonic()), then)
        self._device_thread.post(partial(self._run, in_flight, message))
        self._num_launched += 1
        self._num_outstanding += 1
        return in_flight

    def forget(self, ended: Sequence[int]) -> None:
        """Forget ended requests without a launch; see ``StepMessage.ended``."""
        for key in ended:
            self._grammars.abandon(key)

        def forget() -> None:
            self._row_owners.forget(ended)
            self._grammars.begin()

        # A worker that is closed at this moment releases everything anyway.
        with contextlib.suppress(RuntimeError):
            self._device_thread.post(forget)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the device thread, behind the launched steps."""
        return self._device_thread.call(function)

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

    def warm_up(self, most_tokens: int) -> None:
        """Compile every kernel that a request's step of ``most_tokens`` may launch. Blocks."""
        sizes = warm_up_tokens(self._forward_pass.model, most_tokens)

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

    def _use_threads(self) -> None:
        """Set the calling thread's number of compute threads to that of a step.

        With the CPU kernels torch uses one thread. It computes too little between them for a team,
        whose threads spin while they wait, and so take the event loop's CPU. It also uses one while
        compilers run. Otherwise torch computes everything, with all threads.
        """
        has_kernels = kernel_library() is not None or is_compiling()
        torch.set_num_threads(1 if has_kernels else self._num_threads)
        use_threads(self._num_threads)

    def capture_graphs(
        self, backend: CaptureBackend, ladder: PaddingLadder, *, everything: bool
    ) -> None:
        """Capture steps of the code in use, and replay them from the next step on. Blocks.

        Without ``everything`` only the shapes of small batches are captured now, between two steps,
        and the others one by one while the engine is idle. No other code may be swapped in after
        this.

        Raises
        ------
        WorkerClosedError
            The worker was closed meanwhile.
        """

        def begin() -> None:
            code = self._computer.code
            # The pool's buffers are zeroed on the stream on which graphs read them.
            with torch.inference_mode(), self._device.stream():
                graphs = GraphPool(
                    backend, ladder, self._forward_pass, code, self._rows, self._sampler
                )
                if everything:
                    graphs.capture_all()
                else:
                    graphs.capture_first()
            self._computer.graphs = graphs
            self.use_pauses()

        try:
            begun = self._device_thread.call(begin)
        except RuntimeError:
            raise WorkerClosedError("the worker was closed") from None
        begun.result()

    def use_pauses(self) -> None:
        """Begin the idle work. It stops when a step comes, and goes on when the engine is idle.

        Idle work is capturing the remaining steps, or touching pages of KV memory.
        """
        if self._pause_work() is not None:
            # A worker that is closed at this moment accepts no more work.
            with contextlib.suppress(RuntimeError):
                self._device_thread.post(self._use_pause)

    def _pause_work(self) -> Callable[[], None] | None:
        """The next piece of idle work; ``None`` if there is none, or if a step is outstanding."""
        # A closed worker has released everything that the work needs.
        if self._closing or self._num_outstanding > 0:
            return None
        graphs = self._computer.graphs
        if graphs is not None and not graphs.is_complete:
            return graphs.capture_next
        memory = self._memory
        if memory is not None and not memory.is_complete:
            return memory.take_next
        return None

    def _use_pause(self) -> None:
        """On the device thread: do one piece of idle work and queue the next."""
        work = self._pause_work()
        if work is not None:
            with torch.inference_mode(), self._device.stream():
                work()
            self.use_pauses()

    def _arrive(self, arrival: tuple[InFlight, StepResult | Exception]) -> None:
        """On the event loop: hand over a step's outcome, and watch for an idle time."""
        in_flight, outcome = arrival
        self._num_outstanding -= 1
        try:
            in_flight.arrive(outcome)
        finally:
            self._await_pause()

    def _await_pause(self) -> None:
        if not self._awaits_pause and self._pause_work() is not None:
            self._awaits_pause = True
            loop = asyncio.get_running_loop()
            loop.call_later(_IDLE_SECONDS, self._look_for_pause, self._num_launched)

    def _look_for_pause(self, num_launched: int) -> None:
        """Begin idle work, unless more than ``num_launched`` steps have been launched by now."""
        self._awaits_pause = False
        # No outstanding step at this moment is not enough: that is so between any two steps.
        if self._num_launched == num_launched:
            self.use_pauses()
        else:
            self._await_pause()

    def close(self) -> None:
        """Let the launched steps end, stop the threads, and release the model. Blocks.

        A thread that compiles code by its first call ends with the function that it is compiling.
        An error or a request that still refers to this worker does not keep weights and KV memory.
        """
        if self._closing:
            return
        self._closing = True
        try:
            self._device_thread.close()
            self._device.close()
            self._arrivals.close()
            self._grammars.close()
            self._forward_pass.stop()
        finally:
            if self._computer.graphs is not None:
                self._computer.graphs = None
                thaw_collector()
            del self._computer, self._forward_pass, self._memory
            del self._row_owners, self._rows, self._sampler
            # It stays, because adapters may be loaded and leave at this moment.
            self._adapters.close()

    def _run(self, in_flight: InFlight, message: StepMessage) -> None:
        try:
            with torch.inference_mode(), self._device.stream():
                self._execute(in_flight, message)
        # A library's panic is not an Exception, but it must end the step too, or the loop would
        # wait for the step forever.
        except BaseException as raised:
            error = raised
            if not isinstance(error, Exception):
                error = RuntimeError(repr(raised))
                error.__cause__ = raised
            self._fail(in_flight, self._neutralize(in_flight.plan, error))

    def _neutralize(self, plan: StepPlan, error: Exception) -> Exception:
        """Make the rows of a failed step harmless; returns the error that the step failed with.

        If even that fails, returns :class:`DeviceLostError`.
        """
        try:
            with torch.inference_mode(), self._device.stream():
                self._row_owners.neutralize(plan)
        except Exception as again:
            lost = DeviceLostError(f"the rows of a failed step cannot be written: {again}")
            lost.__cause__ = error
            return lost
        return error

    def _execute(self, in_flight: InFlight, message: StepMessage) -> None:
        if self._awaits_kernels:
            self._awaits_kernels = is_building()
            self._use_threads()
            library = kernel_library()
            if library is not None and self._device.is_host:
                self._places = Places(library.path)
        if self._places is not None:
            self._places.leave_loop()
        plan = message.plan
        span = self._device.begin(in_flight.times)
        self._row_owners.meet(message)
        refused = self._row_owners.apply(plan)
        if self._memory is not None:
            self._memory.follow(plan)
        states = self._forward_pass.kv_cache.states
        if states is not None:
            states.begin(plan)
        output = span.copy_out(self._computer.compute(plan, span.computes))
        if states is not None:
            states.end(plan)
        in_flight.holds.append(span)
        self._follow(plan, output, span)
        span.deliver(
            lambda: self._read(plan, output, refused),
            lambda outcome: self._deliver(in_flight, outcome),
        )

    def _follow(self, plan: StepPlan, output: StepOutput, span: StepSpan) -> None:
        """Let the grammars read the step's sampled tokens as soon as these are on the host."""
        samples = output.samples
        if samples is None:
            return

        def read() -> np.ndarray:
            span.wait()
            token_ids: np.ndarray = samples.token_ids.numpy()
            return token_ids

        self._grammars.follow([step.row for step in plan.rows if step.samples], read)

    def _read(
        self, plan: StepPlan, output: StepOutput, refused: Sequence[tuple[int, str]] = ()
    ) -> StepResult:
        """Turn host tensors into a result, rows in the plan's order."""
        samples, scores = output.samples, output.prompt_scores
        unsound = []
        token_ids = iter(samples.token_ids.tolist() if samples else ())
        logprobs = iter(samples.logprob_lists() if samples else ())
        rows = []
        for index, step in enumerate(plan.rows):
            prompt_logprobs = scores.of_row(index) if scores else None
            is_sound = prompt_logprobs is None or are_sound(prompt_logprobs)
            if step.samples:
                scored, token_id = next(logprobs), next(token_ids)
                is_sound = is_sound and token_id >= 0
                rows.append(
                    RowResult(
                        step.row,
                        step.generation,
                        [token_id],
                        None if scored is None else [scored],
                        prompt_logprobs,
                    )
                )
            else:
                rows.append(RowResult(step.row, step.generation, [], None, prompt_logprobs))
            if not is_sound:
                unsound.append(index)
        return StepResult(plan.step_id, rows, output.failures, refused, unsound)

    def _deliver(self, in_flight: InFlight, outcome: StepResult | Exception) -> None:
        if isinstance(outcome, Exception):
            self._fail(in_flight, outcome)
        else:
            self._arrivals.post((in_flight, outcome))

    def _fail(self, in_flight: InFlight, error: Exception) -> None:
        in_flight.times.device_end = time.monotonic()
        failure = self._device.failure()
        if failure is not None:
            lost = DeviceLostError(f"the device failed: {failure}")
            lost.__cause__ = error
            error = lost
        self._arrivals.post((in_flight, error))
