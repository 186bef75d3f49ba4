"""Values that are read from the engine when metrics are requested, instead of being pushed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class KVBytes(msgspec.Struct, frozen=True):
    """Bytes of one cache group: held by requests, cached for reuse, and free."""

    held: int
    cached: int
    free: int


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine at one moment.

    Attributes
    ----------
    running, waiting
        Requests that have a row, and requests that wait for one.
    kv_usage
        Held blocks divided by all blocks, 0 to 1.
    kv
        Cache group -> its bytes.
    preemptions, recomputed_tokens
        Preemptions since the start, and the positions that had to be computed again.
    prefix_queries, prefix_hits
        Tokens looked up and found in the prefix cache.
    discarded_tokens
        Tokens that were sampled for requests that had already ended.
    bypasses, shortages
        Admissions that overtook a request that did not fit; and how often a row was left out of a
        step because blocks were lacking.
    yields
        Preemptions for a waiting request of a tenant below its share.
    drafts, draft_tokens, accepted_tokens
        Rows of steps that verified drafts, their drafts, and those of them that were right.
    accepted_tokens_at
        Place among a row's drafts, from 0 -> how many were right there.
    drafts_by_source
        Who has drafted -> how many drafts were verified, and how many of them were right.
    tenants
        Tenant -> its running and its waiting requests, of up to 1,024 tenants.
    compiled_graphs, compile_seconds
        Distinct compiled graphs in use, and the duration of their compilation; 0 until it has
        ended.
    graph_steps
        Number of steps by kind: ``decode`` and ``mixed`` captured steps, and ``none``. Empty if
        nothing is captured.
    graph_tokens, graph_padding_tokens
        Tokens of requests, and tokens of padding, that captured steps computed.
    captured_graphs
        Number of captured shapes by kind.
    graph_capture_seconds, graph_bytes
        Time and memory that captures took.
    kernels, kernel_builds
        The kernels that serve CPU operations, and how often this process compiled them.
    max_adapters
        Slots for adapters.
    running_adapters, waiting_adapters
        Names of adapters of requests that have a row, and of those that wait for one.
    stalled_seconds
        How long work has been pending without a step completing.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv: Mapping[str, KVBytes] = {}
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    discarded_tokens: int = 0
    bypasses: int = 0
    shortages: int = 0
    yields: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_tokens_at: Mapping[str, int] = {}
    drafts_by_source: Mapping[str, tuple[int, int]] = {}
    tenants: Mapping[str, tuple[int, int]] = {}
    compiled_graphs: int = 0
    compile_seconds: float = 0.0
    graph_steps: Mapping[str, int] = {}
    graph_tokens: int = 0
    graph_padding_tokens: int = 0
    captured_graphs: Mapping[str, int] = {}
    graph_capture_seconds: float = 0.0
    graph_bytes: int = 0
    kernels: str = ""
    kernel_builds: int = 0
    max_adapters: int = 0
    running_adapters: Sequence[str] = ()
    waiting_adapters: Sequence[str] = ()
    stalled_seconds: float = 0.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are fixed once a model is loaded.

    ``max_model_len`` and ``block_size`` are in tokens. ``num_groups`` is the number of groups of
    layers with block tables of their own.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    num_groups: int
    cache_dtype: str
    enable_prefix_caching: bool
    kv_bytes: int
