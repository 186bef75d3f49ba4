"""Views of a running engine for the debug endpoints.

Methods that read live state run on the event loop, and their size is bounded by the caller's
arguments and by constants. They return copies, so that another thread can encode them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from src.core.blocks import most_seen
from src.core.errors import ConflictError, InvalidRequestError
from src.core.memory_report import MemoryReport
from src.core.views import PlanView, PoolView, RequestsView, RequestView, TimelineView
from src.engine.own_loop import OwnLoop
from src.engine.requests.streams import Choice
from src.engine.scheduling.scheduler import SchedulerLimits
from src.engine.telemetry.observer import EngineObserver

if TYPE_CHECKING:
    from src.engine.startup import EngineParts

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 1000
MAX_CELLS: Final = 1024
MAX_PROFILED_STEPS: Final = 100
# Seconds to wait for the steps of a profile.
PROFILE_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Profile:
    """A profile of some steps.

    ``phase`` is ``running``, ``done`` or ``failed``. ``trace`` is a gzipped Chrome trace once it is
    done. ``detail`` says why it failed.
    """

    phase: str
    steps: int
    trace: bytes = b""
    detail: str = ""


class Inspector:
    """Views of one engine. Call all methods on its event loop.

    Parameters
    ----------
    loaded
        Returns the engine's parts, or raises `NotReadyError` before they are loaded.
    """

    def __init__(
        self, observer: EngineObserver, loaded: Callable[[], EngineParts], own_loop: OwnLoop
    ) -> None:
        self._observer = observer
        self._own_loop = own_loop
        self._loaded = loaded
        self._profile: Profile | None = None
        self._profiling: asyncio.Task[None] | None = None

    @property
    def memory(self) -> MemoryReport:
        """Where the engine's memory goes; raises `NotReadyError` before it is ready."""
        return self._loaded().memory

    def timeline(self, steps: int | None = None, after: int = 0) -> TimelineView:
        """The newest ``steps`` steps behind step ``after``.

        Ended completions are included if these steps may have served them.
        """
        timeline, now = self._observer.timeline, time.monotonic()
        last_step = 0 if timeline.last is None else timeline.last.step_id
        count = len(timeline) if steps is None else steps
        if after:
            count = min(count, max(0, last_step - after))
        records = timeline.tail(count)
        requests, omitted = self._observer.requests.tracks(MAX_REQUESTS)
        if len(records) < len(timeline):
            begin = records[0].planned if records else now
            requests = [track for track in requests if track.ended is None or track.ended >= begin]
        return TimelineView(
            now=now,
            unix_time=time.time(),
            bubble=timeline.bubble,
            last_step=last_step,
            steps=records,
            requests=requests,
            omitted=omitted,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and all outputs that drafts may come from.

        Also those of running requests.
        """
        self._own_loop.check()
        parts = self._loaded()
        parts.scheduler.reset_prefix_cache()
        parts.worker.forget_history()

    def requests(self, limit: int = MAX_REQUESTS) -> RequestsView:
        """The first ``limit`` unfinished completions."""
        scheduler = self._loaded().scheduler
        now = time.monotonic()
        tracks = self._observer.requests
        views = [self._request(choice, now) for choice in tracks.choices(min(limit, MAX_REQUESTS))]
        return RequestsView(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            requests=views,
            omitted=len(tracks) - len(views),
        )

    def _request(self, choice: Choice, now: float) -> RequestView:
        request, record = choice.request, choice.record
        state = self._loaded().scheduler.state(request.key)
        admitted = record.admitted[0] if record.admitted else now
        return RequestView(
            key=request.key,
            request_id=choice.request_id,
            index=choice.index,
            tenant=request.tenant,
            phase="ended" if state is None else state.phase.value,
            age=now - record.arrival,
            waited=admitted - record.arrival,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0 if state is None else state.cached_tokens or 0,
            computed_tokens=0 if state is None else state.committed,
            output_tokens=record.num_tokens,
            drafted_tokens=record.drafted,
            accepted_tokens=record.accepted,
            max_tokens=request.max_tokens,
            row=-1 if state is None else state.row,
            blocks=0 if state is None else sum(map(len, state.held_blocks())),
            preemptions=len(record.preempted),
            expires_in=None if request.deadline is None else request.deadline - now,
            trace_id=record.trace_id,
            task=request.task,
        )

    async def pool(self, cells: int = 256) -> PoolView:
        """The block pool; the map has at most ``cells`` cells."""
        self._own_loop.check()
        scheduler = self._loaded().scheduler
        references, cached = scheduler.pool.snapshot()
        return await asyncio.to_thread(
            _pool_view, references, cached, scheduler.limits, min(cells, MAX_CELLS)
        )

    def plans(self, count: int | None = None) -> list[PlanView]:
        """The newest ``count`` plans, oldest first, without their tokens."""
        plans = list(self._observer.plans)
        left_out = 0 if count is None else max(0, len(plans) - count)
        return plans[left_out:]

    # torch's profiler.

    @property
    def profile(self) -> Profile | None:
        """The running or the last profile."""
        return self._profile

    def start_profile(self, steps: int) -> Profile:
        """Begin to profile the next ``steps`` steps, in the background.

        Raises
        ------
        InvalidRequestError
            ``steps`` is out of range.
        ConflictError
            Another profile is being taken.
        """
        self._own_loop.check()
        if not 1 <= steps <= MAX_PROFILED_STEPS:
            raise InvalidRequestError(
                f"steps must be from 1 to {MAX_PROFILED_STEPS}, got {steps}", param="steps"
            )
        parts = self._loaded()
        if self._profiling is not None:
            raise ConflictError("a profile is being taken; there is one at a time")
        self._profile = Profile("running", steps)
        self._profiling = asyncio.create_task(self._take_profile(parts, steps))
        return self._profile

    async def close(self) -> None:
        """End a running profile."""
        if self._profiling is not None:
            self._profiling.cancel()
            await asyncio.gather(self._profiling, return_exceptions=True)

    async def _take_profile(self, parts: EngineParts, steps: int) -> None:
        profiler, timeline = parts.profiler, self._observer.timeline
        try:
            started = profiler.start()
            try:
                await asyncio.wrap_future(started)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROFILE_SECONDS):
                        await timeline.wait_for(parts.scheduler.stats.steps + steps)
            finally:
                # Also after a cancellation, because nothing else would stop the profiler.
                stopped = profiler.stop()
            await asyncio.wrap_future(stopped)
            trace = await asyncio.to_thread(profiler.export)
            self._profile = Profile("done", steps, trace)
        # A failing profiler must not disturb requests.
        except Exception as error:
            logger.exception("the profile failed")
            self._profile = Profile("failed", steps, detail=f"{type(error).__name__}: {error}")
        finally:
            self._profiling = None


def _pool_view(
    references: list[int], cached: list[int], limits: SchedulerLimits, cells: int
) -> PoolView:
    total = len(references)
    # 0 free, 1 cached, 2 held
    places = bytearray(2 if count else 0 for count in references)
    for block in cached:
        places[block] = 1
    size = -(-total // max(1, cells))
    pieces = [places[start : start + size] for start in range(0, total, size)]
    return PoolView(
        block_size=limits.block_size,
        windows=[None if window is None else most_seen(window) for window in limits.windows],
        num_blocks=total,
        free=places.count(0),
        cached=len(cached),
        held=places.count(2),
        references=dict(sorted((n, count) for n, count in Counter(references).items() if n)),
        map=[(piece.count(0), piece.count(1), piece.count(2)) for piece in pieces],
        whole_prompts=limits.whole_prompts,
    )
