"""The requests of a simulation: lengths, arrival times and shared prefixes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence

import msgspec

from src.bench.arrivals import RampUp, arrival_times
from src.bench.dataset_files import TracedRequest
from src.core.errors import ConfigError
from src.core.request import Pooling, Request
from src.core.sampling_params import SamplingParams
from src.core.task import Task

# Number of token ids reserved per piece, so that different pieces have different ids.
_IDS_PER_PIECE = 1 << 20
# Not a token id of any piece, so no output ends by accident.
END_TOKEN = -1
_ENDS = frozenset({END_TOKEN})
_NO_ENDS: frozenset[int] = frozenset()
_PARAMS = SamplingParams()


class SimulatedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that will answer with ``output_len`` tokens, or with a vector.

    Attributes
    ----------
    at
        Seconds from the start.
    pieces
        The prompt: (identity, number of tokens) of each piece. Prompts that begin with the same
        pieces share a prefix.
    max_tokens
        The requested maximum; the scheduler does not know that the output ends sooner.
    priority
        Smaller values go first under the priority policy.
    task
        What it asks for. Its output is 0 tokens long unless that is text.
    pooling
        How hidden states become its vector; ``None`` of text.
    call
        The number of the first text of its call among all requests, in the order in which they are
        submitted; ``None`` if it is alone.
    """

    at: float
    pieces: tuple[tuple[int, int], ...]
    output_len: int
    max_tokens: int
    priority: int = 0
    task: Task = "generate"
    pooling: Pooling | None = None
    call: int | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.pieces)

    def to_engine(self, key: int) -> Request:
        """The request as the scheduler takes it."""
        tokens: list[int] = []
        for identity, count in self.pieces:
            first = identity * _IDS_PER_PIECE
            tokens += range(first, first + count)
        ends_early = self.pooling is None and self.output_len < self.max_tokens
        return Request(
            key=key,
            prompt_token_ids=tokens,
            params=_PARAMS,
            max_tokens=self.max_tokens,
            end_token_ids=_ENDS if ends_early else _NO_ENDS,
            priority=self.priority,
            task=self.task,
            pooling=self.pooling,
            call=self.call,
        )


class RandomWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic requests; lengths are in tokens.

    Attributes
    ----------
    input_len, output_len
        Minimum and maximum of a uniform distribution.
    prefix_len, num_prefixes
        Length of an additional prefix, chosen uniformly from ``num_prefixes``; 0 for none.
    max_tokens
        The requested maximum of every request; ``None`` for exactly its output.
    priorities
        Number of priorities, from which each request draws uniformly, starting at 0.
    """

    count: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int = 0
    num_prefixes: int = 1
    max_tokens: int | None = None
    priorities: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in (("input", self.input_len), ("output", self.output_len)):
            if not 1 <= low <= high < _IDS_PER_PIECE:
                raise ConfigError(f"the {name} length must be from 1 up, got {low} to {high}")
        if not 0 <= self.prefix_len < _IDS_PER_PIECE or self.num_prefixes < 1:
            raise ConfigError("a prefix needs a length of at least 0, and there must be one")
        if self.max_tokens is not None and self.max_tokens < self.output_len[1]:
            raise ConfigError(f"max_tokens is {self.max_tokens}, below the longest output")

    def requests(
        self, rate: float, burstiness: float = 1.0, ramp_up: RampUp | None = None
    ) -> Iterator[SimulatedRequest]:
        """Yield requests at a rate per second, in the order of their arrival; the arguments are
        those of `arrival_times`.
        """
        source = random.Random(self.seed)
        times = arrival_times(
            self.count, rate=rate, burstiness=burstiness, ramp_up=ramp_up, seed=self.seed + 1
        )
        for number, at in enumerate(times):
            pieces = [(self.num_prefixes + number, source.randint(*self.input_len))]
            if self.prefix_len:
                pieces.insert(0, (source.randrange(self.num_prefixes), self.prefix_len))
            output_len = source.randint(*self.output_len)
            yield SimulatedRequest(
                at,
                tuple(pieces),
                output_len,
                self.max_tokens or output_len,
                source.randrange(self.priorities) if self.priorities > 1 else 0,
            )


class TextWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic texts that become vectors; lengths are in tokens.

    Attributes
    ----------
    input_len
        Minimum and maximum of a uniform distribution.
    pooling
        ``last`` of a decoder that may read cached prefixes; any other may not.
    priority
        Of every text.
    """

    count: int
    input_len: tuple[int, int]
    pooling: Pooling = "last"
    priority: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.input_len
        if not 1 <= low <= high < _IDS_PER_PIECE:
            raise ConfigError(f"a text's length must be from 1 up, got {low} to {high}")

    def requests(self, rate: float) -> Iterator[SimulatedRequest]:
        """Yield texts at a rate per second; with infinity, all at once."""
        source = random.Random(self.seed)
        times = arrival_times(self.count, rate=rate, burstiness=1.0, seed=self.seed + 1)
        for number, at in enumerate(times):
            # Identities below 0 are of no prompt.
            pieces = ((-1 - number, source.randint(*self.input_len)),)
            yield SimulatedRequest(
                at, pieces, 0, 1, self.priority, task="embed", pooling=self.pooling
            )


def merged(*streams: Iterator[SimulatedRequest]) -> Iterator[SimulatedRequest]:
    """Several streams of requests as one, in the order of arrival; of equals the first stream's."""
    return heapq.merge(*streams, key=lambda request: request.at)


def traced_requests(
    trace: Sequence[TracedRequest], *, unit: float, chunk: int, speed: float = 1.0
) -> Iterator[SimulatedRequest]:
    """The requests of a recorded trace, in the order of their arrival.

    Parameters
    ----------
    unit
        Seconds per unit of its timestamps.
    chunk
        Tokens per hash.
    speed
        Factor by which arrivals are faster than recorded.
    """
    ordered = sorted(trace, key=lambda request: request.timestamp)
    start = ordered[0].timestamp if ordered else 0.0
    # Identities of hashes are even; those of unshared pieces are odd.
    for number, traced in enumerate(ordered):
        left = max(1, traced.input_length)
        pieces = []
        for hashed in traced.hash_ids:
            if left > 0:
                pieces.append((2 * hashed, min(chunk, left)))
                left -= chunk
        if left > 0:
            pieces.append((2 * number + 1, left))
        output_len = max(1, traced.output_length)
        at = (traced.timestamp - start) * unit / speed
        yield SimulatedRequest(at, tuple(pieces), output_len, output_len)
