"""A request as the engine's core sees it: token ids and resolved parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from src.core.sampling_params import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to be continued. ``n`` completions are ``n`` requests that share a prompt.

    Attributes
    ----------
    key
        The engine's own integer name for it, never reused, never chosen by a client.
    prompt_token_ids
        Token ids, at least one.
    params
        Validated already.
    max_tokens
        Output tokens at most, resolved: prompt and output fit ``max_model_len``.
    seed
        Resolved int64 seed of this completion.
    end_token_ids
        Token ids that end the output: the model's own (unless ``ignore_eos``) and the client's.
    bad_words_token_ids
        Token sequences that must not be completed.
    priority
        Smaller goes first under the priority policy.
    arrival
        Seconds on the engine's monotonic clock.
    deadline
        Seconds on the same clock after which it ends with what it has; ``None`` is never.
    cache_salt
        Prefix-cache entries are shared only between requests with the same salt.
    media_keys
        Block of the prompt -> what its keys and values depend on besides its tokens: hash and
        offset of the images or sounds in it.
    grammar
        What ``params.structured_output`` was compiled to; only the device half looks into it.
    thinking
        What bounds the thinking of ``params.thinking``; only the device half looks into it.
    grammar_times
        When the grammar was asked for and when it was there, on the same clock.
    """

    key: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    end_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    cache_salt: str = ""
    media_keys: Mapping[int, bytes] = {}
    grammar: Any = None
    thinking: Any = None
    grammar_times: tuple[float, float] | None = None

    @property
    def min_tokens_to_end(self) -> int:
        """Output tokens before which an end token does not end the output.

        A grammar lets an end token be chosen before ``min_tokens`` only where it allows nothing
        else: the output is complete then.
        """
        return self.params.min_tokens if self.grammar is None else 0
