"""Requests that hold a row and blocks: taking them, growing, and giving them back at the fence.

A step that was launched may still read and write its rows and their blocks. So a request that ends
or is preempted is only *marked* here (``leave``); its row and blocks come back when the last
launched step that names it is committed (``release``).
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from src.core.plan import BlockAppend, RowInstall
from src.engine.kv.block_pool import InvariantError, blocks_for
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
            limits.num_blocks, limits.block_size, enabled=limits.enable_prefix_caching
        )
        self.pool = self.cache.pool
        self.rows = RowTable(limits.max_num_seqs)
        self.running: list[RequestState] = []
        self.leaving: list[RequestState] = []
        # Digest of a known block that is about to be computed -> by whom.
        self._frontiers: dict[bytes, RequestState] = {}

    # Coming in.

    def cached_prefix(self, state: RequestState) -> Match:
        """The cached blocks that a waiting request could start from."""
        if not self.cache.enabled or not state.may_read_cache:
            return Match()
        if state.match is None:
            state.match = Match()
        self.cache.follow(state.match, state.chain, state.token_ids)
        return state.match

    def is_led(self, state: RequestState, match: Match, prefill_limit: int) -> bool:
        """Whether a running request is about to compute most of what this one would have to.

        Then waiting for it costs a step or two, and saves time and blocks. What is waited for is on
        its way to the device: while there is budget to admit anybody, every running row has got all
        that it wants of it. ``prefill_limit`` is what the step takes of prompts at most.
        """
        start = len(match.blocks) * self.limits.block_size
        missing = len(state.token_ids) - start
        # What is little of a step is computed again sooner than waited for.
        enough = max(self.limits.block_size + 1, prefill_limit // 16)
        if not self._frontiers or not state.may_read_cache or missing < enough:
            return False
        leader = self._frontiers.get(state.chain.digest(len(match.blocks), state.token_ids))
        if leader is None:
            return False
        if state.leader is None or state.leader[0] != leader.key:
            half = slice(start, start + (missing + 1) // 2)
            state.leader = leader.key, leader.token_ids[half] == state.token_ids[half]
        return state.leader[1]

    def lookahead(self, state: RequestState) -> int:
        """Blocks that a running request will take in its next few tokens."""
        soon = min(state.target + self.limits.lookahead_tokens, state.max_kv_tokens)
        return max(0, blocks_for(soon, self.limits.block_size) - len(state.block_ids))

    def fits(self, state: RequestState, match: Match, reserve: int) -> bool:
        """Whether a request's known tokens and the next few fit, with ``reserve`` blocks left.

        With nobody resident this is true of all that passed the door.
        """
        soon = min(len(state.token_ids) + self.limits.lookahead_tokens, state.max_kv_tokens)
        missing = blocks_for(soon, self.limits.block_size) + reserve - self.pool.num_free
        # Only hits that somebody holds help: the others are counted as free, but will not be. To
        # count them takes a while, so first what needs no counting.
        if missing <= 0:
            return True
        if missing > min(len(match.blocks), self.pool.num_held):
            return False
        return missing <= match.num_held(self.pool)

    def install(self, state: RequestState, match: Match) -> RowInstall:
        """Give a request a row and blocks for all its known tokens, starting from its hits."""
        hits = match.blocks
        state.match = None
        block_size = self.limits.block_size
        tokens = state.token_ids
        # Hits first: what is held is not evicted for the rest.
        self.pool.share(hits)
        table = hits + self.pool.allocate(blocks_for(len(tokens), block_size) - len(hits))
        row, generation = self.rows.take()
        state.take_row(row, generation, table, capacity=len(table) * block_size)
        state.start_from(len(hits) * block_size, registered=len(hits), epoch=self.cache.epoch)
        insort(self.running, state, key=_by_rank)
        self._advance(state)
        return RowInstall(row, generation, state.key, list(tokens), state.prompt_len, list(table))

    def append_block(self, state: RequestState) -> BlockAppend:
        """Give a running request its next block; there must be one."""
        blocks = self.pool.allocate(1)
        append = BlockAppend(state.row, len(state.block_ids), blocks)
        state.block_ids.extend(blocks)
        state.capacity += self.limits.block_size
        return append

    def register(self, state: RequestState) -> None:
        """Offer the blocks that are now full of committed tokens to the prefix cache."""
        full = state.committed // self.limits.block_size
        if self.cache.enabled and state.cache_epoch == self.cache.epoch:
            for index in range(state.registered, full):
                digest = state.chain.digest(index, state.token_ids)
                self.cache.register(digest, state.block_ids[index], index)
        state.registered = full
        self._advance(state)

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
            if self._frontiers.setdefault(digest, state) is state:
                state.frontier = digest

    def _withdraw(self, state: RequestState) -> None:
        if state.frontier is not None:
            self._frontiers.pop(state.frontier, None)
            state.frontier = None

    def reset_cache(self) -> None:
        """Forget all cached prefixes; nothing that running requests compute is cached either."""
        for state in self.running:
            self._withdraw(state)
        self.cache.reset()

    # Making room.

    def blocks_are_coming(self) -> bool:
        """Whether committing the steps in flight will free a block for certain.

        Nearly every row that goes frees its last block at least: others can share that when it is
        full and committed, but before anybody is admitted then, a running row has taken its next.
        """
        ending = [state for state in self.running if state.is_exhausted]
        return self.pool.frees_some([state.block_ids for state in (*self.leaving, *ending)])

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
        self.pool.release(state.block_ids)
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
        if any(state not in self.running for state in self._frontiers.values()):
            raise InvariantError("somebody who does not run is about to compute a block")
        if self.running != sorted(self.running, key=_by_rank):
            raise InvariantError("the running requests are not in order of rank")
        self.pool.check([state.block_ids for state in holders])
        if len(holders) + self.rows.num_free != self.rows.num_rows:
            raise InvariantError(
                f"{len(holders)} rows are held and {self.rows.num_free} free "
                f"of {self.rows.num_rows}"
            )
