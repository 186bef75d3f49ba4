"""Records all calls of the scheduler in a file, for ``inspect --replay``.

The scheduler only queues references; a thread writes the lines several times a second. If the disk
is too slow, the log ends early; the engine is neither slowed down nor filled up.

Tokens are written as pseudonyms: keyed hashes of the whole prefix up to the token, with a key that
is never written. Equal prefixes stay equal, which is all that the prefix cache needs, and no prompt
can be read from a log.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from src.core.adapter import Adapter
from src.core.errors import ConfigError
from src.core.outputs import FinishReason, RequestEvent
from src.core.plan import StepPlan, StepResult
from src.core.request import Request
from src.engine.scheduling.admission import SchedulerLimits
from src.engine.scheduling.replay import (
    END_TOKEN,
    VERSION,
    AddLine,
    CommitLine,
    CutLine,
    ExpireLine,
    FinishLine,
    LimitsLine,
    Line,
    NothingLine,
    ResetLine,
    plan_line,
)
from src.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# The most entries that may wait to be written, and the largest size of the file.
MAX_PENDING: Final = 100_000
MAX_BYTES: Final = 2**30
_INTERVAL: Final = 0.05  # seconds between two writes at least
_PSEUDONYM_BYTES: Final = 6


class _Committed(msgspec.Struct, frozen=True):
    result: StepResult
    events: list[RequestEvent]


_Happening = Line | Request | StepPlan | _Committed


class RecordingScheduler(Scheduler):
    """A scheduler that records its calls; its decisions are the same."""

    def __init__(self, limits: SchedulerLimits, log: PlanLog) -> None:
        super().__init__(limits)
        self._log = log
        log.put(LimitsLine(VERSION, limits))

    def add_all(self, requests: Sequence[Request], *, succeeds: bool = False) -> None:
        """As the scheduler's own."""
        super().add_all(requests, succeeds=succeeds)
        for request in requests:
            self._log.put(request)

    def finish(self, key: int, reason: FinishReason) -> RequestEvent | None:
        """As the scheduler's own."""
        event = super().finish(key, reason)
        if event is not None:
            self._log.put(FinishLine(key, reason))
        return event

    def expire(self, now: float) -> list[RequestEvent]:
        """As the scheduler's own."""
        events = super().expire(now)
        if events:
            self._log.put(ExpireLine([event.key for event in events]))
        return events

    def reset_prefix_cache(self) -> None:
        """As the scheduler's own."""
        super().reset_prefix_cache()
        self._log.put(ResetLine())

    def schedule(self) -> StepPlan | None:
        """As the scheduler's own."""
        had_work = self.has_work
        plan = super().schedule()
        if plan is not None:
            self._log.put(plan)
        elif had_work:
            self._log.put(NothingLine())
        return plan

    def commit(self, result: StepResult) -> list[RequestEvent]:
        """As the scheduler's own."""
        events = super().commit(result)
        self._log.put(_Committed(result, events))
        return events


class PlanLog:
    """A file of lines and the thread that writes it.

    Parameters
    ----------
    path
        Overwritten.
    max_pending
        The most entries that may wait to be written. With more the log ends.
    max_bytes
        The largest size of the file. At that size the log ends.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """

    def __init__(
        self, path: str | Path, *, max_pending: int = MAX_PENDING, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = Path(path).expanduser()
        try:
            self._file: IO[bytes] = self._path.open("wb")
        except OSError as error:
            raise ConfigError(f"observability.plan_log={path}: {error.strerror}") from error
        self._max_pending = max_pending
        self._left = max_bytes
        self._pending: deque[_Happening] = deque()
        # Why the log has ended, or None.
        self._cut: str | None = None
        self._writer = _Writer()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-plan-log", daemon=True)
        self._thread.start()

    def put(self, happening: _Happening) -> None:
        """Queue an entry to be written soon. Never waits, never raises."""
        if self._cut is not None:
            return
        if len(self._pending) >= self._max_pending:
            self._cut = "the disk did not keep up"
        else:
            self._pending.append(happening)
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Write the remaining entries and close the file. Blocks."""
        self._closing.set()
        self._some.set()
        self._thread.join()

    def _run(self) -> None:
        with self._file:
            try:
                while self._write():
                    pass
            except OSError as error:
                # The file cannot be written, so it cannot get a "cut" line either.
                self._cut = self._cut or f"{error.strerror}"
        if self._cut is not None:
            self._pending.clear()
            logger.warning("%s ends early: %s", self._path, self._cut)

    def _write(self) -> bool:
        """Wait for entries and write them; false at the end."""
        self._some.wait()
        self._closing.wait(_INTERVAL)
        self._some.clear()
        # Read after `_some` is cleared. Otherwise the wake-up of `close` could be lost.
        closing = self._closing.is_set()
        while self._pending and self._left > 0:
            line = msgspec.json.encode(self._writer.line(self._pending.popleft())) + b"\n"
            self._file.write(line)
            self._left -= len(line)
        if self._left <= 0:
            self._cut = "the log is as long as it may be"
        if self._cut is not None:
            self._file.write(msgspec.json.encode(CutLine(self._cut)) + b"\n")
        self._file.flush()
        return self._cut is None and not (closing and not self._pending)


class _Writer:
    """Turns entries into lines. It keeps the hash of each unfinished request's prefix."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._salts: dict[str, int] = {"": 0}
        self._digests: dict[bytes, int] = {}
        self._media: dict[bytes, int] = {}
        self._prefixes: dict[int, bytes] = {}
        # Keys of the rows of each step in flight.
        self._steps: dict[int, list[int]] = {}
        self._owners: dict[int, int] = {}

    def line(self, happening: _Happening) -> Line:
        """The next line."""
        if isinstance(happening, Request):
            return self._add(happening)
        if isinstance(happening, StepPlan):
            self._owners.update((i.row, i.request_key) for i in happening.installs)
            self._steps[happening.step_id] = [self._owners[step.row] for step in happening.rows]
            return plan_line(happening)
        if isinstance(happening, _Committed):
            return self._commit(happening)
        if isinstance(happening, FinishLine):
            self._prefixes.pop(happening.key, None)
        elif isinstance(happening, ExpireLine):
            for key in happening.keys:
                self._prefixes.pop(key, None)
        return happening

    def _add(self, request: Request) -> AddLine:
        salt = self._salts.setdefault(request.cache_salt, len(self._salts))
        self._prefixes[request.key] = salt.to_bytes(8)
        return AddLine(
            request.key,
            request.priority,
            request.max_tokens,
            request.min_tokens_to_end,
            request.params.prompt_logprobs,
            salt,
            [self._pseudonym(request.key, token) for token in request.prompt_token_ids],
            self._named(request.adapter),
            request.tenant,
            request.pooling,
            request.grammar is not None,
            request.task,
            request.call,
            self._numbered(request.media_keys),
            request.prediction is not None,
        )

    def _named(self, adapter: Adapter | None) -> tuple[int, int] | None:
        """An adapter's key and the number of its digest: adapters of equal digests share KV."""
        if adapter is None:
            return None
        return adapter.key, self._digests.setdefault(adapter.digest, len(self._digests))

    def _numbered(self, media_keys: Mapping[int, bytes]) -> list[tuple[int, int]]:
        """Blocks with media, and a number for each key: equal ones share KV."""
        numbers = self._media
        return [(at, numbers.setdefault(key, len(numbers))) for at, key in media_keys.items()]

    def _commit(self, committed: _Committed) -> CommitLine:
        result = committed.result
        ends = {event.key: event for event in committed.events if event.finish_reason is not None}
        token_ids = []
        for key, row in zip(self._steps.pop(result.step_id), result.rows, strict=True):
            ended = ends.get(key)
            if ended is not None and ended.stop_token_id is not None:
                kept = len(ended.token_ids)
                before = [self._pseudonym(key, token) for token in row.token_ids[: kept - 1]]
                token_ids.append([*before, END_TOKEN, *(0 for _ in row.token_ids[kept:])])
            elif key in self._prefixes:
                token_ids.append([self._pseudonym(key, token) for token in row.token_ids])
            else:
                # The request had ended, so the scheduler drops these tokens.
                token_ids.append([0 for _ in row.token_ids])
        for key in ends:
            self._prefixes.pop(key, None)
        rests = [(index, row.rests) for index, row in enumerate(result.rows) if row.rests]
        return CommitLine(result.step_id, token_ids, rests)

    def _pseudonym(self, key: int, token_id: int) -> int:
        digest = hashlib.blake2b(
            self._prefixes[key] + token_id.to_bytes(8), key=self._secret, digest_size=16
        ).digest()
        self._prefixes[key] = digest
        return int.from_bytes(digest[:_PSEUDONYM_BYTES])
