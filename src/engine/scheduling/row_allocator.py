"""Requests that hold a row and blocks: taking them, growing, and giving them back at the fence.

A row has a block table for each group of layers, and one pool has the blocks of all. A group that
sees the whole context has blocks for all known tokens from admission on. One with a sliding window
gets them with the tokens that are planned, and gives back what the window has gone past: so a row
holds no more of them at any length than the window and what is in flight need.

A step that was launched may still read and write its rows and their blocks. So a request that ends
or is preempted is only *marked* here (``leave``); its row and blocks come back when the last
launched step that names it is committed (``release``).
"""

from __future__ import annotations

import sys
from bisect import insort
from operator import attrgetter

from src.core.blocks import blocks_for, blocks_held
from src.core.plan import NO_BLOCK, BlockAppend, RowInstall
from src.engine.kv.block_pool import InvariantError
from src.engine.kv.prefix_cache import Match, PrefixCache
from src.engine.scheduling.admission import SchedulerLimits
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.rows import RowTable

_by_rank = attrgetter("rank")


class RowAllocator:
    """Who holds which row and which blocks.

    Attributes
    ----------
    running
        Phase RUNNING, sorted by rank.
    leaving
        Ended or being preempted, behind their fence.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.cache = PrefixCache(
            limits.num_blocks,
            limits.block_size,
            windows=limits.windows,
            enabled=limits.enable_prefix_caching,
        )
        self.pool = self.cache.pool
        self.rows = RowTable(limits.max_num_seqs)
        self.running: list[RequestState] = []
        self.leaving: list[RequestState] = []
        # Per group of layers, the blocks that a row alone needs at a time, at any length.
        self._most = [
            sys.maxsize if window is None else blocks_held(sys.maxsize, limits.block_size, window)
            for window in limits.windows
        ]
        # (group, window)
        self._windows = [
            (group, window) for group, window in enumerate(limits.windows) if window is not None
        ]
        # Digest of a known block that is about to be computed -> by whom.
        self._in_progress: dict[bytes, RequestState] = {}

    # Coming in.

    def cached_prefix(self, state: RequestState) -> Match:
        """The cached blocks that a waiting request could start from."""
        if not self.cache.enabled or not state.may_read_cache:
            return Match(len(self._most))
        if state.match is None:
            state.match = Match(len(self._most))
        self.cache.follow(state.match, state.chain, state.token_ids)
        return state.match

    def waits_for_prefix(self, state: RequestState, match: Match, prefill_limit: int) -> bool:
        """Whether a running request is about to compute most of what this one would have to.

        Then waiting for it costs a step or two, and saves time and blocks. What is waited for is on
        its way to the device: while there is budget to admit anybody, every running row has got all
        that it wants of it. ``prefill_limit`` is what the step takes of prompts at most.
        """
        block_size = self.limits.block_size
        start = match.length * block_size
        missing = len(state.token_ids) - start
        # What is little of a step is computed again sooner than waited for.
        enough = max(block_size + 1, prefill_limit // 16)
        if not self._in_progress or not state.may_read_cache or missing < enough:
            return False
        leader = self._in_progress.get(state.chain.digest(match.length, state.token_ids))
        if leader is None:
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
        """Blocks that a running request will take in its next few tokens, beyond what it gives."""
        soon = min(state.target + self.limits.lookahead_tokens, state.max_kv_tokens)
        blocks = blocks_for(soon, self.limits.block_size)
        missing = 0
        for table, behind, most in zip(state.block_ids, state.behind, self._most, strict=True):
            more = min(blocks, behind + most) - len(table)
            if more > 0:
                missing += more
        return missing

    def fits(self, state: RequestState, match: Match, reserve: int) -> bool:
        """Whether a request's known tokens and the next few fit, with ``reserve`` blocks left.

        With nobody resident this is true of all that passed the door.
        """
        soon = min(len(state.token_ids) + self.limits.lookahead_tokens, state.max_kv_tokens)
        blocks = blocks_for(soon, self.limits.block_size)
        needed = sum([min(blocks, most) for most in self._most])
        missing = needed + reserve - self.pool.num_free
        # Only hits that somebody holds help: the others are counted as free, but will not be. To
        # count them takes a while, so first what needs no counting.
        if missing <= 0:
            return True
        if missing > min(match.num_blocks, self.pool.num_held):
            return False
        return missing <= match.num_held(self.pool)

    def install(self, state: RequestState, match: Match) -> RowInstall:
        """Give a request a row and blocks, starting from its hits.

        Groups that see everything get blocks for all its known tokens, the others none but hits:
        see :meth:`extend`.
        """
        state.match = None
        block_size = self.limits.block_size
        tokens, length = state.token_ids, match.length
        windows = self.limits.windows
        hits = [match.blocks(group) for group in range(len(windows))]
        # Hits first: what is held is not evicted for the rest.
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
        state.start_from(length * block_size, registered=length, epoch=self.cache.epoch)
        insort(self.running, state, key=_by_rank)
        self._advance(state)
        copies = [list(table) for table in tables]
        return RowInstall(row, generation, state.key, list(tokens), state.prompt_len, copies)

    def extend(self, state: RequestState, num_tokens: int) -> list[BlockAppend]:
        """Blocks for a running request's next ``num_tokens`` known tokens, or for fewer of them.

        It takes what is free, but for what the others will take in their next few tokens.
        """
        size = self.limits.block_size
        wanted = blocks_for(state.launched + num_tokens, size)
        short = self.short_groups(state)
        # Tables that end where the next token begins all end there.
        missing = wanted - state.capacity // size
        spare = self.pool.num_free - sum(
            self.lookahead(other) for other in self.running if other is not state
        )
        return self.append_blocks(state, short, max(0, min(missing, spare // len(short))))

    def short_groups(self, state: RequestState) -> list[int]:
        """The groups whose tables end first: behind its capacity they have no block."""
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
        """Offer the blocks that are now full of committed tokens to the prefix cache.

        Those that no token behind the committed ones will see are given back.
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

    def _first_seen(self, position: int, window: int) -> int:
        """The first block that a query at ``position``, or behind it, sees."""
        return max(0, position - window + 1) // self.limits.block_size

    def _advance(self, state: RequestState) -> None:
        """Let others know which block it computes next, as far as its tokens are known."""
        self._withdraw(state)
        # What a preempted one has in flight is registered, but it computes no more.
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
        """Forget all cached prefixes; nothing that running requests compute is cached either."""
        for state in self.running:
            self._withdraw(state)
        self.cache.reset()

    # Making room.

    def blocks_are_coming(self) -> bool:
        """Whether committing the steps in flight will free a block for certain.

        A row that goes frees its blocks, and one that goes on those that its windows go past.

        Nearly every row that goes frees its last block at least: others can share that when it is
        full and committed, but before anybody is admitted then, a running row has taken its next.
        """
        tables = [blocks for state in self.leaving for blocks in state.held_blocks()]
        for state in self.running:
            if state.is_exhausted:
                tables += state.held_blocks()
            elif self._windows:
                tables += self._passed_blocks(state)
        return self.pool.frees_some(tables)

    def _passed_blocks(self, state: RequestState) -> list[list[int]]:
        """Per group with a window, the blocks that committing the steps in flight gives back."""
        size = self.limits.block_size
        # They are given back whenever a block has become full.
        full = state.launched // size
        if full <= state.registered:
            return []
        return [
            state.block_ids[group][state.behind[group] : self._first_seen(full * size, window)]
            for group, window in self._windows
        ]

    def victim(self, needy: RequestState) -> RequestState | None:
        """Whom to preempt for ``needy``: somebody behind it, or nobody.

        The least important class first, in it the least to recompute, then the latest.
        """
        behind = [state for state in self.running if state.rank > needy.rank]
        return min(
            behind,
            key=lambda state: (-state.rank[0], state.launched, -state.rank[1]),
            default=None,
        )

    # Going out.

    def leave(self, state: RequestState, phase: Phase) -> None:
        """Mark a running request as ended or being preempted; nothing is given back yet."""
        state.phase = phase
        self._withdraw(state)
        self.running.remove(state)
        self.leaving.append(state)

    def release(self, state: RequestState) -> None:
        """Take row and blocks back: no launched step names the request any more."""
        self.leaving.remove(state)
        for blocks in state.held_blocks():
            self.pool.release(blocks)
        self.rows.release(state.row, state.generation)
        state.leave_row()

    # Proofs.

    def check_idle(self) -> None:
        """Prove by counters that nobody holds a block or a row; O(1).

        A block whose last reference was lost track of is still counted as held, and one that was
        given back twice breaks the sum.

        Raises
        ------
        InvariantError
            With what is off.
        """
        pool = self.pool
        if not pool.is_whole or pool.num_held:
            raise InvariantError(
                f"idle, but {pool.num_held} blocks are held and {pool.num_free} free or cached, "
                f"of {pool.num_blocks}"
            )
        if self.rows.num_free != self.rows.num_rows:
            raise InvariantError(
                f"idle, but {self.rows.num_free} rows are free of {self.rows.num_rows}"
            )

    def check(self) -> None:
        """Prove that every block and row is where it should be; O(blocks).

        Raises
        ------
        InvariantError
            With what is not.
        """
        holders = [*self.running, *self.leaving]
        if any(state not in self.running for state in self._in_progress.values()):
            raise InvariantError("somebody who does not run is about to compute a block")
        if self.running != sorted(self.running, key=_by_rank):
            raise InvariantError("the running requests are not in order of rank")
        self.pool.check([blocks for state in holders for blocks in state.held_blocks()])
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
            # What was computed since the last block became full, and what is planned ahead of it.
            ahead = state.capacity - state.registered * size
            if held > blocks_for(window - 1, size) + blocks_for(ahead, size):
                raise InvariantError(f"request {state.key} holds {held} blocks of {window} tokens")
