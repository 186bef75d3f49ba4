"""Masks of what constrained rows may sample next, computed while the device runs the forward.

One thread follows the grammars. It learns a step's tokens where the step ends, not where the event
loop commits it: the device's next forward is running or queued by then, and only that step's
*sampling* waits for the masks. Batches without a constrained row never come here.

A row's grammar stands where its output tokens have brought it, so it is rebuilt from them when a
request resumes, and neither the batch nor the pipeline's depth has a say in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from llguidance import LLMatcher

from src.core.request import Request
from src.engine.structured.compiled import ORDINARY_CALL, CompiledGrammar, fault_of
from src.engine.structured.masks import MaskTable, RowMasks
from src.engine.structured.matcher_pool import MatcherPool

logger = logging.getLogger(__name__)

# Tokens of a request that resumes that are consumed in one call.
_CHUNK = 32
# Tokens for which a row's own time is measured, from the last slow one on.
_MEASURED_TOKENS = 16
# Added to what the process has: a tenth of another thread's share. Not less, since it holds the
# interpreter lock now and then, also on a machine that has no CPU to spare.
_NICENESS = 10
_TOO_SLOW = "following the grammar takes too long"


class _Follower:
    """One row's grammar, of the grammar thread alone.

    Attributes
    ----------
    ended
        Whether an end token was sampled, or the grammar failed: nothing more is asked of it.
    fault
        Why it cannot go on.
    num_measured
        Tokens for which its own time is to be measured, since it was among those that took long.
    """

    __slots__ = ("_budget", "end_ids", "ended", "fault", "key", "matcher", "num_measured")

    def __init__(self, request: Request) -> None:
        assert isinstance(request.grammar, CompiledGrammar)
        self.key = request.key
        self.matcher: LLMatcher = request.grammar.begin()
        self.ended = False
        self.fault: str | None = None
        self.num_measured = 0
        self.end_ids = request.end_token_ids
        self._budget = request.grammar.budget

    def mark_slow(self) -> None:
        """Measure its own time for a while."""
        self.num_measured = _MEASURED_TOKENS

    def fail(self, reason: str) -> None:
        """It cannot go on."""
        self.ended = True
        self.fault = reason

    def measure(self, call: Callable[[], object], num_calls: int = 1) -> None:
        """Let the matcher do something on this thread; where that is beyond its budget it fails."""
        # This thread's own time: a machine that is busy with other things is no fault of it.
        started = time.thread_time()
        call()
        seconds = time.thread_time() - started
        if seconds > num_calls * ORDINARY_CALL:
            self.mark_slow()
        if not self._budget.allows(seconds, num_calls):
            self.fail(_TOO_SLOW)


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
        self._arrivals: list[tuple[int, Request, list[int]]] = []
        self._departures: list[int] = []
        # Keys of ended requests of which something may be queued; written by any thread.
        self._ended: set[int] = set()
        self._forgotten: list[int] = []
        # Of the grammar thread: row -> its grammar, and what it may sample.
        self._followers: dict[int, _Follower] = {}
        self._table = MaskTable(max_num_rows, vocab_size)
        self._matchers: MatcherPool | None = None
        # A forward pass on another device leaves the CPUs to whoever wants them.
        begin = _give_way if on_cpu else None
        self._thread = ThreadPoolExecutor(1, "slipstream-grammar", begin)

    def install(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Give ``row`` to a request that has this output so far."""
        if self._rows.pop(row, None) is not None:
            self._departures.append(row)
        if request.grammar is not None:
            self._rows[row] = request.key
            self._arrivals.append((row, request, output_token_ids))

    def abandon(self, key: int) -> None:
        """The request has ended, and :meth:`forget` will say so: what is queued for it is skipped.

        Of any thread: the device thread may be waiting for that very work.
        """
        self._ended.add(key)

    def forget(self, key: int) -> None:
        """The request has ended: let go of its grammar, if it has one."""
        self._ended.add(key)
        self._forgotten.append(key)
        # More than one, where it lost a row that nobody has taken since.
        for row in [row for row, owner in self._rows.items() if owner == key]:
            del self._rows[row]
            self._departures.append(row)

    def begin(self) -> None:
        """Begin to compute the first masks of those who were installed."""
        forgotten, self._forgotten = self._forgotten, []
        if not self._arrivals and not self._departures:
            # Without a row it has nothing queued either, or only what is of no row any more.
            self._ended.difference_update(forgotten)
            return
        arrivals, self._arrivals = self._arrivals, []
        departures, self._departures = self._departures, []
        self._submit(
            [row for row, _, _ in arrivals], self._exchange, departures, arrivals, forgotten
        )

    def masks(self, rows: Sequence[int], *, as_bits: bool = False) -> Future[RowMasks] | None:
        """What these rows may sample next; ``None`` if none of them is constrained.

        On the CPU, ``as_bits`` says that bits are enough, and need not be made what is added.
        """
        if self._rows.keys().isdisjoint(rows):
            return None
        owners = [self._rows.get(row) for row in rows]
        return self._thread.submit(
            self._gather, list(rows), owners, adds=self._on_cpu and not as_bits
        )

    def follow(self, rows: Sequence[int], read: Callable[[], Sequence[int]]) -> None:
        """These rows sample the tokens that ``read`` returns; it may block until they are there."""
        if not self._rows.keys().isdisjoint(rows):
            self._submit(list(rows), self._advance, list(rows), read)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True)

    def _submit(self, rows: list[int], function: Callable[..., None], *arguments: Any) -> None:
        def contained() -> None:
            try:
                function(*arguments)
            # A panic of the library is no Exception. Whatever it is, it is these requests' affair.
            except BaseException:
                logger.exception("grammars could not be followed")
                for row in rows:
                    if row in self._followers:
                        self._followers[row].fail("the grammar could not be followed")

        self._thread.submit(contained)

    # On the grammar thread.

    def _exchange(
        self,
        departures: list[int],
        arrivals: list[tuple[int, Request, list[int]]],
        forgotten: list[int],
    ) -> None:
        for row in departures:
            self._followers.pop(row, None)
        try:
            for row, request, output_token_ids in arrivals:
                # A panic of the library is no Exception. The others arrive all the same.
                try:
                    self._arrive(row, request, output_token_ids)
                except BaseException:
                    logger.exception("a grammar could not be begun")
                    self._followers.pop(row, None)
            arrived = [(row, self._followers.get(row)) for row, _, _ in arrivals]
            self._compute([(row, follower) for row, follower in arrived if follower is not None])
        finally:
            # Whatever was queued for them has been.
            self._ended.difference_update(forgotten)

    def _arrive(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        self._followers.pop(row, None)
        if request.key in self._ended:
            return
        follower = _Follower(request)
        self._table.install(row, request)
        self._followers[row] = follower
        for start in range(0, len(output_token_ids), _CHUNK):
            if follower.ended or follower.key in self._ended:
                return
            chunk = output_token_ids[start : start + _CHUNK]
            follower.measure(partial(follower.matcher.consume_tokens, chunk), len(chunk))

    def _advance(self, rows: list[int], read: Callable[[], Sequence[int]]) -> None:
        try:
            token_ids = read()
        # The step failed, and its requests with it.
        except Exception as error:
            logger.debug("the tokens of a failed step are not followed: %s", error)
            return
        moved: list[tuple[int, _Follower]] = []
        together: list[tuple[LLMatcher, int, int]] = []
        measured: list[tuple[int, _Follower, int]] = []
        # A loop for every token of every constrained row: nothing is called that need not be.
        followers, ended = self._followers, self._ended
        for row, token_id in zip(rows, token_ids, strict=True):
            follower = followers.get(row)
            if follower is None or follower.ended or follower.key in ended:
                continue
            if token_id in follower.end_ids:
                follower.ended = True
            elif follower.num_measured:
                measured.append((row, follower, token_id))
            else:
                together.append((follower.matcher, token_id, row))
                moved.append((row, follower))
        if together and not self._pool().follow(together, self._table.masks):
            _mark_slow(moved)
        for row, follower, token_id in measured:
            if follower.key in ended:
                continue
            follower.num_measured -= 1
            follower.measure(partial(follower.matcher.consume_token, token_id))
            if self._compute_measured(row, follower):
                moved.append((row, follower))
        self._judge(moved)

    def _compute(self, arrived: list[tuple[int, _Follower]]) -> None:
        """The masks of rows whose grammars have been begun."""
        live = [each for each in arrived if not (each[1].ended or each[1].key in self._ended)]
        ordinary = [(row, follower) for row, follower in live if not follower.num_measured]
        together = [(follower.matcher, row) for row, follower in ordinary]
        slow = [(row, follower) for row, follower in live if follower.num_measured]
        if together and not self._pool().compute(together, self._table.masks):
            _mark_slow(ordinary)
        self._judge(ordinary + [each for each in slow if self._compute_measured(*each)])

    def _compute_measured(self, row: int, follower: _Follower) -> bool:
        """The mask of one that is watched, unless it has ended meanwhile."""
        if follower.ended or follower.key in self._ended:
            return False
        mask = self._table.masks[row]
        compute = follower.matcher.unsafe_compute_mask_ptr
        follower.measure(partial(compute, mask.ctypes.data, mask.nbytes))
        return True

    def _judge(self, live: Sequence[tuple[int, _Follower]]) -> None:
        """Bring what else is wished into their masks, and fail those that this leaves nothing."""
        possible = self._table.restrict([row for row, _ in live])
        for entry, (_, follower) in enumerate(live):
            if follower.matcher.is_error():
                follower.fail(fault_of(follower.matcher))
            elif possible is not None and not possible[entry] and not follower.ended:
                follower.fail("no token continues what the grammar asks for")

    def _gather(self, rows: list[int], owners: list[int | None], *, adds: bool) -> RowMasks:
        failures = []
        for entry, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            # What an ended request samples is of no use, but something it must be able to.
            if owner is None or owner in self._ended:
                rows[entry] = -1
                continue
            follower = self._followers.get(row)
            if follower is None or follower.key != owner:
                failures.append((owner, "the grammar could not be begun"))
                rows[entry] = -1
            elif follower.fault is not None:
                failures.append((owner, follower.fault))
                rows[entry] = -1
        return RowMasks(
            self._table.table, rows, self._table.added(rows) if adds else None, failures
        )

    def _pool(self) -> MatcherPool:
        if self._matchers is None:
            self._matchers = MatcherPool()
        return self._matchers


def _mark_slow(followers: Sequence[tuple[int, _Follower]]) -> None:
    """One of them was slow in a call for all of them: each is measured from now on."""
    for _, follower in followers:
        follower.mark_slow()


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
