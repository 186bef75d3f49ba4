"""Masks of what constrained rows may sample next, computed while the device runs the forward.

One thread follows the grammars. It learns a step's tokens where the step ends, not where the event
loop commits it: the device's next forward is running or queued by then, and only that step's
*sampling* waits for the masks. Batches without a constrained row never come here.

A row's grammar stands where its output tokens have brought it, so it is rebuilt from them when a
request resumes, and neither the batch nor the pipeline's depth has a say in it. The same holds for
thinking that has a budget.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from src.core.plan import RowFailure
from src.core.step_message import DeviceRequest
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.constraints import Constraint
from src.engine.grammar.follower import Follower
from src.engine.grammar.grammar_steps import NO_TOKEN, GrammarSteps, Made, Mover, Outcome
from src.engine.grammar.masks import MaskTable, RowMasks
from src.engine.grammar.thinking import Change, RowThinking
from src.text.thinking import ThinkingGuide

logger = logging.getLogger(__name__)

# Steps of one batch that are remembered together.
_HISTORY = 1024
# Added to what the process has: a tenth of another thread's share. Not less, since it holds the
# interpreter lock now and then, also on a machine that has no CPU to spare.
_NICENESS = 10


@dataclass(frozen=True)
class _Batch:
    """Rows that are moved together, prepared for many steps.

    Attributes
    ----------
    followers
        Place among the rows -> who follows there; those that nobody needs are left out.
    history
        Tokens of the rows, [S] int64 of each step, that no follower has been told.
    """

    rows: list[int]
    followers: dict[int, Follower]
    parts: Sequence[GrammarSteps]
    history: list[np.ndarray] = field(default_factory=list)


class _Arrival(NamedTuple):
    """A request that was given a row, with what its output has so far."""

    row: int
    request: DeviceRequest
    grammar: CompiledGrammar
    output_token_ids: list[int]


class RowGrammars:
    """The grammars of the rows, driven by the device thread.

    Parameters
    ----------
    max_num_rows
        Rows, ``max_num_seqs``.
    vocab_size
        Width of the logits.
    on_cpu
        Whether the logits are on the host too.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        # Of the device thread: the rows that are constrained, and what the grammar thread has not
        # been told yet.
        self._rows: dict[int, int] = {}
        self._arrivals: list[_Arrival] = []
        self._departures: list[int] = []
        # Handle -> compiled grammar of a request that has not ended; added to by any thread.
        self._held: dict[int, CompiledGrammar] = {}
        # Keys of ended requests of which something may be queued; written by any thread.
        self._ended: set[int] = set()
        self._forgotten: list[int] = []
        # Of the grammar thread: row -> its grammar, and what it may sample.
        self._followers: dict[int, Follower] = {}
        self._table = MaskTable(max_num_rows, vocab_size)
        self._mover = Mover(self._table, vocab_size)
        self._batch: _Batch | None = None
        self._thinking = RowThinking(self._table)
        # A forward pass on another device leaves the CPUs to whoever wants them.
        begin = _give_way if on_cpu else None
        self._thread = ThreadPoolExecutor(1, "slipstream-grammar", begin)

    def hold(self, handle: int, grammar: CompiledGrammar) -> None:
        """Keep a grammar for the request of which ``handle`` is the key, until it is forgotten.

        Of any thread.
        """
        self._held[handle] = grammar

    def hold_thinking(self, handle: int, guide: ThinkingGuide) -> None:
        """The same of what ends a request's thinking."""
        self._thinking.hold(handle, guide)

    @property
    def num_held(self) -> int:
        """What is kept for requests."""
        return len(self._held) + self._thinking.num_held

    def install(self, row: int, request: DeviceRequest, output_token_ids: list[int]) -> None:
        """Give ``row`` to a request that has this output so far.

        Raises
        ------
        LookupError
            Nothing is held by a handle that the request names.
        """
        self.vacate(row)
        if request.thinking is not None:
            self._thinking.install(row, request, output_token_ids)
        if request.grammar is not None:
            grammar = self._held.get(request.grammar)
            if grammar is None:
                raise LookupError(f"no grammar is held by the handle {request.grammar}")
            self._rows[row] = request.key
            self._arrivals.append(_Arrival(row, request, grammar, output_token_ids))

    def vacate(self, row: int) -> None:
        """Nobody in this row is constrained."""
        if self._rows.pop(row, None) is not None:
            self._departures.append(row)
        self._thinking.vacate(row)

    def abandon(self, key: int) -> None:
        """The request has ended, and :meth:`forget` will say so: what is queued for it is skipped.

        Of any thread: the device thread may be waiting for that very work.
        """
        self._ended.add(key)

    def forget(self, key: int) -> None:
        """The request has ended: let go of its grammar, if it has one."""
        self._ended.add(key)
        self._forgotten.append(key)
        self._held.pop(key, None)
        self._thinking.forget(key)
        # More than one, where it lost a row that nobody has taken since.
        for row in [row for row, owner in self._rows.items() if owner == key]:
            del self._rows[row]
            self._departures.append(row)

    def begin(self) -> None:
        """Begin to compute the first masks of those who were installed."""
        forgotten, self._forgotten = self._forgotten, []
        changes = self._thinking.take_changes()
        if not (self._arrivals or self._departures or changes):
            # Without a row it has nothing queued either, or only what is of no row any more.
            self._ended.difference_update(forgotten)
            return
        arrivals, self._arrivals = self._arrivals, []
        departures, self._departures = self._departures, []
        rows = [arrival.row for arrival in arrivals] + [change.row for change in changes]
        self._submit(rows, self._exchange, departures, arrivals, changes, forgotten)

    def masks(
        self, rows: Sequence[int], positions: Sequence[int], *, as_bits: bool = False
    ) -> Future[RowMasks] | None:
        """What these rows may sample at these positions; ``None`` if none of them is constrained.

        On the CPU, ``as_bits`` says that bits are enough, and need not be made what is added.
        """
        is_free = self._rows.keys().isdisjoint(rows)
        if is_free and not self._thinking.may_force(rows, positions):
            return None
        owners = [self._rows.get(row) for row in rows]
        return self._thread.submit(
            self._gather, list(rows), owners, adds=self._on_cpu and not as_bits
        )

    def follow(self, rows: Sequence[int], read: Callable[[], Any]) -> None:
        """These rows sample the tokens that ``read`` returns; it may block until they are there."""
        if not self._rows.keys().isdisjoint(rows) or self._thinking.follows(rows):
            self._submit(list(rows), self._advance, list(rows), read)

    def close(self) -> None:
        """Stop the threads."""
        self._thread.shutdown(wait=True)
        self._mover.close()

    def _submit(self, rows: list[int], function: Callable[..., None], *arguments: Any) -> None:
        def contained() -> None:
            try:
                function(*arguments)
            # A panic of the library is no Exception. Whatever it is, it is these requests' affair.
            except BaseException:
                logger.exception("grammars could not be followed")
                self._batch = None
                for row in rows:
                    if row in self._followers:
                        follower = self._followers[row]
                        follower.fail("the grammar could not be followed", is_own=False)
                self._thinking.lose(rows)

        self._thread.submit(contained)

    # On the grammar thread.

    def _exchange(
        self,
        departures: list[int],
        arrivals: list[_Arrival],
        changes: list[Change],
        forgotten: list[int],
    ) -> None:
        self._thinking.apply(changes)
        self._dissolve()
        for row in departures:
            self._followers.pop(row, None)
        try:
            for arrival in arrivals:
                # A panic of the library is no Exception. The others arrive all the same.
                try:
                    self._arrive(arrival)
                except BaseException:
                    logger.exception("a grammar could not be begun")
                    self._followers.pop(arrival.row, None)
            rows = dict.fromkeys(arrival.row for arrival in arrivals)
            self._move(self._prepare(list(rows)).parts)
        finally:
            # Whatever was queued for them has been.
            self._ended.difference_update(forgotten)

    def _arrive(self, arrival: _Arrival) -> None:
        row, request, grammar, output_token_ids = arrival
        self._followers.pop(row, None)
        if request.key in self._ended:
            return
        # A constraint would have to compute a mask for every token that is there already.
        is_new = self._mover.can_constrain() and not output_token_ids
        lane = self._mover.lane(row) if is_new else None
        follower = Follower(request.key, grammar, lane, self._ended)
        if isinstance(follower.matcher, Constraint):
            self._table.check_size(follower.matcher.tokenizer.vocab_size)
        self._table.install(row, request)
        self._followers[row] = follower
        if output_token_ids:
            follower.resume(output_token_ids)

    def _advance(self, rows: list[int], read: Callable[[], Any]) -> None:
        try:
            token_ids = np.array(read(), np.int64)
        # The step failed, and its requests with it.
        except Exception as error:
            logger.debug("the tokens of a failed step are not followed: %s", error)
            return
        if len(token_ids) != len(rows):
            raise ValueError(f"expected tokens of {len(rows)} rows, got {token_ids.tolist()}")
        self._thinking.take(rows, token_ids)
        if token_ids.min() < 0:
            self._drop(rows, token_ids)
        batch = self._batch
        # Somebody of it may have ended.
        if batch is None or batch.rows != rows or self._ended or len(batch.history) == _HISTORY:
            self._dissolve()
            batch = self._batch = self._prepare(rows)
        batch.history.append(token_ids)
        for part in batch.parts:
            part.take(token_ids)
        self._move(batch.parts)

    def _drop(self, rows: list[int], token_ids: np.ndarray) -> None:
        """Follow those no further for whom nothing could be sampled; the others go on."""
        self._dissolve()
        for entry in np.flatnonzero(token_ids < 0).tolist():
            if (follower := self._followers.get(rows[entry])) is not None:
                follower.fail("no token could be sampled")

    def _prepare(self, rows: list[int]) -> _Batch:
        """Those of the rows that anybody wants to know more of."""
        followers = {
            entry: follower
            for entry, row in enumerate(rows)
            if (follower := self._followers.get(row)) is not None and follower.is_live
        }
        matchers = [follower.matcher for follower in followers.values()]
        chosen = [rows[entry] for entry in followers]
        return _Batch(rows, followers, self._mover.prepare(matchers, chosen, list(followers)))

    def _dissolve(self) -> None:
        """Let each that was moved with others know what led it where it stands."""
        batch, self._batch = self._batch, None
        if batch is not None and batch.history:
            history = np.stack(batch.history)  # [steps, S]
            for entry, follower in batch.followers.items():
                follower.token_ids += history[:, entry].tolist()

    def _move(self, parts: Sequence[GrammarSteps]) -> None:
        """Make moves, and fail those that cannot go on."""
        while parts:
            left: list[GrammarSteps] = []
            for part, made in zip(parts, self._mover.make(parts), strict=True):
                left += self._settle(part, made)
                # Others may have ended while one took long.
                behind = range(made.num_moves, len(part))
                if live := [i for i in behind if self._followers[part.rows[i]].is_live]:
                    left.append(part.only(live))
            parts = left

    def _settle(self, part: GrammarSteps, made: Made) -> list[GrammarSteps]:
        """The last of some may have been slow, or lead nowhere; returns what is to be made then."""
        last, outcome = made.num_moves - 1, made.outcome
        row = part.rows[last]
        follower = self._followers[row]
        follower.charge(made.seconds, 1 if part.numbers[last, 2] == NO_TOKEN else 2)
        if outcome == Outcome.MOVED and not follower.ended:
            return []
        self._dissolve()
        if follower.ended or outcome == Outcome.ENDED:
            follower.ended = True
        elif outcome == Outcome.NOTHING_POSSIBLE:
            follower.fail("no token continues what the grammar asks for")
        elif follower.recover(is_complete=outcome == Outcome.COMPLETE):
            return [GrammarSteps([follower.matcher], [row], [0])]
        return []

    def _gather(self, rows: list[int], owners: list[int | None], *, adds: bool) -> RowMasks:
        forced, failures = self._thinking.force(rows)
        for entry, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            if entry in forced:
                continue
            # What an ended request samples is of no use, but something it must be able to.
            if owner is None or owner in self._ended:
                rows[entry] = -1
                continue
            follower = self._followers.get(row)
            if follower is None or follower.key != owner:
                failures.append(RowFailure(owner, "the grammar could not be begun", is_own=False))
                rows[entry] = -1
            elif follower.fault is not None:
                failures.append(RowFailure(owner, follower.fault, follower.is_own))
                rows[entry] = -1
        return RowMasks(
            self._table.table,
            rows,
            self._table.added(rows) if adds else None,
            failures,
            forced,
        )


def _give_way() -> None:
    """Let others have the CPUs before the calling thread, and before those that it begins.

    Masks are wanted when a forward pass ends and computed while it runs: by the CPUs that it
    leaves, since each part of it that has to wait makes the step longer.
    """
    # Elsewhere niceness is of whole processes.
    if sys.platform == "linux":
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
        # Where that is forbidden, it stays as it is.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
