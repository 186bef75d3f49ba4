"""Gives rows and blocks to requests, and takes them back behind the fence.

A row has one block table per group of layers. All groups take their blocks from one pool. A group
with full attention has blocks for all known tokens from admission on. A group with a sliding window
gets blocks with the tokens that are planned, and returns the blocks that the window has passed. So
at any length it holds no more blocks than the window and the steps in flight need.

A step in flight may still read and write its rows and their blocks. So a request that ends or is
preempted is only *marked* (``leave``). Its row and blocks are taken back when the last launched
step that names it is committed (``release``).
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from src.core.adapter import NO_ADAPTER
from src.core.blocks import Chunk, blocks_for, blocks_held, first_seen, most_seen
from src.core.plan import NO_BLOCK, BlockAppend, RowInstall, RowStep, StateCopy
from src.engine.kv.block_pool import InvariantError
from src.engine.kv.prefix_cache import Match, PrefixCache
from src.engine.scheduling.adapter_slots import AdapterSlots
from src.engine.scheduling.admission import URGENT, SchedulerLimits
from src.engine.scheduling.request_state import UNTOLD, Phase, RequestState
from src.engine.scheduling.rows import RowTable
from src.engine.scheduling.snapshots import Snapshots

_by_rank = attrgetter("rank")


def first_of_tenants(running: Sequence[RequestState]) -> RequestState:
    """The running request that gives way to nobody: the oldest of those that are first in a lane.

    Not the first in rank of all, or whoever sends the least priority would be first for ever.
    """
    heads: dict[str, RequestState] = {}
    for state in running:
        heads.setdefault(state.lane, state)
    return min(heads.values(), key=lambda state: (state.lane != URGENT, state.rank[1]))


def victim_of_tenants(
    running: Sequence[RequestState], needy: RequestState, weights: Mapping[str, int]
) -> RequestState | None:
    """The request to preempt for ``needy``, where requests of several lanes run.

    It is of the lane that holds most blocks for its weight, if that is more than ``needy``'s does,
    or ranks behind ``needy`` in its own lane. The first of all (`first_of_tenants`) is nobody's
    victim and may take from everybody. So it always gets on, and something always ends.
    """
    first = first_of_tenants(running)
    held: dict[str, float] = {}
    for state in running:
        num_blocks = sum(map(len, state.held_blocks())) / weights.get(state.lane, 1)
        held[state.lane] = held.get(state.lane, 0.0) + num_blocks
    if URGENT in held:
        held[URGENT] = 0.0

    def gives_way(state: RequestState) -> bool:
        if state is first or state is needy:
            return False
        if needy is first:
            return True
        if state.lane == needy.lane:
            return state.rank > needy.rank
        return held[state.lane] > held[needy.lane]

    return min(
        filter(gives_way, running),
        key=lambda state: (-held[state.lane], -state.rank[0], state.certain, -state.rank[1]),
        default=None,
    )


class RowAllocator:
    """Knows which request holds which row and which blocks.

    Attributes
    ----------
    running
        Requests in phase RUNNING, sorted by rank.
    leaving
        Requests that ended or are being preempted, until the fence has passed.
    adapters
        The slots of adapters.
    snapshots
        When recurrent states are copied; ``None`` if they never are.
    longest
        Blocks that the longest request needs at a time.
    borrowers
        Key -> a running request that may have blocks beyond its look-ahead, for drafts.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.cache = PrefixCache(
            limits.num_blocks,
            limits.block_size,
            windows=limits.windows,
            num_snapshots=limits.num_snapshots,
            enabled=limits.enable_prefix_caching,
        )
        self.snapshots: Snapshots | None = None
        if limits.num_snapshots and limits.enable_prefix_caching:
            self.snapshots = Snapshots(self.cache, limits.block_size, limits.snapshot_interval)
        self.pool = self.cache.pool
        self.rows = RowTable(limits.max_num_seqs)
        self.adapters = AdapterSlots(limits.num_adapter_slots, limits.max_bypasses)
        self.running: list[RequestState] = []
        self.leaving: list[RequestState] = []
        # Per group of layers: the most blocks that one row needs at a time, however long it is.
        self._most = [
            sys.maxsize if window is None else blocks_held(sys.maxsize, limits.block_size, window)
            for window in limits.windows
        ]
        # (group, window)
        self._windows = [
            (group, window) for group, window in enumerate(limits.windows) if window is not None
        ]
        self.longest = limits.blocks_held(limits.max_model_len)
        self.borrowers: dict[int, RequestState] = {}
        # Digest of a block that is being computed -> the running request that computes it.
        self._in_progress: dict[bytes, RequestState] = {}

    # Coming in.

    def cached_prefix(self, state: RequestState) -> Match:
        """The longest cached prefix that a waiting request could start from."""
        if not self.cache.enabled or not state.may_read_cache:
            return Match(len(self._most))
        if state.match is None:
            state.match = Match(len(self._most))
        self.cache.follow(state.match, state.chain, state.token_ids)
        return state.match

    def waits_for_prefix(self, state: RequestState, match: Match, prefill_limit: int) -> bool:
        """Whether a running request is computing at least half of this request's missing prefix.

        Waiting for it costs a step or two, and saves compute and blocks. The prefix is certain to
        come: admission happens only when every running row got all the tokens it asked for.
        ``prefill_limit`` is the most prompt tokens that this step takes.
        """
        block_size = self.limits.block_size
        start = match.length * block_size
        missing = len(state.token_ids) - start
        # A short prefix is computed again sooner than waited for.
        enough = max(block_size + 1, prefill_limit // 16)
        if not self._in_progress or not state.may_read_cache or missing < enough:
            return False
        if self.limits.num_snapshots == 0:
            return False
        leader = self._in_progress.get(state.chain.digest(match.length, state.token_ids))
        # Only rows of its own lane are sure to be ahead of it.
        if leader is None or leader.lane != state.lane:
            return False
        bounds_pooled = self.limits.max_mixed_pooled_tokens is not None
        if bounds_pooled and leader.request.pooling and not state.request.pooling:
            # The leader gets few tokens of each step, and text shall not wait for it.
            return False
        if state.prefix_leader is None or state.prefix_leader[0] != leader.key:
            half = blocks_for(start + (missing + 1) // 2, block_size)
            is_common = half * block_size <= len(leader.token_ids) and (
                leader.chain.digest(half - 1, leader.token_ids)
                == state.chain.digest(half - 1, state.token_ids)
            )
            state.prefix_leader = leader.key, is_common
        return state.prefix_leader[1]

    def lookahead(self, state: RequestState) -> int:
        """Blocks that a running request will need soon, less those that its windows return.

        Soon means within ``limits.lookahead_tokens`` tokens behind those that are certain to come:
        nothing is reserved for drafts in flight.
        """
        blocks = self._blocks_soon(state)
        missing = 0
        for table, behind, most in zip(state.block_ids, state.behind, self._most, strict=True):
            more = min(blocks, behind + most) - len(table)
            if more > 0:
                missing += more
        return missing

    def _reserved(self, state: RequestState, group: int) -> int:
        """The part of a group in `lookahead`; negative if its table is longer than that."""
        most = min(self._blocks_soon(state), state.behind[group] + self._most[group])
        return most - len(state.block_ids[group])

    def _blocks_soon(self, state: RequestState) -> int:
        certain = state.target - state.slack
        soon = min(certain + self.limits.lookahead_tokens, state.max_kv_tokens)
        return blocks_for(soon, self.limits.block_size)

    def needed(self, state: RequestState) -> int:
        """Blocks for a request's known tokens and its lookahead, without what may be cached."""
        soon = min(len(state.token_ids) + self.limits.lookahead_tokens, state.max_kv_tokens)
        blocks = blocks_for(soon, self.limits.block_size)
        return sum([min(blocks, most) for most in self._most])

    def fits(self, state: RequestState, match: Match, reserve: int) -> bool:
        """Whether a request's known tokens and its lookahead fit, with ``reserve`` blocks left.

        With no running request this is true of every request that `check_request` accepted.
        """
        missing = self.needed(state) + reserve - self.pool.num_free
        # Only hits that some request holds reduce the need: the other hits are in `num_free`
        # already. Counting held hits is slow, so the cheap tests come first.
        if missing <= 0:
            return True
        if missing > min(match.num_blocks, self.pool.num_held):
            return False
        return missing <= match.num_held(self.pool)

    def install(self, state: RequestState, match: Match) -> RowInstall:
        """Give a request a row and blocks, starting behind its prefix hits.

        Groups with full attention get blocks for all known tokens. Groups with a window only get
        their hits here; `extend` gives them more.
        """
        state.match = None
        block_size = self.limits.block_size
        tokens, length = state.token_ids, match.length
        windows = self.limits.windows
        hits = [match.blocks(group) for group in range(len(windows))]
        # Hits are shared first, so that allocating the other blocks cannot evict them.
        for blocks in hits:
            self.pool.share(blocks)
        tables, behind = [], []
        for blocks, window in zip(hits, windows, strict=True):
            if window is None:
                missing = blocks_for(len(tokens), block_size) - length
                tables.append(blocks + self.pool.allocate(missing))
                behind.append(0)
            else:
                behind.append(length - len(blocks))
                tables.append([NO_BLOCK] * behind[-1] + blocks)
        row, generation = self.rows.take()
        state.take_row(row, generation, tables, behind, capacity=min(map(len, tables)) * block_size)
        request = state.request
        if self.limits.looks_first and request.prediction is None and request.grammar is None:
            state.rests = UNTOLD
        state.start_from(length * block_size, registered=length, epoch=self.cache.epoch)
        insort(self.running, state, key=_by_rank)
        self._advance(state)
        copies = [list(table) for table in tables]
        adapter = state.request.adapter
        return RowInstall(
            *(row, generation, state.key, list(tokens), state.prompt_len, copies),
            NO_ADAPTER if adapter is None else adapter.key,
            self.adapters.take(adapter),
        )

    def extend(self, state: RequestState, num_tokens: int) -> list[BlockAppend]:
        """Give a running request blocks for up to ``num_tokens`` more known tokens.

        It leaves as many free blocks as the other running requests need soon (`lookahead`).
        """
        size = self.limits.block_size
        wanted = blocks_for(state.launched + num_tokens, size)
        short = self.short_groups(state)
        # All short tables end at the capacity, so each lacks the same number of blocks.
        missing = wanted - state.capacity // size
        spare = self.pool.num_free - sum(
            self.lookahead(other) for other in self.running if other is not state
        )
        return self.append_blocks(state, short, max(0, min(missing, spare // len(short))))

    def spare_blocks(self) -> int:
        """Free blocks beyond what all running requests need soon (`lookahead`); may be negative."""
        return self.pool.num_free - sum(map(self.lookahead, self.running))

    def extend_for_drafts(
        self, state: RequestState, num_tokens: int, spare: int
    ) -> tuple[list[BlockAppend], int]:
        """Give a running request blocks for up to ``num_tokens`` more positions than launched.

        Of its `lookahead` it may have all, because admission keeps that free for it anyway. Further
        blocks are lent to it, as long as the longest request would fit beside them: it returns them
        when somebody wants them (`take_back_lent`).

        Parameters
        ----------
        spare
            `spare_blocks`. If it is negative there is nothing to give.

        Returns
        -------
        The blocks, and what is spare behind that.
        """
        if spare < 0:
            return [], spare
        size = self.limits.block_size
        # What is launched is a bound, and may be as far as a request gets: its table ends there.
        end = min(state.launched + num_tokens, state.max_kv_tokens)
        short = self.short_groups(state)
        own = max(0, min(self._reserved(state, group) for group in short))
        lent = max(0, (spare - self.longest) // len(short))
        missing = blocks_for(end, size) - state.capacity // size
        if missing > own and lent:
            self.borrowers[state.key] = state
        others = spare - self.pool.num_free + self.lookahead(state)
        appends = self.append_blocks(state, short, max(0, min(missing, own + lent)))
        return appends, others + self.pool.num_free - self.lookahead(state)

    def take_back_lent(self, kept: int) -> bool:
        """Take back the blocks that drafts have beyond what their rows need soon (`lookahead`).

        Those up to where steps in flight may reach stay, with ``kept`` positions behind them, until
        these are committed. Returns whether some block was taken.
        """
        before, size = self.pool.num_free, self.limits.block_size
        borrowers, self.borrowers = self.borrowers, {}
        for state in borrowers.values():
            if state.phase is not Phase.RUNNING:
                continue
            reach = blocks_for(state.launched + (kept if state.slack else 0), size)
            # All tables of a row that decodes end at one place, and so they do afterwards.
            end = max(
                len(table) + min(0, self._reserved(state, group))
                for group, table in enumerate(state.block_ids)
            )
            for table in state.block_ids:
                self.pool.release(table[max(reach, end) :])
                del table[max(reach, end) :]
            state.capacity = min(map(len, state.block_ids)) * size
            if state.slack:
                self.borrowers[state.key] = state
        return self.pool.num_free > before

    def short_groups(self, state: RequestState) -> list[int]:
        """The groups whose block tables end at the request's capacity; others reach further."""
        end = state.capacity // self.limits.block_size
        return [group for group, table in enumerate(state.block_ids) if len(table) == end]

    def append_blocks(
        self, state: RequestState, groups: list[int], count: int = 1
    ) -> list[BlockAppend]:
        """Give a running request its next ``count`` blocks of each of its short groups."""
        if not count:
            return []
        appends = []
        for group in groups:
            blocks = self.pool.allocate(count)
            table = state.block_ids[group]
            appends.append(BlockAppend(state.row, group, len(table), blocks))
            table.extend(blocks)
        state.capacity = min(map(len, state.block_ids)) * self.limits.block_size
        return appends

    def take_in(self, state: RequestState) -> None:
        """Register the blocks that are now full of committed tokens in the prefix cache.

        Blocks that no later token can see, because the window has passed them, are released.
        """
        full = state.committed // self.limits.block_size
        if self.cache.enabled and state.cache_epoch == self.cache.epoch:
            for index in range(state.registered, full):
                digest = state.chain.digest(index, state.token_ids)
                for group, table in enumerate(state.block_ids):
                    self.cache.register(digest, table[index], index, group)
        state.registered = full
        for group, window in self._windows:
            behind, first = state.behind[group], self._first_seen(state.committed, window)
            if first > behind:
                table = state.block_ids[group]
                self.pool.release(table[behind:first])
                table[behind:first] = [NO_BLOCK] * (first - behind)
                state.behind[group] = first
        self._advance(state)

    def settle(self, state: RequestState, step: RowStep, slot: int, *, is_valid: bool) -> None:
        """Name the copy of recurrent states that a committed step has made, or give it up."""
        assert self.snapshots is not None
        self.snapshots.settle(state, step, slot, is_valid=is_valid)

    def _first_seen(self, position: int, window: int | Chunk) -> int:
        """The first block that a query at ``position`` or later sees."""
        return first_seen(position, window) // self.limits.block_size

    def _advance(self, state: RequestState) -> None:
        """Publish the digest of the block that a request computes next, if its tokens are known."""
        self._withdraw(state)
        # A preempted request still registers blocks of its steps in flight, but computes no more.
        if state.phase is not Phase.RUNNING or state.cache_epoch != self.cache.epoch:
            return
        index = state.registered
        is_known = (index + 1) * self.limits.block_size <= len(state.token_ids)
        if is_known and self.cache.enabled:
            digest = state.chain.digest(index, state.token_ids)
            if self._in_progress.setdefault(digest, state) is state:
                state.in_progress = digest

    def _withdraw(self, state: RequestState) -> None:
        if state.in_progress is not None:
            self._in_progress.pop(state.in_progress, None)
            state.in_progress = None

    def reset_cache(self) -> None:
        """Forget all cached prefixes. Blocks of requests that run now will not be cached either."""
        for state in self.running:
            self._withdraw(state)
        self.cache.reset()

    # Making room.

    def blocks_are_coming(self) -> bool:
        """Whether committing the steps in flight is certain to free a block.

        A leaving row frees its blocks. A row that goes on frees the blocks that its windows pass.

        Nearly every leaving row frees at least its last block. Others can share that block only
        when it is full and committed, and before anyone is admitted then, its owner has its next.
        """
        tables = [blocks for state in self.leaving for blocks in state.held_blocks()]
        for state in self.running:
            if state.is_exhausted:
                tables += state.held_blocks()
            elif self._windows:
                tables += self._passed_blocks(state)
        return self.pool.frees_some(tables)

    def _passed_blocks(self, state: RequestState) -> list[list[int]]:
        """Per group with a window: the blocks that are released once all steps are committed."""
        size = self.limits.block_size
        # Blocks are released only when a further block has become full.
        full = state.certain // size
        if full <= state.registered:
            return []
        return [
            state.block_ids[group][state.behind[group] : self._first_seen(full * size, window)]
            for group, window in self._windows
        ]

    def victim(self, needy: RequestState) -> RequestState | None:
        """The request to preempt for ``needy``; ``None`` if there is none.

        It is of lower rank: least important priority class first, then fewest tokens to recompute,
        then latest arrival. With several tenants see `victim_of_tenants`.
        """
        if any(state.lane != needy.lane for state in self.running):
            return victim_of_tenants(self.running, needy, self.limits.weights)
        behind = [state for state in self.running if state.rank > needy.rank]
        return min(
            behind,
            key=lambda state: (-state.rank[0], state.certain, -state.rank[1]),
            default=None,
        )

    # Going out.

    def leave(self, state: RequestState, phase: Phase) -> None:
        """Mark a running request as ended or being preempted. It keeps its row and blocks."""
        state.phase = phase
        self._withdraw(state)
        self.borrowers.pop(state.key, None)
        self.running.remove(state)
        self.leaving.append(state)

    def release(self, state: RequestState) -> None:
        """Take row and blocks back: no step in flight names the request any more."""
        self.leaving.remove(state)
        for blocks in state.held_blocks():
            self.pool.release(blocks)
        self.rows.release(state.row, state.generation)
        self.adapters.release(state.request.adapter)
        state.leave_row()

    # Checks of invariants.

    def check_idle(self) -> None:
        """Check by counters that no block and no row is held; O(1).

        A leaked block is still counted as held. A block that was released twice breaks the sum.

        Raises
        ------
        InvariantError
            A block or a row is held, or the sum is wrong.
        """
        pool = self.pool
        if not pool.is_whole or pool.num_held:
            raise InvariantError(
                f"idle, but {pool.num_held} blocks are held and {pool.num_free} free or cached, "
                f"of {pool.num_blocks}"
            )
        states = self.cache.states
        if states is not None and (states.pool.num_held or not states.pool.is_whole):
            raise InvariantError(f"idle, but {states.pool.num_held} snapshot slots are held")
        if self.adapters.num_users:
            raise InvariantError(f"idle, but {self.adapters.num_users} rows use adapters")
        if self.rows.num_free != self.rows.num_rows:
            raise InvariantError(
                f"idle, but {self.rows.num_free} rows are free of {self.rows.num_rows}"
            )

    def check(self, saves: Sequence[StateCopy] = ()) -> None:
        """Check every block and row against the requests' tables; O(blocks).

        ``saves`` are the copies of recurrent states that steps in flight make.

        Raises
        ------
        InvariantError
            A table, a reference count or a row is wrong.
        """
        holders = [*self.running, *self.leaving]
        if any(state not in self.running for state in self._in_progress.values()):
            raise InvariantError("somebody who does not run is about to compute a block")
        if self.running != sorted(self.running, key=_by_rank):
            raise InvariantError("the running requests are not in order of rank")
        self.pool.check([blocks for state in holders for blocks in state.held_blocks()])
        if self.cache.states is not None:
            self.cache.states.check([save.slot for save in saves])
        adapters = [state.request.adapter for state in holders]
        self.adapters.check([each.key for each in adapters if each is not None])
        for state in holders:
            self._check_tables(state)
        if len(holders) + self.rows.num_free != self.rows.num_rows:
            raise InvariantError(
                f"{len(holders)} rows are held and {self.rows.num_free} free "
                f"of {self.rows.num_rows}"
            )

    def _check_tables(self, state: RequestState) -> None:
        size = self.limits.block_size
        if state.capacity != min(map(len, state.block_ids)) * size:
            raise InvariantError(f"request {state.key}: its tables do not hold its capacity")
        for table, behind in zip(state.block_ids, state.behind, strict=True):
            if table[:behind].count(NO_BLOCK) != behind or NO_BLOCK in table[behind:]:
                raise InvariantError(f"request {state.key}: a gap in what it holds")
        for group, window in self._windows:
            held = len(state.block_ids[group]) - state.behind[group]
            # Positions computed since the last block became full, and those planned ahead.
            ahead = state.capacity - state.registered * size
            if held > blocks_for(most_seen(window) - 1, size) + blocks_for(ahead, size):
                raise InvariantError(f"request {state.key} holds {held} blocks of {window} tokens")
