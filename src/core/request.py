"""A request as the engine's core sees it: token ids and resolved parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from src.core.adapter import Adapter
from src.core.sampling_params import SamplingParams
from src.core.task import Task

Pooling: TypeAlias = Literal["first", "last", "mean", "all"]
"""Which hidden states of a sequence's tokens make its result: one, the mean of all, or each."""


TOKEN_TYPES: Final = "token_types"
"""A step input of encoders that compare two texts: in which of them a token is, [T] int64."""


class StepValues(msgspec.Struct, frozen=True):
    """Values of one of the model's own step inputs, for the first tokens of a prompt.

    Attributes
    ----------
    shape
        Number of tokens, and the shape of one token's value.
    data
        In C order, as int64 or float32; which of them, the model's program declares.
    """

    shape: tuple[int, ...]
    data: bytes


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to be continued. ``n`` completions are ``n`` requests that share a prompt.

    Attributes
    ----------
    key
        The engine's integer key for it, never reused, never chosen by a client.
    prompt_token_ids
        Token ids, at least one.
    params
        Validated sampling parameters.
    max_tokens
        The most output tokens, resolved: prompt and output fit ``max_model_len``.
    seed
        Resolved int64 seed of this completion.
    end_token_ids
        Token ids that end the output: the model's own (unless ``ignore_eos``) and the client's.
    bad_words_token_ids
        Token sequences that the output must not contain.
    priority
        Smaller goes first under the priority policy.
    arrival
        Seconds of ``time.monotonic``.
    deadline
        Seconds of the same clock at which it ends with the output so far; ``None`` is never.
    cache_salt
        Prefix-cache entries are shared only between requests with the same salt.
    tenant
        Whose request it is. Tenants share the engine by their weights, and each has its own cached
        prefixes unless they are shared. Requests of the tenant "" are nobody's in particular.
    adapter
        The adapter that it is computed with; ``None`` is the model alone.
    media_keys
        Block index -> hash and offset of the images or sounds in that block, which its KV depends
        on besides its tokens.
    step_inputs
        Values of the model's own step inputs, by name; only the device half reads them. What KV
        depends on must also be in ``cache_salt`` or ``media_keys``.
    grammar
        The compiled ``params.structured_output``; only the device half reads it.
    thinking
        What bounds the thinking of ``params.thinking``; only the device half looks into it.
    task
        What it asks for.
    prediction
        Token ids that its output is expected to have, int32 side by side; drafts are taken from
        them. Requests may share them. ``None``: the client has said nothing.
    pooling
        It asks for numbers, of its prompt's hidden states, and ends in the step of its last token.
        Parameters of sampling have no effect, and ``max_tokens`` is 1. ``None``: it asks for text.
    num_unpooled
        How many of its first tokens are left out of what is pooled; fewer than it has, and 0 if
        ``pooling`` is ``all``. Only the device half reads it.
    call
        Key of the first of the texts that a call has asked for together, also of that one itself.
        Calls of one tenant take turns (``places.py``). ``None``: it is alone.
    grammar_times
        When the grammar was requested and when it was ready, on the same clock.
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
    tenant: str = ""
    adapter: Adapter | None = None
    media_keys: Mapping[int, bytes] = {}
    step_inputs: Mapping[str, StepValues] = {}
    grammar: Any = None
    thinking: Any = None
    task: Task = "generate"
    prediction: bytes | None = None
    pooling: Pooling | None = None
    num_unpooled: int = 0
    call: int | None = None
    grammar_times: tuple[float, float] | None = None

    @property
    def is_further(self) -> bool:
        """Whether it is a text behind the first of its call."""
        return self.call is not None and self.call != self.key

    @property
    def num_predicted(self) -> int:
        """Tokens of its prediction."""
        return 0 if self.prediction is None else len(self.prediction) // 4

    @property
    def min_tokens_to_end(self) -> int:
        """The number of output tokens before which an end token does not end the output.

        0 with a grammar: an end token before ``min_tokens`` is chosen only if the grammar allows
        nothing else, and then the output is complete.
        """
        return self.params.min_tokens if self.grammar is None else 0
