"""Renders chat templates in other processes, which are killed where one takes too long.

A pool has two threads, each with a process of its own (`src.text.template_process`). A job is a
function that runs on such a thread and renders there as often as it likes. What may be slow is one
thread's alone, so that it does not keep what is fast waiting: conversations that are long, and
templates of clients that have not been rendered before. Among jobs that wait, owners take turns, so
that nobody waits for all that somebody else has sent. Nothing of it needs an event loop, and no
thread of a shared pool is taken, so that a template that hangs delays only chats.

::

    caller --submit--> [ light jobs ] --> thread 0, thread 1 <--socket--> a process each
                       [ other jobs ] --> thread 0
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from src.core.errors import (
    InvalidRequestError,
    QueueFullError,
    ShuttingDownError,
    UnavailableError,
)
from src.core.in_turns import InTurns
from src.core.turn_pool import Job
from src.text.template_process import Answer, Kind, Request
from src.text.template_renderer import EndedError, Renderer, not_started

logger = logging.getLogger(__name__)

MAX_SECONDS: Final = 2.0
"""CPU time of one rendering."""
REFUSAL_SECONDS: Final = 60.0
"""For how long a client's template is refused that was out of bounds."""
MAX_WAITING: Final = 4096
"""Jobs that wait; more than an engine lets in."""
_NUM_THREADS: Final = 2
_JOIN_SECONDS: Final = 10.0
# A client's template that takes no longer is known to be harmless, until it is not.
_QUICK_SECONDS: Final = 0.1
_MAX_REMEMBERED: Final = 1024


class TemplateBoundsError(InvalidRequestError):
    """A rendering took more time or memory than one may; its process was ended."""

    def __init__(self, what: str) -> None:
        super().__init__(f"messages: the model's chat template {what}", param="messages")


@dataclass
class Budget:
    """CPU time that renderings may take together; each takes what it has used."""

    seconds: float


class _Worker:
    """A thread of the pool, and its process."""

    def __init__(self, *, takes_all: bool) -> None:
        self.takes_all = takes_all
        self.thread: threading.Thread
        # Whether it has taken its first job, or waits for it.
        self.has_begun = False
        self.inbox: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self.renderer: Renderer | None = None
        # Whose job it does.
        self.owner = ""


class TemplatePool:
    """Two processes that render. They start with `start`, or as they are needed.

    Parameters
    ----------
    of_clients
        Whether the templates are those of requests. One that was out of bounds is then refused to
        its owner for a minute without being tried; one that is new is not a light job.
    """

    def __init__(self, *, of_clients: bool = False) -> None:
        self._of_clients = of_clients
        self._lock = threading.Lock()
        self._light: InTurns[Job[Any]] = InTurns()
        self._others: InTurns[Job[Any]] = InTurns()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._is_closed = False
        # The worker whose thread this is.
        self._here = threading.local()
        # Owner and key of a client's template -> until when it is refused, in seconds of the
        # monotonic clock. Others may have sent it less to render.
        self._refused: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        # Keys of clients' templates that were quick.
        self._quick: OrderedDict[bytes, None] = OrderedDict()

    def start(self) -> None:
        """Start one process, so that the first rendering need not wait for it."""
        with self._lock:
            if not self._workers and not self._is_closed:
                self._idle.append(self._add_worker())

    def submit(
        self,
        run: Callable[[], Any],
        *,
        is_short: bool = True,
        source: str | None = None,
        owner: str = "",
    ) -> Future[Any]:
        """Have ``run`` called on a thread of the pool, in which `render` is at its cheapest.

        Parameters
        ----------
        is_short
            Whether it should be over soon.
        source
            The template, where it is a client's.
        owner
            Whose job it is, where owners are told apart.

        Raises
        ------
        QueueFullError, ShuttingDownError
            Too many wait already; the pool is closed.
        """
        is_light = is_short and (not self._of_clients or self._is_quick(source))
        job = Job(run, owner)
        with self._lock:
            self._check_open()
            for worker in self._idle:
                if is_light or worker.takes_all:
                    self._idle.remove(worker)
                    worker.inbox.put(job)
                    return job.future
            self._check_room(owner)
            if not self._workers or (is_light and len(self._workers) < _NUM_THREADS):
                self._add_worker().inbox.put(job)
            else:
                (self._light if is_light else self._others).push(owner, job)
        return job.future

    def _check_room(self, owner: str) -> None:
        waiting = len(self._light) + len(self._others)
        if waiting >= MAX_WAITING:
            raise QueueFullError(
                f"{MAX_WAITING} conversations wait to be rendered", code="queue_full"
            )
        own = self._light.count(owner) + self._others.count(owner)
        # An owner leaves as much room to others as it takes, as in the engine's waiting queue.
        if owner and own and waiting + own + 2 > MAX_WAITING:
            raise QueueFullError(
                f"{own} conversations of this key wait to be rendered, of {waiting} in all",
                code="queue_full",
            )

    def render(self, source: str, variables: dict[str, Any], budget: Budget | None = None) -> str:
        """Return the rendered text.

        Parameters
        ----------
        source
            Jinja source; processes keep what they have compiled.
        variables
            Of JSON types alone.
        budget
            What it may take, and uses up; `MAX_SECONDS` by default.

        Raises
        ------
        InvalidRequestError
            The template refuses the variables, or cannot cope with them.
        TemplateBoundsError
            It takes more time or memory than it may.
        UnavailableError
            No process can be started, or the pool is closed.
        """
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is None:
            ask = functools.partial(self.render, source, variables, budget)
            text: str = self.submit(ask, source=source).result()
            return text
        key = _key(source)
        self._check_allowed(worker.owner, key)
        budget = budget or Budget(MAX_SECONDS)
        try:
            answer = self._ask(worker, Request(key, source, budget.seconds, variables))
        except TemplateBoundsError:
            budget.seconds = 0.0
            raise
        budget.seconds -= answer.seconds
        if answer.kind is Kind.ERROR:
            raise InvalidRequestError(answer.text, param="messages")
        if self._of_clients:
            self._remember_quick(key, answer.seconds)
        return answer.text

    def close(self) -> None:
        """End the processes and threads; what waits fails. Blocks for some milliseconds."""
        with self._lock:
            self._is_closed = True
            workers, self._workers = self._workers, []
            waiting = [line.pop() for line in (self._light, self._others) for _ in range(len(line))]
            self._idle.clear()
            for worker in workers:
                worker.inbox.put(None)
                if worker.renderer is not None:
                    worker.renderer.kill()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed())
        for worker in workers:
            worker.thread.join(_JOIN_SECONDS)

    def _add_worker(self) -> _Worker:
        """Start a thread; the lock is held."""
        worker = _Worker(takes_all=not self._workers)
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name="slipstream-templates", daemon=True
        )
        # If it cannot start, there is no worker that jobs could wait for.
        worker.thread.start()
        self._workers.append(worker)
        return worker

    def _work(self, worker: _Worker) -> None:
        self._here.worker = worker
        try:
            # An error shows where something is to be rendered.
            with contextlib.suppress(UnavailableError):
                self._renderer_of(worker)
            while (job := self._next(worker)) is not None:
                worker.owner = job.owner
                job.do()
                del job
        finally:
            self._drop(worker)

    def _next(self, worker: _Worker) -> Job[Any] | None:
        if not worker.has_begun:
            worker.has_begun = True
            return worker.inbox.get()
        with self._lock:
            if worker.takes_all and self._others:
                return self._others.pop()
            if self._light:
                return self._light.pop()
            if not self._is_closed:
                self._idle.append(worker)
        return worker.inbox.get()

    def _renderer_of(self, worker: _Worker) -> Renderer:
        """Return the worker's process, started now if it has none."""
        if worker.renderer is None:
            self._check_open()
            try:
                started = Renderer()
            except OSError:
                logger.exception("the process that renders chat templates cannot be started")
                raise not_started() from None
            with self._lock:
                worker.renderer = started
                if self._is_closed:
                    started.kill()
        return worker.renderer

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            renderer, worker.renderer = worker.renderer, None
        if renderer is not None:
            renderer.close()

    def _ask(self, worker: _Worker, request: Request) -> Answer:
        for is_last_try in (False, True):
            renderer = self._renderer_of(worker)
            try:
                answer = renderer.ask(request)
            except EndedError as error:
                self._drop(worker)
                self._check_open()
                if error.is_late:
                    raise self._out_of_bounds(
                        worker.owner,
                        request,
                        f"takes more than {request.seconds:g} s of CPU time",
                    ) from None
                # Something else may have ended it, the kernel for want of memory, say.
                if is_last_try:
                    raise self._out_of_bounds(
                        worker.owner, request, "ends the process that renders it"
                    ) from None
            except UnavailableError:
                self._drop(worker)
                self._check_open()
                raise
            except ValueError:
                raise InvalidRequestError("messages: nested too deeply", param="messages") from None
            else:
                if renderer.is_last:
                    self._drop(worker)
                return answer
        raise AssertionError("the last try raises")

    def _out_of_bounds(self, owner: str, request: Request, what: str) -> TemplateBoundsError:
        logger.warning("a chat template %s", what)
        if self._of_clients:
            with self._lock:
                self._quick.pop(request.key, None)
                self._refused[owner, request.key] = time.monotonic() + REFUSAL_SECONDS
                while len(self._refused) > _MAX_REMEMBERED:
                    self._refused.popitem(last=False)
        return TemplateBoundsError(what)

    def _check_allowed(self, owner: str, key: bytes) -> None:
        with self._lock:
            is_refused = self._refused.get((owner, key), 0.0) > time.monotonic()
        if is_refused:
            raise TemplateBoundsError(
                f"was out of bounds less than {REFUSAL_SECONDS:g} s ago and is not tried again"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _is_quick(self, source: str | None) -> bool:
        return source is not None and _key(source) in self._quick

    def _remember_quick(self, key: bytes, seconds: float) -> None:
        with self._lock:
            self._quick.pop(key, None)
            if seconds < _QUICK_SECONDS:
                self._quick[key] = None
                while len(self._quick) > _MAX_REMEMBERED:
                    self._quick.popitem(last=False)


class TemplatePools:
    """The pools of one engine: for the checkpoint's own templates, and for those of requests.

    Within the block they render.
    """

    def __init__(self) -> None:
        self.own = TemplatePool()
        self.of_clients = TemplatePool(of_clients=True)

    def __enter__(self) -> Self:
        self.own.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End both."""
        self.own.close()
        self.of_clients.close()


def _closed() -> ShuttingDownError:
    return ShuttingDownError("no chat template is rendered any more: the engine was closed")


@functools.lru_cache(maxsize=16)
def _key(source: str) -> bytes:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


@functools.cache
def shared_pool() -> TemplatePool:
    """Return the pool of templates that belong to no engine, for as long as the process lives."""
    return TemplatePool()


# Threads do not come along into a forked process.
os.register_at_fork(after_in_child=shared_pool.cache_clear)
