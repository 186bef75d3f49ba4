"""Decides when a row's recurrent states are copied to the prefix cache, and from it.

Each row owns running states on the device, which every step overwrites. A prefix hit needs a copy
that was made at exactly its length. A copy has the size of many blocks, so few are made. They are
due

1. at the end of the last full block of the tokens known at admission, where the same prompt, or a
   conversation that goes on from it, resumes;
2. where the blocks of other groups were found up to a length without a copy: another request has
   the same beginning, and a third one may come;
3. at every ``snapshot_interval`` blocks, of prompts and of outputs.

A prefill chunk ends where a copy is due. If all slots are held by steps in flight, a copy is left
out; nobody waits for a slot. A row has no drafts up to where a copy is due, and where drafts in
flight reach that all the same, the copy is left out.
"""

from __future__ import annotations

from src.core.plan import RowStep, StateCopy
from src.engine.kv.block_pool import InvariantError
from src.engine.kv.prefix_cache import Match, PrefixCache
from src.engine.kv.state_cache import StateCache
from src.engine.scheduling.request_state import RequestState


class Snapshots:
    """Plans the copies, and names those that committed steps have made.

    Parameters
    ----------
    cache
        A prefix cache with snapshot slots.
    block_size
        Tokens per block.
    interval
        Blocks between copies.
    """

    def __init__(self, cache: PrefixCache, block_size: int, interval: int) -> None:
        assert cache.states is not None
        self._cache = cache
        self._states: StateCache = cache.states
        self._block_size = block_size
        self._interval = interval * block_size

    def begin(self, state: RequestState, match: Match) -> list[StateCopy]:
        """The copy with which a request that has just taken its row begins, if it has a hit."""
        size = self._block_size
        due = {match.reach * size, (len(state.token_ids) - 1) // size * size}
        state.snapshots_due = sorted(each for each in due if each > state.launched)
        if not match.length:
            return []
        digest = state.chain.digest(match.length - 1, state.token_ids)
        return [StateCopy(state.row, self._states.use(digest))]

    def cut(self, state: RequestState, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens a chunk takes, so that it ends where due."""
        start = state.launched
        end = min(start + num_tokens, (start // self._interval + 1) * self._interval)
        for due in state.snapshots_due:
            if start < due < end:
                return due - start
        return end - start

    def until_next(self, state: RequestState) -> int:
        """Positions behind the launched ones up to the next regular copy; 0 or less: in flight."""
        certain = state.launched - state.slack
        return (certain // self._interval + 1) * self._interval - state.launched

    def take(self, state: RequestState) -> StateCopy | None:
        """The copy that the step just planned for a request makes at its end, if one is due."""
        end = state.launched
        # Behind drafts in flight nobody knows where the states stand.
        if state.slack or end % self._block_size or state.cache_epoch != self._cache.epoch:
            return None
        if end % self._interval and end not in state.snapshots_due:
            return None
        length = end // self._block_size
        is_known = end <= len(state.token_ids)
        if is_known and state.chain.digest(length - 1, state.token_ids) in self._states:
            return None
        slot = self._states.take()
        return None if slot is None else StateCopy(state.row, slot)

    def settle(self, state: RequestState, step: RowStep, slot: int, *, is_valid: bool) -> None:
        """Name the copy of a committed step, or give it up.

        ``is_valid``: the request had not ended before, so its states are those of its tokens.
        """
        end = step.start + step.num_tokens
        if not is_valid or state.cache_epoch != self._cache.epoch:
            self._states.give_up(slot)
            return
        if end % self._block_size:
            raise InvariantError(f"row {step.row}: a snapshot at {end} is not at a block's end")
        length = end // self._block_size
        digest = state.chain.digest(length - 1, state.token_ids)
        self._states.register(digest, slot, length)
