"""Of blocks, their names and their eviction."""

from tests.mutants.mutation import mutations_of

_KV = "tests/engine/kv"
_SCHEDULING = "tests/engine/scheduling"
_TESTS = (
    f"{_KV}/test_block_pool.py",
    f"{_KV}/test_prefix_cache.py",
    f"{_KV}/test_groups.py",
    f"{_SCHEDULING}/test_scheduler.py",
    f"{_SCHEDULING}/test_properties.py",
)
_STATES = (f"{_SCHEDULING}/test_snapshots.py", f"{_SCHEDULING}/test_properties.py")

MUTATIONS = (
    *mutations_of(
        "src/engine/kv/block_pool.py",
        _TESTS,
        (
            "the head of a sequence is evicted before its tail",
            "        for block in reversed(table):\n            left",
            "        for block in table:\n            left",
        ),
        (
            "the block that was used last is evicted",
            "block, _ = self._cached.popitem(last=False)",
            "block, _ = self._cached.popitem()",
        ),
        (
            "an evicted block is kept when it is given back, whatever is in it",
            "                self._keep[block] = 0\n",
            "",
        ),
        (
            "nobody learns that a cached block is held",
            "                self._num_held += 1\n                self._num_shifts += 1\n",
            "                self._num_held += 1\n",
        ),
        (
            "tables that share a block with each other alone free none",
            "return any(references[block] == count for block, count in counts.items())",
            "return False",
        ),
        (
            "held blocks survive a reset",
            "        self._keep = bytearray(self.num_blocks)\n        self._free.extend",
            "        self._free.extend",
        ),
        (
            "a block that is free is shared",
            "                if block not in self._cached:\n",
            "                if False:\n",
        ),
    ),
    *mutations_of(
        "src/engine/kv/hash_chain.py",
        _TESTS,
        (
            "media are no part of a block's name",
            'content += self._media.get(number, b"")',
            "pass",
        ),
        (
            "the end of a salt may be taken for the beginning of something else",
            'told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)',
            'told = b"".join(parts)',
        ),
        (
            "the model is no part of a block's name",
            "parts = (content_key.encode(), layout.encode()",
            'parts = (b"", layout.encode()',
        ),
        (
            "the layout is no part of a block's name",
            "parts = (content_key.encode(), layout.encode()",
            'parts = (content_key.encode(), b""',
        ),
        (
            "the salt is no part of a block's name",
            "salt.encode(), adapter)",
            'b"", adapter)',
        ),
        (
            "what comes before is no part of a block's name",
            "content = parent + tokens.tobytes()",
            "content = tokens.tobytes()",
        ),
        (
            "a branch hashes from its own beginning",
            "parent = self.digest(number - 1, token_ids) if number else self._root",
            "parent = self._root",
        ),
        (
            "a branch shares a block that is not full of the same tokens",
            "branch._num_shared = num_tokens // self._block_size",
            "branch._num_shared = -(-num_tokens // self._block_size)",
        ),
    ),
    *mutations_of(
        "src/engine/kv/prefix_cache.py",
        _TESTS,
        (
            "a hit covers the last token",
            "length = (len(token_ids) - 1) // self._block_size",
            "length = len(token_ids) // self._block_size",
        ),
        (
            "a match keeps blocks that were evicted",
            "                    match.cut(group, index)\n",
            "                    pass\n",
        ),
        (
            "held blocks of a match are not counted anew after an eviction",
            "            match.recount()\n",
            "",
        ),
        (
            "a match that missed many evictions is kept",
            "if missed > len(self._evicted):",
            "if False:",
        ),
        (
            "a match is cut though its block is another one",
            "index < len(run) and run[index] == block:",
            "index < len(run):",
        ),
        (
            "a window has to know a block that it does not see",
            "while first > self._first_needed(length, window):",
            "while first > max(0, self._first_needed(length, window) - 1):",
        ),
        (
            "a window may lack the first block that it sees",
            "while first > self._first_needed(length, window):",
            "while first > self._first_needed(length, window) + 1:",
        ),
        (
            "a second block takes the name of the first",
            "        if digest in known:\n            return False\n",
            "",
        ),
        (
            "sequences that run are named after a reset",
            "        self.epoch += 1\n",
            "",
        ),
        (
            "an evicted block keeps its name",
            "        del self._block_of[group][digest]\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/kv/state_cache.py",
        _STATES,
        (
            "a snapshot behind what other groups have is found",
            "lengths = sorted((each for each in known if each <= length), reverse=True)",
            "lengths = sorted(known, reverse=True)",
        ),
        (
            "the snapshot that is used is the first to go",
            "self.pool.share([slot])\n        self.pool.release([slot])\n        return",
            "return",
        ),
        (
            "an overwritten snapshot keeps its name",
            "        del self._slot_of[digest]\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/snapshots.py",
        _STATES,
        (
            "a chunk goes past the place of a snapshot",
            "if start < due < end:",
            "if False:",
        ),
        (
            "who shares a beginning leaves no snapshot",
            "due = {match.reach * size, ",
            "due = {",
        ),
        (
            "what a request that had ended left is named",
            "if not is_valid or state.cache_epoch",
            "if state.cache_epoch",
        ),
        (
            "snapshots from before a reset are named",
            "if not is_valid or state.cache_epoch != self._cache.epoch:",
            "if not is_valid:",
        ),
        (
            "outputs have no snapshots",
            "if end % self._interval and end not in state.snapshots_due:",
            "if end not in state.snapshots_due:",
        ),
    ),
)
