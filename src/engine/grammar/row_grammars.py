"""Computes the token masks of constrained rows while the device runs the forward pass.

One thread follows the grammars. It gets a step's tokens as soon as the step ends, before the event
loop commits it. The device's next forward pass is running or queued by then, and only its
*sampling* waits for the masks. Batches without a constrained row do not use this.

The state of a row's grammar depends on its output tokens only. It is rebuilt from them when a
request resumes, and does not depend on the batch or the pipeline's depth. The same holds for
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
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from src.core.plan import RowFailure
from src.core.step_message import DeviceRequest
from src.engine.grammar.compiled import CompiledGrammar
from src.engine.grammar.constraints import Constraint
from src.engine.grammar.follower import Follower
from src.engine.grammar.grammar_steps import NO_TOKEN, GrammarStepper, GrammarSteps, Made, Outcome
from src.engine.grammar.look_ahead import LookAhead, Wanted
from src.engine.grammar.masks import MaskTable, RowMasks, added_masks
from src.engine.grammar.thinking import Change, RowThinking
from src.text.thinking import ThinkingGuide

logger = logging.getLogger(__name__)

# The most steps of one batch whose tokens are kept in its history.
_HISTORY = 1024
# Added to the process's niceness: the thread gets a tenth of another thread's CPU share. Not less,
# because it sometimes holds the interpreter lock, and others would wait for it.
_NICENESS = 10


@dataclass(frozen=True)
class _Batch:
    """Rows that are advanced together, prepared for many steps.

    Attributes
    ----------
    followers
        Index among the rows -> its follower, if it still has to be followed.
    history
        Per step the rows' tokens, [S] int64, that were not added to the followers yet.
    """

    rows: list[int]
    followers: dict[int, Follower]
    parts: Sequence[GrammarSteps]
    history: list[np.ndarray] = field(default_factory=list)


class _Arrival(NamedTuple):
    """A constrained request that was installed in a row, with its output tokens so far."""

    row: int
    request: DeviceRequest
    grammar: CompiledGrammar
    output_token_ids: list[int]


class RowGrammars:
    """The grammars of the rows, driven by the device thread.

    Parameters
    ----------
    max_num_rows
        Number of rows, ``max_num_seqs``.
    vocab_size
        Width of the logits.
    on_cpu
        Whether the logits are on the host.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        # Used by the device thread: constrained row -> key of its request, and changes that were
        # not sent to the grammar thread yet.
        self._rows: dict[int, int] = {}
        self._arrivals: list[_Arrival] = []
        self._departures: list[int] = []
        # Rows whose drafts for the next step were looked at.
        self._drafting: set[int] = set()
        # Rows whose grammar will have no drafts any more.
        self._undrafted: set[int] = set()
        # Handle -> compiled grammar of a request that has not ended. Any thread may add to it.
        self._held: dict[int, CompiledGrammar] = {}
        # Keys of ended requests that may still have queued work. Any thread may add to it.
        self._ended: set[int] = set()
        self._forgotten: list[int] = []
        # Used by the grammar thread: row -> its follower, and the rows' masks.
        self._followers: dict[int, Follower] = {}
        self._table = MaskTable(max_num_rows, vocab_size)
        self._stepper = GrammarStepper(self._table, vocab_size)
        self._batch: _Batch | None = None
        self._thinking = RowThinking(self._table)
        self._look_ahead = LookAhead(self._table, self._thinking, self._followers)
        # On a GPU the forward pass needs no CPU, so the thread keeps its normal priority.
        begin = _give_way if on_cpu else None
        self._thread = ThreadPoolExecutor(1, "slipstream-grammar", begin)

    def hold(self, handle: int, grammar: CompiledGrammar) -> None:
        """Keep a grammar until its request, whose key is ``handle``, is forgotten.

        Any thread may call it.
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
        """Mark a row as unconstrained."""
        self._undrafted.discard(row)
        if self._rows.pop(row, None) is not None:
            self._departures.append(row)
        self._thinking.vacate(row)

    def abandon(self, key: int) -> None:
        """Skip queued work of a request that has ended; `forget` must follow.

        Any thread may call it, because the device thread may be waiting for that work.
        """
        self._ended.add(key)

    def forget(self, key: int) -> None:
        """Release the grammar of a request that has ended, if it has one."""
        self._ended.add(key)
        self._forgotten.append(key)
        self._held.pop(key, None)
        self._thinking.forget(key)
        # Several rows, if it was preempted and no other request took its former row since.
        for row in [row for row, owner in self._rows.items() if owner == key]:
            del self._rows[row]
            self._departures.append(row)

    def begin(self) -> None:
        """Begin to compute the first masks of newly installed requests."""
        self._drafting = set()
        forgotten, self._forgotten = self._forgotten, []
        changes = self._thinking.take_changes()
        if not (self._arrivals or self._departures or changes):
            # Requests that left no row have no queued work that matters.
            self._ended.difference_update(forgotten)
            return
        arrivals, self._arrivals = self._arrivals, []
        departures, self._departures = self._departures, []
        rows = [arrival.row for arrival in arrivals] + [change.row for change in changes]
        self._submit(rows, self._exchange, departures, arrivals, changes, forgotten)

    def leaves_free(self, row: int, position: int) -> bool:
        """Whether nothing here restricts what the row samples up to this position."""
        return row not in self._rows and not self._thinking.may_force((row,), (position,))

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The drafts of each of these rows in the next step; see `LookAhead.choose`.

        This waits until their newest tokens are followed: before that nobody knows what they may
        be. The masks behind drafts are computed while the forward pass runs, like all masks.
        """
        self._drafting = {each.row for each in wanted}
        owners = [self._rows.get(each.row) for each in wanted]
        drafts, without = self._thread.submit(self._choose_drafts, wanted, owners).result()
        self._undrafted.update(without)
        return drafts

    def follows(self, row: int) -> bool:
        """Whether the row's tokens are followed, for a grammar or a budget of thinking."""
        return row in self._rows or self._thinking.follows((row,))

    def never_drafts(self, row: int) -> bool:
        """Whether the row's request will have no drafts any more, so that nobody need wait."""
        return row in self._undrafted

    def masks(
        self, rows: Sequence[int], positions: Sequence[int], *, as_bits: bool = False
    ) -> Future[RowMasks] | None:
        """The masks of these rows at these positions; ``None`` if none of them is constrained.

        A row with drafts comes several times, at each of its positions.

        On the CPU, ``as_bits`` says that bits are enough, and need not be made what is added.
        """
        is_free = self._rows.keys().isdisjoint(rows)
        if is_free and not self._thinking.may_force(rows, positions):
            return None
        owners = [self._rows.get(row) for row in rows]
        drafting, self._drafting = self._drafting, set()
        adds = self._on_cpu and not as_bits
        if len(set(rows)) == len(rows):
            return self._thread.submit(self._gather, list(rows), owners, adds=adds)
        return self._thread.submit(
            self._gather_with_drafts, list(rows), owners, drafting=drafting, adds=adds
        )

    def follow(self, rows: Sequence[int], read: Callable[[], Any]) -> None:
        """Follow the tokens that these rows sample. ``read`` returns them, and may block."""
        if not self._rows.keys().isdisjoint(rows) or self._thinking.follows(rows):
            self._submit(list(rows), self._advance, list(rows), read)

    def follow_verified(self, rows: Sequence[int], taken: Sequence[Sequence[int]]) -> None:
        """Follow these rows in a step with drafts: of each, its accepted drafts and one token."""
        if not self._rows.keys().isdisjoint(rows) or self._thinking.follows(rows):
            self._submit(list(rows), self._advance_verified, list(rows), taken)

    def close(self) -> None:
        """Stop the threads."""
        self._thread.shutdown(wait=True)
        self._stepper.close()

    def _submit(self, rows: list[int], function: Callable[..., None], *arguments: Any) -> None:
        def contained() -> None:
            try:
                function(*arguments)
            # A panic of the library is not an Exception. Any error ends these requests only.
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
                # A panic of the library is not an Exception. An error must not stop the others.
                try:
                    self._arrive(arrival)
                except BaseException:
                    logger.exception("a grammar could not be begun")
                    self._followers.pop(arrival.row, None)
            rows = dict.fromkeys(arrival.row for arrival in arrivals)
            self._advance_matchers(self._prepare(list(rows)).parts)
        finally:
            # All work that was queued for these requests has been done by now.
            self._ended.difference_update(forgotten)

    def _arrive(self, arrival: _Arrival) -> None:
        row, request, grammar, output_token_ids = arrival
        self._followers.pop(row, None)
        if request.key in self._ended:
            return
        # A constraint must compute a mask per token, so it is used only without earlier output.
        is_new = self._stepper.can_constrain() and not output_token_ids
        lane = self._stepper.lane(row) if is_new else None
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
        # The step has failed, and so have its requests.
        except Exception as error:
            logger.debug("the tokens of a failed step are not followed: %s", error)
            return
        if len(token_ids) != len(rows):
            raise ValueError(f"expected tokens of {len(rows)} rows, got {token_ids.tolist()}")
        self._take(rows, token_ids)

    def _advance_verified(self, rows: list[int], taken: Sequence[Sequence[int]]) -> None:
        # The history of the batch comes before what its rows take here.
        self._dissolve()
        for row, token_ids in zip(rows, taken, strict=True):
            if accepted := list(token_ids[:-1]):
                self._thinking.take([row] * len(accepted), np.array(accepted, np.int64))
                follower = self._followers.get(row)
                if follower is not None and follower.is_live:
                    follower.take(accepted)
        self._take(rows, np.array([token_ids[-1] for token_ids in taken], np.int64))

    def _take(self, rows: list[int], token_ids: np.ndarray) -> None:
        """The rows have sampled one more token each."""
        self._thinking.take(rows, token_ids)
        if token_ids.min() < 0:
            self._drop(rows, token_ids)
        batch = self._batch
        # A batch is prepared again if its rows changed, or if a request may have ended.
        if batch is None or batch.rows != rows or self._ended or len(batch.history) == _HISTORY:
            self._dissolve()
            batch = self._batch = self._prepare(rows)
        batch.history.append(token_ids)
        for part in batch.parts:
            part.take(token_ids)
        self._advance_matchers(batch.parts)

    def _drop(self, rows: list[int], token_ids: np.ndarray) -> None:
        """Fail the rows for which no token could be sampled. The other rows go on."""
        self._dissolve()
        for entry in np.flatnonzero(token_ids < 0).tolist():
            if (follower := self._followers.get(rows[entry])) is not None:
                follower.fail("no token could be sampled")

    def _prepare(self, rows: list[int]) -> _Batch:
        """A batch of the rows that still have to be followed."""
        followers = {
            entry: follower
            for entry, row in enumerate(rows)
            if (follower := self._followers.get(row)) is not None and follower.is_live
        }
        matchers = [follower.matcher for follower in followers.values()]
        chosen = [rows[entry] for entry in followers]
        return _Batch(rows, followers, self._stepper.prepare(matchers, chosen, list(followers)))

    def _dissolve(self) -> None:
        """End the current batch, and add its history to the followers' tokens."""
        batch, self._batch = self._batch, None
        if batch is not None and batch.history:
            history = np.stack(batch.history)  # [steps, S]
            for entry, follower in batch.followers.items():
                follower.token_ids += history[:, entry].tolist()

    def _advance_matchers(self, parts: Sequence[GrammarSteps]) -> None:
        """Advance matchers, and fail the rows that cannot go on."""
        while parts:
            left: list[GrammarSteps] = []
            for part, made in zip(parts, self._stepper.make(parts), strict=True):
                left += self._settle(part, made)
                # Requests may have ended while one matcher took long.
                behind = range(made.num_steps, len(part))
                if live := [i for i in behind if self._followers[part.rows[i]].is_live]:
                    left.append(part.only(live))
            parts = left

    def _settle(self, part: GrammarSteps, made: Made) -> list[GrammarSteps]:
        """Handle the outcome of the last advanced matcher; returns further work for its row."""
        last, outcome = made.num_steps - 1, made.outcome
        row = part.rows[last]
        follower = self._followers[row]
        follower.charge(made.seconds, 1 if part.numbers[last, 2] == NO_TOKEN else 2)
        if outcome == Outcome.ADVANCED and not follower.ended:
            return []
        self._dissolve()
        if follower.ended or outcome == Outcome.ENDED:
            follower.ended = True
        elif outcome == Outcome.NOTHING_POSSIBLE:
            follower.fail("no token continues what the grammar asks for")
        elif follower.recover(is_complete=outcome == Outcome.COMPLETE):
            return [GrammarSteps([follower.matcher], [row], [0])]
        return []

    def _choose_drafts(
        self, wanted: Sequence[Wanted], owners: Sequence[int | None]
    ) -> tuple[list[list[int]], list[int]]:
        # Followers have all of their tokens then, and may change their matchers.
        self._dissolve()
        drafts = self._look_ahead.choose(wanted, owners)
        return drafts, self._look_ahead.without_drafts(wanted, owners)

    def _gather(self, rows: list[int], owners: list[int | None], *, adds: bool) -> RowMasks:
        forced, failures = self._choose_masks(rows, owners)
        return RowMasks(
            self._table.table,
            rows,
            self._table.added(rows) if adds else None,
            failures,
            forced,
        )

    def _gather_with_drafts(
        self, rows: list[int], owners: list[int | None], *, drafting: set[int], adds: bool
    ) -> RowMasks:
        """The same of a step in which rows have drafts, with a mask behind each of them."""
        firsts = [entry for entry, row in enumerate(rows) if entry == 0 or row != rows[entry - 1]]
        own = [rows[entry] for entry in firsts]
        chosen, failures = self._choose_masks(own, [owners[entry] for entry in firsts])
        forced = [firsts[index] for index in chosen]
        # [S, W] int32, and per entry whether that restricts it.
        packed = np.full((len(rows), self._table.masks.shape[1]), -1, np.int32)
        restricts = [False] * len(rows)
        for index, (first, end) in enumerate(pairwise([*firsts, len(rows)])):
            has_mask, behind = own[index] >= 0, end - first - 1
            if has_mask:
                packed[first], restricts[first] = self._table.masks[own[index]], True
            if behind and rows[first] in drafting:
                has_grammar = has_mask and owners[first] is not None
                masks, musts = self._look_ahead.masks_behind(
                    rows[first], behind, has_grammar=has_grammar
                )
                forced += [first + 1 + place for place in musts]
                for entry, mask in enumerate(masks, first + 1):
                    if mask is not None:
                        packed[entry], restricts[entry] = mask, True
        return RowMasks(
            torch.from_numpy(packed),
            [entry if restricts[entry] else -1 for entry in range(len(rows))],
            added_masks(packed, self._table.vocab_size) if adds else None,
            failures,
            forced,
        )

    def _choose_masks(
        self, rows: list[int], owners: Sequence[int | None]
    ) -> tuple[list[int], list[RowFailure]]:
        """Which rows have one token to choose, and failures; rows without a mask become -1."""
        forced, failures = self._thinking.force(rows)
        for entry, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            if entry in forced:
                continue
            # Tokens of an ended request are dropped. It is unconstrained, so that sampling works.
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
        return forced, failures


def _give_way() -> None:
    """Lower the priority of the calling thread and of the threads that it starts.

    Masks are needed when a forward pass ends and computed while it runs. They should use only CPUs
    that the pass leaves idle, because every delay of the pass makes the step longer.
    """
    # On other systems niceness applies to the whole process.
    if sys.platform == "linux":
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
        # If that is forbidden, the priority stays unchanged.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
