"""The loop: plan step N+1 and launch it while step N runs, then commit step N.

This is the only module that knows both halves of the engine. Everything here runs on one event loop
and nothing here waits for the device: a step's result sets ``_wake`` when it has arrived.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Sequence

from src.core.errors import (
    DeadEndError,
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    ShuttingDownError,
    SlipstreamError,
    forget_locals,
)
from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import RowResult, StepPlan, StepResult, drafted_tokens, has_computed
from src.core.request import Request
from src.core.step_message import DeviceRequest, StepMessage
from src.engine.execution.in_flight import InFlight, failed_step
from src.engine.execution.worker import DeviceLostError, Worker
from src.engine.requests.streams import Choice
from src.engine.scheduling.pace import Pace
from src.engine.scheduling.scheduler import Scheduler
from src.engine.telemetry.observer import EngineObserver

logger = logging.getLogger(__name__)

# After this many failed steps in a row the device counts as lost, even if it reports no fault.
_MAX_CONSECUTIVE_FAILURES = 3
_UNSOUND = (
    "the model gave no valid logits for this request: there is a NaN or +inf among them, or "
    "nothing above -inf; if every request fails so, model.dtype may be too narrow for this model: "
    "bfloat16 and float32 hold larger numbers than float16"
)
_UNSOUND_VECTOR = (
    "the model gave no valid vector for this request: there is a NaN or an infinity among its "
    "numbers; if every request fails so, model.dtype may be too narrow for this model: bfloat16 "
    "and float32 hold larger numbers than float16"
)


class EngineLoop:
    """Drives the scheduler and the worker until it is cancelled.

    Parameters
    ----------
    pipeline_depth
        Steps on the device's queue at once, 1 or 2. Depth 1 is the oracle of depth 2: both give
        every request the same tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        observer: EngineObserver,
        *,
        pipeline_depth: int,
    ) -> None:
        self.scheduler = scheduler
        self._worker = worker
        self._observer = observer
        self._depth = pipeline_depth
        self._choices: dict[int, Choice] = {}
        self._in_flight: deque[InFlight] = deque()
        # Requests that no plan has installed yet, so the worker does not know them.
        self._unannounced: dict[int, Request] = {}
        # Keys of requests that ended since the worker was last told which requests to forget.
        self._forgettable: list[int] = []
        self._unpublished: list[RequestEvent] = []
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._pace = Pace() if scheduler.limits.plan_late else None
        self._plan_timer: asyncio.TimerHandle | None = None
        # When the device finished the last committed step.
        self._device_free = 0.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failures = 0
        self._is_settled = True
        # The error for new requests once the loop has ended, or None.
        self._ended: SlipstreamError | None = None

    def submit(self, choices: Sequence[Choice], *, succeeds: bool = False) -> None:
        """Queue the completions of one request, all or none.

        ``succeeds``: they take the place of one that has ended, see `Scheduler.add_all`.

        Raises
        ------
        QueueFullError, InvalidRequestError
            The scheduler refuses them.
        EngineDeadError, ShuttingDownError
            The loop has ended.
        """
        if self._ended is not None:
            raise copy.copy(self._ended)
        self.scheduler.add_all([choice.request for choice in choices], succeeds=succeeds)
        for choice in choices:
            self._watch(choice)
        self._idle.clear()
        self._wake.set()

    def _watch(self, choice: Choice) -> None:
        request = choice.request
        self._choices[request.key] = choice
        self._unannounced[request.key] = request
        self._observer.submitted(choice)
        if request.deadline is not None:
            self._watch_deadline(request.key, request.deadline)

    def turn_away(self, choices: Sequence[Choice], reason: FinishReason) -> None:
        """End completions that were never queued. Their reader gets the finish reason only."""
        for choice in choices:
            self._observer.submitted(choice)
            choice.take(RequestEvent(key=choice.request.key, finish_reason=reason))
            self._observer.ended(choice, reason)

    def _watch_deadline(self, key: int, deadline: float) -> None:
        delay = deadline - time.monotonic()
        if delay > 0:
            # Some event loops round to milliseconds, so this timer may fire early. Then it is set
            # again, because perhaps nothing else wakes the loop.
            self._timers[key] = asyncio.get_running_loop().call_later(
                delay, self._watch_deadline, key, deadline
            )
        else:
            self._wake.set()

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now. Its memory is freed once no step in flight names the request."""
        event = self.scheduler.finish(key, reason)
        if event is not None:
            self._deliver(event)
        self._wake.set()

    def abort_all(self) -> None:
        """End every request."""
        for key in list(self._choices):
            self.abort(key)

    async def wait_idle(self) -> None:
        """Wait until no request and no step is left."""
        await self._idle.wait()

    async def run(self) -> None:
        """Run until cancelled. On a fault outside a single step every stream ends in an error."""
        try:
            while True:
                self._wake.clear()
                self._turn()
                if self._can_proceed or self._wake.is_set():
                    # There is more to do, but readers and HTTP get their turn first.
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
        except asyncio.CancelledError:
            self._stop(ShuttingDownError("the engine was closed"))
            raise
        except BaseException as error:
            logger.exception("the engine loop stopped")
            self._stop(EngineDeadError(f"the engine stopped: {error}"))
            raise

    @property
    def _can_proceed(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].done

    def _turn(self) -> None:
        """Commit what has arrived, launch what can be launched, then tell the readers."""
        while self._in_flight and self._in_flight[0].done:
            self._commit(self._in_flight.popleft())
        expired = self.scheduler.expire(time.monotonic())
        if expired:
            # Their last tokens are published before their end.
            self._publish()
        for event in expired:
            self._deliver(event)
        while len(self._in_flight) < self._depth and not self._plans_later() and self._launch():
            pass
        self._observer.publishing()
        self._publish()
        self._observer.turned(self.scheduler)
        if not self.scheduler.has_work and not self._in_flight:
            self._settle()

    def _plans_later(self) -> bool:
        """Whether planning the next step is delayed for late arrivals; if so, sets a timer."""
        if self._pace is None:
            return False
        self._stop_timer()
        running, start = None, 0.0
        if self._in_flight:
            last = self._in_flight[-1]
            running, start = last.plan, max(self._device_free, last.times.launched)
        delay = self._pace.decide(self.scheduler, running, start, time.monotonic())
        if delay:
            self._plan_timer = asyncio.get_running_loop().call_later(delay, self._wake.set)
        return delay > 0

    def _stop_timer(self) -> None:
        if self._plan_timer is not None:
            self._plan_timer.cancel()
            self._plan_timer = None

    def _launch(self) -> bool:
        planned = time.monotonic()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        plan_ended = time.monotonic()
        admitted = [
            request
            for install in plan.installs
            if (request := self._unannounced.pop(install.request_key, None)) is not None
        ]
        forgettable, self._forgettable = self._forgettable, []
        is_launched = True
        try:
            for request in admitted:
                # What does not travel the message names by handle.
                if request.grammar is not None:
                    self._worker.hold_grammar(request.key, request.grammar)
                if request.thinking is not None:
                    self._worker.hold_thinking(request.key, request.thinking)
            message = StepMessage(plan, [DeviceRequest.of(each) for each in admitted], forgettable)
            in_flight = self._worker.launch(message, self._wake.set)
        # The step never reached the device. Its requests fail as if it had failed there.
        except Exception as error:
            in_flight = failed_step(plan, error)
            self._forgettable += forgettable
            is_launched = False
        self._in_flight.append(in_flight)
        times = in_flight.times
        times.planned, times.plan_ended, times.launch_ended = planned, plan_ended, time.monotonic()
        self._observer.launched(plan, times, admitted, self.scheduler)
        self._is_settled = False
        # Rows lack the tokens of a step that was not launched. So no further step may be launched
        # before its failure is committed.
        return is_launched

    def _commit(self, in_flight: InFlight) -> None:
        started = time.monotonic()
        outcome = in_flight.outcome
        assert outcome is not None
        times = in_flight.times
        self._device_free = times.device_end
        if isinstance(outcome, StepResult):
            self._failures = 0
            result = outcome
            if self._pace is not None and has_computed(in_flight.plan, result):
                self._pace.observe(in_flight.plan, times.device_end - times.device_start)
        else:
            result = self._contain(in_flight.plan, outcome)
        drafted = (0, 0)
        if self.scheduler.limits.drafts:
            drafted = drafted_tokens(result)
        if result.failures or result.refused or result.unsound:
            self._fail_rows(in_flight.plan, result)
        for event in self.scheduler.commit(result):
            if self._choices[event.key].watches_text:
                self._deliver(event)
            else:
                self._unpublished.append(event)
        self._observer.committed(in_flight.plan, times, started, drafted)

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> None:
        """End the requests whose rows failed. The other requests of the step go on."""
        # Their last tokens are published before their end.
        self._publish()
        for key, reason, is_own in result.failures:
            # The grammar allows no next token. Either the request's own parameters are the cause,
            # or the engine's translation of its grammar is.
            kind = InvalidRequestError if is_own else DeadEndError
            self._fail_row(key, "grammar", kind(reason, param="structured_output"))
        for key, reason in result.refused:
            logger.error("a request cannot be given a row: %s", reason)
            message = "the engine cannot compute this request"
            self._fail_row(key, "refused", GenerationError(message, code="row_refused"))
        for index in result.unsound:
            owner = self.scheduler.key_at(plan, index)
            if owner is not None and plan.rows[index].pools:
                error = GenerationError(_UNSOUND_VECTOR, code="invalid_vector")
                self._fail_row(owner, "vector", error)
            elif owner is not None:
                self._fail_row(owner, "logits", GenerationError(_UNSOUND, code="invalid_logits"))

    def _fail_row(self, key: int, reason: str, error: SlipstreamError) -> None:
        # The next step in flight may report the same failure again.
        if key in self._choices:
            self._observer.row_failed(reason)
            self._fail(key, error)

    def _contain(self, plan: StepPlan, error: Exception) -> StepResult:
        """Fail only the requests of a failed step, when the device is still sound."""
        self._failures += 1
        # Tokens of earlier steps are published before the end.
        self._publish()
        if isinstance(error, DeviceLostError) or self._failures >= _MAX_CONSECUTIVE_FAILURES:
            raise error
        logger.error("step %d failed", plan.step_id, exc_info=error)
        # A reader may keep the error for long; it should not keep stack frames alive.
        forget_locals(error)
        self._observer.step_failed()
        for key in self.scheduler.keys_of(plan):
            self._fail(key, _failure("a step of this request failed", error))
        return StepResult(plan.step_id, [RowResult(r.row, r.generation, []) for r in plan.rows])

    def _publish(self) -> None:
        unpublished, self._unpublished = self._unpublished, []
        for event in unpublished:
            self._deliver(event)

    def _deliver(self, event: RequestEvent) -> None:
        choice = self._choices.get(event.key)
        if choice is None:
            # It has ended since its step was committed: its row or its text has failed, or a reader
            # that was told of another one has aborted it.
            return
        try:
            reason = choice.take(event)
        # A failure in the text of one request must end this request only.
        except Exception as error:
            logger.exception("the text of a request failed")
            self._fail(event.key, _failure("the text of this request failed", error))
            return
        self._observer.delivered(choice, event)
        if reason is not None:
            self._forget(event.key)
            if event.finish_reason is None:
                # A stop string: the scheduler cannot see text.
                self.scheduler.finish(event.key, reason)
            self._observer.ended(choice, reason)

    def _settle(self) -> None:
        """When idle, check that no block or row was lost, and tell the worker what to forget."""
        if not self._is_settled:
            self.scheduler.check_idle()
            self._is_settled = True
            self._observer.settled()
        if self._forgettable:
            # No launch may follow for a long time, so no step message would carry these keys.
            forgettable, self._forgettable = self._forgettable, []
            self._worker.forget(forgettable)
        self._idle.set()

    # Ends with an error; docs/failure-domains.md says which failure ends which requests.

    def _fail(self, key: int, error: SlipstreamError) -> None:
        """End one request with an error, unless publishing its last tokens has ended it already."""
        if key in self._choices:
            self.scheduler.finish(key, FinishReason.ERROR)
            self._break_off(key, error)

    def _stop(self, error: SlipstreamError) -> None:
        """End every request with an error, and refuse new ones: the loop has ended.

        The scheduler is not called any more, because its bookkeeping may be what failed.
        """
        self._ended = error
        self._stop_timer()
        try:
            self._publish()
        except Exception:
            logger.exception("what was committed last could not be published")
        for key in list(self._choices):
            self._break_off(key, copy.copy(error))
        self._observer.stopped()
        self._idle.set()

    def _break_off(self, key: int, error: SlipstreamError) -> None:
        choice = self._forget(key)
        choice.fail(error)
        self._observer.ended(choice, FinishReason.ERROR, error)

    def _forget(self, key: int) -> Choice:
        """Remove a request that has ended, with an error or without."""
        if self._unannounced.pop(key, None) is None:
            self._forgettable.append(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return self._choices.pop(key)


def _failure(message: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error
