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
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch

from src.core.draft_counts import DraftCounts, most_sampled
from src.core.errors import EngineDeadError
from src.core.plan import RowResult, StepPlan, StepResult, StepTimes
from src.core.scoring import ScoreTokens
from src.core.step_message import StepMessage
from src.engine.devices import Device, StepSpan
from src.engine.devices.device_thread import DeviceThread
from src.engine.devices.transfer import host_view
from src.engine.execution.code_host import CodeHost
from src.engine.execution.drafted_inputs import has_bounds, only_decodes
from src.engine.execution.drafted_steps import in_order, read_rows
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs import GraphPool
from src.engine.execution.held_adapters import HeldAdapters
from src.engine.execution.idle_work import IdleWork
from src.engine.execution.in_flight import InFlight
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.page_prefault import PagePrefault
from src.engine.execution.pooling import RowPooling
from src.engine.execution.row_limits import RowLimits
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import POISON, RowState
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.execution.step_results import StepResults
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler
from src.engine.sampling.prompt_logprobs import are_sound
from src.engine.speculation import Speculation, Verification
from src.engine.speculation.on_device import Bounds, DeviceSpeculation
from src.models import ServedModel
from src.models.adapters.reader import AdapterWeights
from src.models.vector_modules import VectorModules
from src.ops.build.kernels import is_building, is_compiling, kernel_library
from src.ops.declaration import Backend
from src.ops.runtime.calls import use_threads
from src.ops.runtime.places import Places
from src.text.thinking import ThinkingGuide

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        See `ForwardPass`.
    speculation
        Makes what guesses the rows' next tokens, of their token buffer, of what restricts them,
        of what stands where there is no token, and of their recurrent states; for the host only.
        Or what the device looks up itself.
    score_tokens
        See `StepComputer`.

    Attributes
    ----------
    code
        Gives steps their code.
    idle
        What is done between steps.
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
        speculation: Callable[..., Speculation] | Bounds | None = None,
        score_tokens: ScoreTokens | None = None,
        vector_modules: VectorModules | None = None,
    ) -> None:
        self._device = device
        self._forward_pass = ForwardPass(model, kv_cache, attention)
        for number, owner in self._forward_pass.owners.items():
            layers = len(owner.group.layers)
            logger.info("attention: %s computes group %d, %d layers", owner.name, number, layers)
        for reason in self._forward_pass.passed_over:
            logger.info("attention: %s", reason)
        self._memory = memory = PagePrefault(kv_cache) if device.is_host else None
        self._rows = rows
        self._sampler = sampler
        vocab_size = model.spec.vocab_size
        self._grammars = RowGrammars(rows.padding_row, vocab_size, on_cpu=device.is_host)
        self._adapters = HeldAdapters(model.adapters)
        self._row_owners = RowOwners(rows, sampler, self._grammars, vocab_size, self._adapters)
        unscored = self._row_owners.unscored
        pooling = RowPooling(
            self._row_owners.pooled,
            model.spec.hidden_size,
            rows.device,
            deterministic=any(mixer.spec.deterministic for mixer in model.mixers),
            modules=vector_modules,
        )
        bounds = speculation if isinstance(speculation, Bounds) else None
        self._computer = StepComputer(
            self._forward_pass,
            code,
            rows,
            sampler,
            self._grammars,
            unscored,
            pooling,
            score_tokens,
            bounds,
        )
        self._speculation: Speculation | None = None
        self._on_device: DeviceSpeculation | None = None
        self._draft(speculation, kv_cache)
        self._use_threads = partial(_use_threads, num_threads)
        # Whether CPU kernels may still be building. Used by the device thread only.
        self._awaits_kernels = True
        self._closing = False
        self._arrivals = StepResults(self._arrive)
        # Keeps the device thread off the loop's CPU; set on the host once kernels are built.
        self._places: Places | None = None
        self._device_thread = DeviceThread(self._use_threads)

        def run_idle(piece: Callable[[], None]) -> None:
            with torch.inference_mode(), device.stream():
                piece()

        # Neither refers to this object, so that a closed worker needs no garbage collector.
        forward_pass, proposing = self._forward_pass, None if bounds is None else bounds.proposing
        self.idle = IdleWork(self._device_thread.post, run_idle)
        self.code = CodeHost(
            device,
            self._device_thread,
            self._computer,
            lambda backend, ladder, code: GraphPool(
                backend, ladder, forward_pass, code, rows, sampler, proposing
            ),
            self.idle.begin,
            self._use_threads,
        )
        self.idle.add(self.code.next_capture)
        if memory is not None:
            self.idle.add(lambda: None if memory.is_complete else memory.take_next)
        # Weights and KV memory were written on other streams than the one of the steps.
        device.synchronize()

    def _draft(
        self, speculation: Callable[..., Speculation] | Bounds | None, kv_cache: KVCache
    ) -> None:
        """Make what guesses the rows' next tokens, on the host or on the device."""
        rows = self._rows
        if isinstance(speculation, Bounds):
            limits = RowLimits(self._grammars, self._sampler.state)
            max_sampled = most_sampled(rows.padding_row, speculation.most)
            self._on_device = DeviceSpeculation(speculation, limits, max_sampled, rows.padding_row)
            return
        tokens = host_view(rows.tokens)
        if speculation is not None and tokens is not None:
            self._speculation = speculation(tokens, self._grammars, POISON, states=kv_cache.states)
            self._row_owners.on_leave = self._speculation.leave

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What was drafted and accepted; ``None`` without speculation."""
        drafting = self._speculation or self._on_device
        return None if drafting is None else drafting.counts

    @property
    def looks_first(self) -> bool:
        """Whether a result says with a row's first token whether the row may have drafts."""
        return self._speculation is not None and not self._speculation.computes

    @property
    def uses_predictions(self) -> bool:
        """Whether a request's `prediction` is a source of drafts."""
        return self._speculation is not None

    @property
    def is_on_cpu(self) -> bool:
        """Whether steps are computed on the host."""
        return self._device.is_host

    def hold_grammar(self, handle: int, grammar: CompiledGrammar) -> None:
        """Keep the grammar of a request that a message will admit; ``handle`` is the request's key.

        It is released when a message, or `forget`, says that the request has ended.
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

    def forget_history(self) -> None:
        """Let drafts come from nothing that was said so far, behind the launched steps."""
        if (speculation := self._speculation) is not None:
            # A worker that is closed at this moment releases everything anyway.
            with contextlib.suppress(RuntimeError):
                self._device_thread.post(speculation.forget)

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
        self._device_thread.post(partial(self._run, in_flight, message), is_step=True)
        self.idle.step_launched()
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

    def _arrive(self, arrival: tuple[InFlight, StepResult | Exception]) -> None:
        """On the event loop: hand over a step's outcome, and watch for an idle time."""
        in_flight, outcome = arrival
        self.idle.step_arrived()
        try:
            in_flight.arrive(outcome)
        finally:
            self.idle.await_pause()

    def close(self) -> None:
        """Let the launched steps end, stop the threads, and release the model. Blocks.

        A thread that compiles code by its first call ends with the function that it is compiling.
        An error or a request that still refers to this worker does not keep weights and KV memory.
        """
        if self._closing:
            return
        self._closing = True
        self.idle.close()
        try:
            self._device_thread.close()
            self._device.close()
            self._arrivals.close()
            self._grammars.close()
            self._forward_pass.stop()
        finally:
            self.code.close()
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

        If even that fails, returns `DeviceLostError`.
        """
        try:
            if self._speculation is not None:
                self._speculation.fail(plan)
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
        if self._on_device is not None:
            self._execute_drafting(in_flight, message, span, self._on_device)
            return
        speculation = self._speculation
        if speculation is not None:
            if speculation.lets_pass(plan):
                speculation = None
            else:
                speculation.finish(plan)
        self._row_owners.meet(message)
        refused = self._row_owners.apply(plan)
        if self._memory is not None:
            self._memory.follow(plan)
        states = self._forward_pass.kv_cache.states
        if states is not None:
            states.begin(plan)
        verification, exact = None, plan
        # What asking and comparing take is part of the price of drafts.
        output, started = StepOutput(None, None), time.monotonic()
        if speculation is not None:
            for install in plan.installs:
                speculation.install(install.row, self._row_owners.request_of(install.row))
            if (verification := speculation.begin(plan)) is not None:
                exact = verification.plan
        if exact.rows:
            keeps_hidden = "none" if speculation is None else speculation.hidden.wanted
            self._arrivals.wake()  # see `_deliver`
            output = span.copy_out(
                self._computer.compute(exact, span.computes, keeps_hidden=keeps_hidden)
            )
        if speculation is not None:
            if verification is not None:
                sampled = () if output.samples is None else output.samples.token_ids.tolist()
                speculation.settle(verification, sampled)
            if output.hidden is not None:
                kept = None if verification is None else verification.kept
                speculation.hidden.keep(exact, output.hidden, kept)
            taken = time.monotonic() - started
            speculation.observe(exact, taken, verified=verification is not None)
        if states is not None:
            states.end(plan)
        in_flight.holds.append(span)
        self._follow(exact, output, span, verification)
        span.deliver(
            lambda: self._with_vectors(
                self._read(plan, output, refused, verification, speculation), output
            ),
            lambda outcome: self._deliver(in_flight, outcome),
        )
        if speculation is not None:
            # On the host the loop has the result, and plans the next step meanwhile.
            speculation.catch_up()

    def _execute_drafting(
        self,
        in_flight: InFlight,
        message: StepMessage,
        span: StepSpan,
        drafting: DeviceSpeculation,
    ) -> None:
        """The same where the device drafts, which knows what is computed."""
        plan = message.plan
        self._row_owners.meet(message)
        refused = self._row_owners.apply(plan)
        for install in plan.installs:
            drafting.install(install.row, install.generation)
        launched = drafting.begin(plan)
        due = [] if has_bounds(launched) else drafting.due(launched)
        if has_bounds(launched):
            with drafting.launching():
                output = self._computer.verify(launched, span.computes)
        else:
            output = self._computer.compute(launched, span.computes)
        if due:
            with drafting.launching():
                output = replace(output, looked=self._computer.look(due))
        output = span.copy_out(output)
        in_flight.holds.append(span)
        self._follow_exact(launched, output, span)

        def read() -> StepResult:
            if output.looked is not None:
                drafting.looked(due, output.looked[:, 0].tolist(), len(launched.rows))
            if output.verdicts is not None:
                result = self._read_drafted(launched, output, drafting, refused)
            else:
                result = self._read(launched, output, refused)
            times = in_flight.times
            if times.device_start and only_decodes(launched):
                width = 1 if output.verdicts is None else output.verdicts.width
                taken = (times.device_end or time.monotonic()) - times.device_start
                drafting.took(len(launched.rows), width, taken)
            result = self._with_vectors(result, output)
            return in_order(plan, launched, result, drafting.rests)

        span.deliver(read, lambda outcome: self._deliver(in_flight, outcome))

    def _follow_exact(self, plan: StepPlan, output: StepOutput, span: StepSpan) -> None:
        """Let the grammars follow rows of a step in which others may have drafts."""
        samples, verdicts = output.samples, output.verdicts
        if samples is None:
            return
        sampling = [at for at, step in enumerate(plan.rows) if step.samples]
        # Where each row's first token is among the sampled ones.
        places = list(range(len(sampling)))
        if verdicts is not None:
            places = [verdicts.width * at for at in sampling]

        def read() -> np.ndarray:
            span.wait()
            token_ids: np.ndarray = samples.token_ids.numpy()
            return token_ids[places]

        # A row that is followed has no drafts.
        self._grammars.follow([step.row for step in plan.rows if step.samples], read)

    def _read_drafted(
        self,
        plan: StepPlan,
        output: StepOutput,
        drafting: DeviceSpeculation,
        refused: Sequence[tuple[int, str]],
    ) -> StepResult:
        """Turn host tensors of a step with bounds into a result, rows as they were launched."""
        samples, verdicts, scores = output.samples, output.verdicts, output.prompt_scores
        assert samples is not None, "it samples"
        assert verdicts is not None, "it was verified"
        drafting.settle(plan, verdicts.rows())
        rows, unsound = read_rows(plan, samples, verdicts, drafting.bounds.source)
        for index, row in enumerate(rows):
            if scores is None or (prompt_logprobs := scores.of_row(index)) is None:
                continue
            rows[index] = msgspec.structs.replace(row, prompt_logprobs=prompt_logprobs)
            if not are_sound(prompt_logprobs) and index not in unsound:
                unsound.append(index)
        return StepResult(plan.step_id, rows, output.failures, refused, unsound)

    @staticmethod
    def _with_vectors(result: StepResult, output: StepOutput) -> StepResult:
        """A result with the vectors that the step has made, if any."""
        return result if output.vectors is None else output.vectors.added_to(result)

    def _follow(
        self,
        plan: StepPlan,
        output: StepOutput,
        span: StepSpan,
        verification: Verification | None,
    ) -> None:
        """Let the grammars read the step's sampled tokens as soon as these are on the host."""
        samples = output.samples
        if samples is None:
            return

        def read() -> np.ndarray:
            span.wait()
            token_ids: np.ndarray = samples.token_ids.numpy()
            return token_ids

        rows = [step.row for step in plan.rows if step.samples]
        if verification is None or plan.num_drafts == 0:
            self._grammars.follow(rows, read)
        else:
            # The step is on the host, so its tokens are there.
            self._grammars.follow_verified(rows, verification.taken(samples.token_ids.tolist()))

    def _read(
        self,
        plan: StepPlan,
        output: StepOutput,
        refused: Sequence[tuple[int, str]] = (),
        verification: Verification | None = None,
        speculation: Speculation | None = None,
    ) -> StepResult:
        """Turn host tensors into a result, rows in the plan's order."""
        if verification is not None:
            return self._read_verified(plan, output, refused, verification)
        samples, scores = output.samples, output.prompt_scores
        tells = speculation is not None and speculation.has_news
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
                        rests=speculation.rests(step.row) if tells and speculation else 0,
                    )
                )
            else:
                rows.append(RowResult(step.row, step.generation, [], None, prompt_logprobs))
            if not is_sound:
                unsound.append(index)
        return StepResult(plan.step_id, rows, output.failures, refused, unsound)

    def _read_verified(
        self,
        plan: StepPlan,
        output: StepOutput,
        refused: Sequence[tuple[int, str]],
        verification: Verification,
    ) -> StepResult:
        """The same of a step with drafts: of each row the tokens that count."""
        samples, scores, speculation = output.samples, output.prompt_scores, self._speculation
        token_ids = samples.token_ids.tolist() if samples else []
        logprobs = samples.logprob_lists() if samples else []
        rows, unsound, at = [], [], 0
        for number, (step, index) in enumerate(zip(plan.rows, verification.index, strict=True)):
            if index < 0:
                rows.append(RowResult(step.row, step.generation, []))
                continue
            exact, kept = verification.plan.rows[index], verification.kept[index]
            prompt_logprobs = scores.of_row(index) if scores else None
            mine = token_ids[at : at + kept]
            scored = [entry for entry in logprobs[at : at + kept] if entry is not None]
            at += exact.num_sampled
            guess = verification.drafts[index]
            rows.append(
                RowResult(
                    step.row,
                    step.generation,
                    mine,
                    scored or None,
                    prompt_logprobs,
                    exact.drafts,
                    speculation.rests(step.row) if speculation and step.samples else 0,
                    accepted=0 if guess is None else kept - 1,
                    source="" if guess is None else guess.source,
                )
            )
            if min(mine, default=0) < 0 or not (
                prompt_logprobs is None or are_sound(prompt_logprobs)
            ):
                unsound.append(number)
        return StepResult(plan.step_id, rows, output.failures, refused, unsound)

    def _deliver(self, in_flight: InFlight, outcome: StepResult | Exception) -> None:
        if isinstance(outcome, Exception):
            self._fail(in_flight, outcome)
        else:
            # The loop that wakes takes the interpreter for a whole turn. So it is told once the
            # step behind computes, if that begins now. On CUDA other threads tell of results.
            held = self._device.is_host and self._device_thread.next_is_step
            # Not where that step begins with much work of a drafter's own.
            held = held and self._on_device is None and not self._drafter_computes
            # Nor where the result has a first token. Behind an idle time the caches are cold, and
            # the next step computes 0.1 ms later. A row that is installed may have one token left.
            held = held and not in_flight.plan.installs and only_decodes(in_flight.plan)
            self._arrivals.post((in_flight, outcome), wakes=not held)

    @property
    def _drafter_computes(self) -> bool:
        """Whether a drafter computes at the beginning of steps."""
        return self._speculation is not None and self._speculation.computes

    def _fail(self, in_flight: InFlight, error: Exception) -> None:
        in_flight.times.device_end = time.monotonic()
        failure = self._device.failure()
        if failure is not None:
            lost = DeviceLostError(f"the device failed: {failure}")
            lost.__cause__ = error
            error = lost
        self._arrivals.post((in_flight, error))


def _use_threads(num_threads: int) -> None:
    """Set the calling thread's number of compute threads to that of a step.

    With the CPU kernels torch uses one thread. It computes too little between them for a team,
    whose threads spin while they wait, and so take the event loop's CPU. It also uses one while
    compilers run. Otherwise torch computes everything, with all threads.
    """
    has_kernels = kernel_library() is not None or is_compiling()
    torch.set_num_threads(1 if has_kernels else num_threads)
    use_threads(num_threads)
