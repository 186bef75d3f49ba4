from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest

from src.engine.kv import hash_chain, prefix_cache
from src.engine.kv.block_pool import InvariantError
from src.engine.kv.hash_chain import HashChain, chain_root
from src.engine.kv.prefix_cache import Match, PrefixCache

TOKENS = [5, 6, 7, 8, 9, 10]


def chain_of(salt: str = "", block_size: int = 2) -> HashChain:
    return HashChain(block_size, chain_root("model", "layout", salt))


def fill(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Compute a sequence's full blocks and let go of them."""
    chain = chain_of(salt)
    table = cache.pool.allocate(len(tokens) // 2)
    for index, block in enumerate(table):
        cache.register(chain.digest(index, tokens), block, index)
    cache.pool.release(table)
    return table


def test_a_digest_names_all_tokens_up_to_its_block_and_the_salt() -> None:
    def digest(tokens: list[int], salt: str = "") -> bytes:
        return chain_of(salt).digest(1, tokens)

    assert digest(TOKENS) == digest(TOKENS[:4])
    assert digest(TOKENS) != digest([4, 6, 7, 8])
    assert digest(TOKENS) != digest([7, 8, 5, 6])
    assert digest(TOKENS) != digest(TOKENS, "other")
    assert digest([2**40, 1, 1, 1]) != digest([1, 1, 1, 1])
    # The salt is length-safe: it cannot be continued by tokens.
    assert len({digest(TOKENS, salt) for salt in ("", "a", "aa", "\0")}) == 4


def test_a_digest_of_a_block_that_is_not_full_is_refused() -> None:
    with pytest.raises(InvariantError, match="not full"):
        chain_of("", 4).digest(0, [1, 2, 3])


def test_sequences_with_a_common_beginning_hash_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    sha256 = hashlib.sha256

    def counting(content: bytes) -> Any:
        hashed.append(len(content))
        return sha256(content)

    prompt = list(range(11))  # five blocks, and one of the next
    sequences = [[*prompt, *[100 + number] * 6] for number in range(4)]
    expected = [[chain_of("a").digest(i, tokens) for i in range(8)] for tokens in sequences]
    monkeypatch.setattr(hash_chain.hashlib, "sha256", counting)
    trunk = chain_of("a")
    chains = [trunk, *(trunk.branch(len(prompt)) for _ in range(3))]
    # In any order: behind the prompt, in it, and of the trunk last.
    for chain, tokens, digests in reversed(list(zip(chains, sequences, expected, strict=True))):
        for index in (7, 2, 0, 5):
            assert chain.digest(index, tokens) == digests[index]
    assert len({digests[5] for digests in expected}) == 4
    # The prompt's blocks, and what each has of its own; their root is remembered.
    assert len(hashed) == 5 + 4 * 3


def test_the_longest_known_prefix_is_found_but_never_all_of_it() -> None:
    cache = PrefixCache(8, 2)
    table = fill(cache, TOKENS)
    assert cache.match(chain_of(), TOKENS).blocks() == table[:2]
    assert cache.match(chain_of(), [*TOKENS, 1]).blocks() == table
    assert cache.match(chain_of(), [*TOKENS[:5], 1, 1]).blocks() == table[:2]
    assert cache.match(chain_of(), [1, *TOKENS]).blocks() == []
    assert cache.match(chain_of("salt"), [*TOKENS, 1]).blocks() == []
    assert cache.match(chain_of(), TOKENS[:1]).blocks() == []


def test_a_gap_ends_the_match() -> None:
    cache = PrefixCache(3, 2)
    table = fill(cache, TOKENS)
    cache.pool.share(table[::2])
    cache.pool.allocate(1)  # evicts the middle
    assert cache.match(chain_of(), [*TOKENS, 1]).blocks() == table[:1]


def test_the_same_content_twice_keeps_the_first_block() -> None:
    cache = PrefixCache(4, 2)
    chain = chain_of()
    first, second = cache.pool.allocate(2)
    assert cache.register(chain.digest(0, TOKENS), first, 0)
    assert not cache.register(chain.digest(0, TOKENS), second, 0)
    cache.pool.release([first, second])
    assert len(cache) == cache.pool.num_cached == 1
    assert cache.match(chain_of(), TOKENS).blocks() == [first]


def test_eviction_forgets_the_content() -> None:
    cache = PrefixCache(3, 2)
    table = fill(cache, TOKENS)
    cache.pool.release(cache.pool.allocate(1))
    assert cache.match(chain_of(), [*TOKENS, 1]).blocks() == table[:2]
    cache.pool.release(cache.pool.allocate(3))
    assert len(cache) == 0
    assert fill(cache, TOKENS)


class CountedChain(HashChain):
    """Counts how often it is asked for a digest."""

    asked = 0

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        self.asked += 1
        return super().digest(index, token_ids)


def test_evictions_of_others_cost_a_match_nothing() -> None:
    cache = PrefixCache(6, 2)
    others, own = fill(cache, [50, 51, 52, 53, 54, 55]), fill(cache, TOKENS)
    chain, tokens = CountedChain(2, chain_root("model", "layout", "")), [*TOKENS, 1]
    match = cache.match(chain, tokens)
    assert match.blocks() == own
    chain.asked = 0
    # The last one of the others, which is at the place of the last one of its own.
    assert cache.pool.allocate(1) == [others[2]]
    cache.follow(match, chain, tokens)
    assert (match.blocks(), chain.asked) == (own, 0)


def test_reset_forgets_everything() -> None:
    cache = PrefixCache(4, 2)
    fill(cache, TOKENS)
    cache.reset()
    assert len(cache) == cache.pool.num_cached == 0
    assert cache.match(chain_of(), TOKENS).blocks() == []
    cache.pool.check([])
    table = fill(cache, TOKENS)
    assert cache.match(chain_of(), TOKENS).blocks() == table[:2]


@pytest.mark.parametrize("remembered", [3, 4096])
def test_a_followed_match_is_what_a_new_look_finds(
    remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "_MAX_REMEMBERED", remembered)
    rng = random.Random(remembered)
    cache = PrefixCache(12, 2)
    sequences = [[5, 6, 7, 8] * 3 + [i % 3, i % 2, i, 9] * 2 for i in range(6)]
    followed = [(sequence, chain_of(), Match()) for sequence in sequences]
    held: list[list[int]] = []
    lengths = set()
    for turn in range(3000):
        match rng.randrange(4):
            case 0:
                tokens = rng.choice(sequences)[: 2 * rng.randint(1, 10)]
                hits = cache.match(chain_of(), [*tokens, 0]).blocks()
                if len(tokens) // 2 <= cache.pool.num_free:
                    cache.pool.share(hits)
                    table = hits + cache.pool.allocate(len(tokens) // 2 - len(hits))
                    chain = chain_of()
                    for index, block in enumerate(table):
                        cache.register(chain.digest(index, tokens), block, index)
                    held.append(table)
            case 1 if held:
                cache.pool.release(held.pop(rng.randrange(len(held))))
            case 2 if cache.pool.num_free:
                held.append(cache.pool.allocate(1))
            case 3 if turn % 50 == 0:
                cache.reset()
        for sequence, chain, match in rng.sample(followed, 3):
            cache.follow(match, chain, sequence)
            assert match.blocks() == cache.match(chain_of(), sequence).blocks()
            assert match.num_held(cache.pool) == sum(map(cache.pool.is_held, match.blocks()))
            lengths.add(len(match.blocks()))
        cache.pool.check(held)
    assert len(lengths) > 5
