"""What is read from the engine when somebody asks for its metrics, instead of being told."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class KVBytes(msgspec.Struct, frozen=True):
    """Bytes of one cache group: held by requests, kept for their content, and free."""

    held: int
    cached: int
    free: int


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment.

    Attributes
    ----------
    running, waiting
        Requests that hold a row, and requests that wait for one.
    kv_usage
        Held blocks over all blocks, 0 to 1.
    kv
        Cache group -> its bytes.
    preemptions, recomputed_tokens
        Rows taken from requests since the start, and the positions to compute again for that.
    prefix_queries, prefix_hits
        Tokens looked up and found in the prefix cache.
    discarded_tokens
        Tokens sampled for requests that had ended meanwhile.
    bypasses, shortages
        Admissions that overtook a request that did not fit, and row-steps put off for want of a
        block.
    compiled_graphs, compile_seconds
        Distinct compiled graphs that serve, and how long their compilation took; 0 while it has
        not ended.
    graph_steps
        Steps by what they ran as: ``decode`` and ``mixed`` captured steps, and ``none``. Empty
        where nothing is captured.
    graph_tokens, graph_padding_tokens
        Tokens that captured steps computed because a request needs them, and beside those.
    captured_graphs
        Captured shapes by kind.
    graph_capture_seconds, graph_bytes
        What captures took.
    kernels, kernel_builds
        What serves CPU operations, and how often this process compiled it.
    stalled_seconds
        How long work has been pending without a step that completed.
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
    stalled_seconds: float = 0.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed once a model is loaded. ``max_model_len`` and ``block_size`` are tokens.

    Of layers, ``num_groups`` have block tables of their own.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    num_groups: int
    cache_dtype: str
    enable_prefix_caching: bool
    kv_bytes: int
