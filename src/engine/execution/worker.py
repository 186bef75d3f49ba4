"""Runs planned steps on the device, in order, one behind the other.

Steps are launched by one *device thread*, which computes them where the host is the device and only
enqueues them elsewhere (`devices`). Either way the event loop never waits for the device, and step
N+1 is queued behind step N before anybody has seen step N's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from src.engine.execution.in_flight import InFlight
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.page_prefault import PagePrefault
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.execution.step_results import StepResults
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler
from src.engine.sampling.prompt_logprobs import are_sound
from src.models import ServedModel
from src.models.program import Function
from src.ops.cpu.build import is_building, is_compiling, kernel_library
from src.ops.cpu.calls import use_threads
from src.ops.cpu.compiled import Caller
from src.ops.cpu.places import Places
from src.ops.cpu.step import CompiledStep
from src.ops.declaration import Backend

T = TypeVar("T")

# More than one, so that nothing is taken for a constant; few, since it costs time at every start.
_WARM_UP_TOKENS = 8
# On a GPU: few, and enough for every kernel that has another form for large steps.
_KERNEL_WARM_UP_TOKENS = (8, 1040)
MOST_WARM_UP_TOKENS = max(_WARM_UP_TOKENS, *_KERNEL_WARM_UP_TOKENS)
"""Of what runs before requests do."""
# Without a step for so long, the device thread may do something else for a moment.
_IDLE_SECONDS = 0.05


class DeviceLostError(EngineDeadError):
    """The device is in a state from which only a restart helps."""


class Worker:
    """The only owner of the device: streams, threads, rows and KV memory.

    Parameters
    ----------
    functions
        What runs the calls of the model's program, compiled or not.
    device
        Closed with the worker.
    num_threads
        That kernels compute with on the host.
    attention
        As of :class:`ForwardPass`.
    """

    def __init__(
        self,
        device: Device,
        model: ServedModel,
        functions: Sequence[Function],
        kv_cache: KVCache,
        rows: RowState,
        sampler: Sampler,
        *,
        num_threads: int,
        attention: Backend | None = None,
    ) -> None:
        self._device = device
        self._forward_pass = ForwardPass(model, kv_cache, attention)
        self._memory = PagePrefault(kv_cache) if device.is_host else None
        self._rows = rows
        self._sampler = sampler
        vocab_size = model.spec.vocab_size
        self._grammars = RowGrammars(rows.padding_row, vocab_size, on_cpu=device.is_host)
        self._row_owners = RowOwners(rows, sampler, self._grammars, vocab_size)
        unscored = self._row_owners.unscored
        self._computer = StepComputer(
            self._forward_pass, Code(functions), rows, sampler, self._grammars, unscored
        )
        self._num_threads = num_threads
        # Of the device thread: what computes a step is not settled.
        self._awaits_kernels = True
        self.compiled = False
        # Seconds that the compilation took, once it has ended.
        self.compile_seconds = 0.0
        self._closing = False
        # Steps, counted by the event loop: all, and those that have not arrived.
        self._num_launched = 0
        self._num_outstanding = 0
        self._awaits_pause = False
        self._arrivals = StepResults(self._arrive)
        # Where the host computes, once there are kernels.
        self._places: Places | None = None
        self._device_thread = DeviceThread(self._use_threads)
        # Weights and KV memory were written on other streams than the steps'.
        device.synchronize()

    @property
    def is_on_cpu(self) -> bool:
        """Whether steps are computed on the host."""
        return self._device.is_host

    @property
    def num_graphs(self) -> int:
        """Compiled graphs that are in use: each counts once, however many layers call it."""
        made = (getattr(each, "artifact", None) for each in self._computer.code.functions)
        return len({artifact for artifact in made if artifact is not None})

    @property
    def graph_stats(self) -> GraphStats:
        """What captured steps did so far."""
        return GraphStats() if self._computer.graphs is None else self._computer.graphs.stats

    def hold_grammar(self, handle: int, grammar: CompiledGrammar) -> None:
        """Keep what a message that admits a request will name by ``handle``, the request's key.

        It is let go of when a message, or :meth:`forget`, says that the request has ended.
        """
        self._grammars.hold(handle, grammar)

    def launch(self, message: StepMessage, then: Callable[[], object]) -> InFlight:
        """Queue a step behind those launched before; returns at once.

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
        """As a launch does with the keys of ``ended``, where there is nothing to launch."""
        for key in ended:
            self._grammars.abandon(key)

        def forget() -> None:
            self._row_owners.forget(ended)
            self._grammars.begin()

        # Closed at this very moment, it lets go of everything.
        with contextlib.suppress(RuntimeError):
            self._device_thread.post(forget)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the device thread, behind the steps that are launched."""
        return self._device_thread.call(function)

    def swap_in(self, code: Code, seconds: float | None = None) -> None:
        """Try compiled code on padding, then use it from the next step on.

        Blocks; meant for a thread of its own while steps go on with the code of before. The padding
        writes neither KV memory nor rows, so it disturbs no step. Code that is compiled at its
        first call is so here.

        Parameters
        ----------
        seconds
            That its compilation took before.
        """
        # What is compiled here is for the number of threads that the calling thread computes with.
        self._use_threads()
        started = time.monotonic()
        with torch.inference_mode():
            self._computer.try_out(code, _WARM_UP_TOKENS)
        self._device.synchronize()
        assert self._computer.graphs is None, "graphs were captured of other code"
        self._computer.code = code
        self.compile_seconds = (seconds or 0.0) + time.monotonic() - started
        self.compiled = True

    def warm_up(self) -> None:
        """Have every kernel compiled that a request's step may launch. Blocks."""

        def run() -> None:
            with torch.inference_mode(), self._device.stream():
                for num_tokens in _KERNEL_WARM_UP_TOKENS:
                    self._computer.warm_up(num_tokens)
            self._device.synchronize()

        self._device_thread.call(run).result()

    def compiled_step(
        self, caller: Caller, functions: Sequence[LoadedFunction]
    ) -> CompiledStep | None:
        """A step in one call of compiled functions; ``None`` if the program has more than that."""
        return self._computer.compiled_step(caller, functions)

    def _use_threads(self) -> None:
        """Have the calling thread compute as a step does.

        What torch computes between the kernels is too little for a team, whose threads spin while
        they wait for each other, and take the event loop's CPU. Where there are no kernels, and no
        compilers that want the CPUs, it computes all.
        """
        has_kernels = kernel_library() is not None or is_compiling()
        torch.set_num_threads(1 if has_kernels else self._num_threads)
        use_threads(self._num_threads)

    def capture_graphs(
        self, backend: CaptureBackend, ladder: PaddingLadder, *, everything: bool
    ) -> None:
        """Capture steps of the code in use, and replay them from the next step on. Blocks.

        Without ``everything`` only the shapes of few users are captured now, between two steps, and
        the others one by one whenever there is nothing to do. No other code may be swapped in after
        this.

        Raises
        ------
        WorkerClosedError
            The worker was closed meanwhile.
        """

        def begin() -> None:
            code = self._computer.code
            # Its buffers too are zeroed in the stream in which graphs read them.
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
        """Begin with what is done while there are no steps, which is begun again after each pause.

        That is capturing the steps that are not captured yet, or taking memory.
        """
        if self._pause_work() is not None:
            # Closed at this very moment, it takes no more.
            with contextlib.suppress(RuntimeError):
                self._device_thread.post(self._use_pause)

    def _pause_work(self) -> Callable[[], None] | None:
        """A piece of what is left to do in pauses; ``None`` as well where somebody would wait."""
        # Closed, it has nothing left to do it with.
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
        """On the device thread: one piece, and then another one, unless a step came meanwhile."""
        work = self._pause_work()
        if work is not None:
            with torch.inference_mode(), self._device.stream():
                work()
            self.use_pauses()

    def _arrive(self, arrival: tuple[InFlight, StepResult | Exception]) -> None:
        """On the event loop: a step has; when none is launched for a while, use that."""
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
        """Use it, unless a step was launched after the first ``num_launched`` of them."""
        self._awaits_pause = False
        # That nothing is outstanding at this moment says little: so it is between any two steps.
        if self._num_launched == num_launched:
            self.use_pauses()
        else:
            self._await_pause()

    def close(self) -> None:
        """Let the launched steps end, stop the threads, and let go of the model. Blocks.

        What compiles in another thread at its first call ends at the end of the region that it is
        in. Whoever still refers to this, an error or a request that somebody keeps, does not keep
        weights and KV memory.
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

    def _run(self, in_flight: InFlight, message: StepMessage) -> None:
        try:
            with torch.inference_mode(), self._device.stream():
                self._execute(in_flight, message)
        # A panic of a library is no Exception. Whatever it is, nobody may wait for the step.
        except BaseException as raised:
            error = raised
            if not isinstance(error, Exception):
                error = RuntimeError(repr(raised))
                error.__cause__ = raised
            self._fail(in_flight, self._neutralize(in_flight.plan, error))

    def _neutralize(self, plan: StepPlan, error: Exception) -> Exception:
        """Make harmless what a failed step left in its rows; returns what the step failed with.

        Where not even that is possible the device is lost, and nobody may wait for the step.
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
        output = span.copy_out(self._computer.compute(plan, span.computes))
        in_flight.holds.append(span)
        self._follow(plan, output, span)
        span.deliver(
            lambda: self._read(plan, output, refused),
            lambda outcome: self._deliver(in_flight, outcome),
        )

    def _follow(self, plan: StepPlan, output: StepOutput, span: StepSpan) -> None:
        """Let the grammars know what the step samples, as soon as it is on the host."""
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
