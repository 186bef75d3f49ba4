"""Admission: the scheduler's limits, and the requests that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from src.core.blocks import Window, blocks_held, most_seen
from src.core.config import Config
from src.core.draft_counts import most_sampled
from src.core.errors import ConfigError, InvalidRequestError, PromptTooLongError
from src.core.request import Request

# The most waiting requests that admission passes over in one step: those that do not fit, and those
# whose prefix a running request is computing. The cost of a step must not grow with the queue.
MAX_MISFITS_PER_STEP: Final = 8
MAX_PREFIX_WAITS_PER_STEP: Final = 32
SNAPSHOT_TOKENS: Final = 512
"""Tokens between two copies of a row's recurrent states."""
_DEFAULT_MIXED_PREFILL: Final = {"cpu": 256}
_PLANS_LATE: Final = ("cpu",)
URGENT: Final = "\0"
"""Lane of the urgent requests of all tenants that may put theirs before those of others."""


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a scheduler, all resolved to numbers.

    Attributes
    ----------
    max_num_seqs
        Number of rows: requests that run at the same time.
    max_num_batched_tokens
        The most tokens of one step, decode and prefill together.
    max_mixed_prefill_tokens
        The most prefill tokens in a step with decoding rows. ``None``: the rest of the budget.
    max_mixed_pooled_tokens
        The most of those that are of pooled requests, or a quarter as many as rows decode, if that
        is more. ``None``: all of them.
    prefill_tokens_per_decode
        Raises that limit to this many prefill tokens per decoding row, if that is more.
    block_size, num_blocks
        Tokens per block, and blocks of the pool.
    windows
        Per group of layers: what a query sees. Each group has its own block tables.
    num_snapshots, snapshot_interval
        Slots for copies of recurrent states, and blocks between two copies (``snapshots.py``).
        ``None``: the model has no such states.
    num_adapter_slots
        Adapters that rows may use at the same time.
    content_key
        Identifies the model. Prefix cache entries of different models never match.
    max_model_len
        The most tokens of a request, prompt and output together.
    policy
        ``fcfs`` orders by arrival, ``priority`` by the request's priority and then arrival. In both
        calls of several texts take turns (``places.py``).
    max_waiting_requests, max_waiting_tokens
        Bounds of the waiting queue. An empty queue takes any request.
    max_bypasses
        How many admissions may overtake the first waiting request while it does not fit.
    lookahead_tokens
        Admission keeps free the blocks that running requests and the new one need for this many
        further tokens, so that a new request is not preempted at once.
    enable_prefix_caching
        Whether computed blocks are registered and reused by content.
    weights
        Tenant -> its weight in all shares; 1 for those that are not named.
    priority_tenants
        Tenants whose requests of a priority below 0 go before those of all others.
    share_prefixes
        Whether tenants read each other's cached prefixes. Otherwise each has its own.
    whole_prompts
        Whether a prompt is computed in one step, because its tokens see later ones.
    max_drafts
        The most drafts that a step verifies of one row; 0 for none.
    max_in_flight
        The most steps that are planned and not committed yet, the next one included.
    looks_first
        Whether the device looks at a row's text, and says with its first token whether there may be
        drafts. Until then none are planned, unless the request has a prediction or a grammar.
    plan_late
        Read by the loop, not by the scheduler: whether it plans a step shortly before the running
        step ends (`Pace`), or as soon as that step runs.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_mixed_prefill_tokens: int | None = None
    max_mixed_pooled_tokens: int | None = None
    prefill_tokens_per_decode: int = 8
    block_size: int
    num_blocks: int
    windows: tuple[Window, ...] = (None,)
    num_snapshots: int | None = None
    snapshot_interval: int = 32
    num_adapter_slots: int = 0
    content_key: str = ""
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting_requests: int = 2048
    max_waiting_tokens: int = 8_388_608
    max_bypasses: int = 64
    lookahead_tokens: int = 8
    enable_prefix_caching: bool = True
    weights: Mapping[str, int] = {}
    priority_tenants: tuple[str, ...] = ()
    share_prefixes: bool = False
    plan_late: bool = False
    whole_prompts: bool = False
    max_drafts: int = 0
    max_in_flight: int = 2
    looks_first: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks",
                     "max_model_len", "max_waiting_requests", "max_waiting_tokens",
                     "max_in_flight"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_mixed_prefill_tokens is not None and self.max_mixed_prefill_tokens < 1:
            raise ConfigError(
                f"max_mixed_prefill_tokens must be at least 1, got {self.max_mixed_prefill_tokens}"
            )
        if self.max_mixed_pooled_tokens is not None and self.max_mixed_pooled_tokens < 1:
            raise ConfigError(
                f"max_mixed_pooled_tokens must be at least 1, got {self.max_mixed_pooled_tokens}"
            )
        for name in ("max_bypasses", "lookahead_tokens", "prefill_tokens_per_decode", "max_drafts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if (self.num_snapshots or 0) < 0 or self.snapshot_interval < 1:
            raise ConfigError(
                f"expected num_snapshots >= 0 and snapshot_interval >= 1, got "
                f"{self.num_snapshots} and {self.snapshot_interval}"
            )
        if self.whole_prompts and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens = {self.max_num_batched_tokens} is less than "
                f"the model's context of {self.max_model_len} tokens: this model computes a text "
                "in one step, as a whole; raise it, or lower model.max_model_len"
            )
        for name, weight in self.weights.items():
            if weight < 1:
                raise ConfigError(f"the weight of {name!r} must be at least 1, got {weight}")
        spans = [most_seen(window) for window in self.windows if window is not None]
        if not self.windows or any(span < 1 for span in spans):
            raise ConfigError(f"windows must be at least 1 token each, got {self.windows}")

    def lane_of(self, request: Request) -> str:
        """The lane in which a request waits and is served: its tenant's, or that of the urgent."""
        is_urgent = (
            request.tenant in self.priority_tenants
            and request.priority < 0
            and self.policy == "priority"
        )
        return URGENT if is_urgent else request.tenant

    @property
    def drafts(self) -> int:
        """``max_drafts``."""
        return self.max_drafts

    @property
    def max_sampled(self) -> int:
        """The most positions that a step with drafts samples (`most_sampled`)."""
        return most_sampled(self.max_num_seqs, self.drafts)

    @property
    def layout(self) -> str:
        """Describes how a sequence's KV is laid out in blocks; part of every block's digest."""
        states = "" if self.num_snapshots is None else " states"
        return f"{self.block_size} {self.windows}{states}"

    def blocks_held(self, num_tokens: int) -> int:
        """Blocks of all groups that a request of ``num_tokens`` tokens needs at least."""
        return sum([blocks_held(num_tokens, self.block_size, window) for window in self.windows])

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        device_type: str,
        block_size: int,
        num_blocks: int,
        windows: tuple[Window, ...],
        content_key: str,
        max_model_len: int,
        max_num_seqs: int | None = None,
        num_snapshots: int | None = None,
        num_adapter_slots: int = 0,
        whole_prompts: bool = False,
        max_drafts: int = 0,
        looks_first: bool = False,
    ) -> SchedulerLimits:
        """The limits of an engine with these settings, once its KV memory and model are known.

        ``max_num_seqs``: fewer rows than the setting, because memory does not hold more states.
        """
        section = config.scheduler
        mixed = section.max_mixed_prefill_tokens or _DEFAULT_MIXED_PREFILL.get(device_type)
        plan_late = section.plan_late
        return cls(
            max_num_seqs=max_num_seqs or section.max_num_seqs,
            max_num_batched_tokens=section.max_num_batched_tokens,
            max_mixed_prefill_tokens=mixed,
            max_mixed_pooled_tokens=section.max_mixed_pooled_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            num_snapshots=num_snapshots,
            snapshot_interval=max(1, SNAPSHOT_TOKENS // block_size),
            num_adapter_slots=num_adapter_slots,
            content_key=content_key,
            max_model_len=max_model_len,
            policy=section.policy,
            max_waiting_requests=section.max_waiting_requests,
            max_waiting_tokens=section.max_waiting_tokens,
            max_bypasses=section.max_bypasses,
            # Keys of a step are no part of any later one.
            enable_prefix_caching=config.cache.enable_prefix_caching and not whole_prompts,
            weights=section.tenant_weights,
            priority_tenants=section.priority_tenants,
            share_prefixes=config.cache.share_prefixes,
            plan_late=device_type in _PLANS_LATE if plan_late is None else plan_late,
            whole_prompts=whole_prompts,
            max_drafts=max_drafts,
            max_in_flight=section.pipeline_depth,
            looks_first=looks_first,
        )


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """Refuse a request that can never run.

    Raises
    ------
    PromptTooLongError
        If the prompt and the requested output exceed the model's context or the whole KV memory.
    InvalidRequestError
        If there is no prompt or no output is asked for.
    """
    prompt_len = len(request.prompt_token_ids)
    if prompt_len < 1:
        raise InvalidRequestError("the prompt must have at least 1 token, got 0", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
        )
    total = prompt_len + request.max_tokens
    longest = limits.max_model_len
    if request.pooling is not None:
        # A vector is no token of its sequence.
        longest += 1
    if total > longest:
        raise PromptTooLongError(
            f"the prompt has {prompt_len} tokens and max_tokens is {request.max_tokens}: "
            f"{total} together, but the model's context is {limits.max_model_len} tokens"
        )
    # The KV of the last token is never computed.
    needed = limits.blocks_held(total - 1)
    if needed > limits.num_blocks:
        raise PromptTooLongError(
            f"the prompt has {prompt_len} tokens and max_tokens is {request.max_tokens}: "
            f"{needed} blocks of KV memory, but there are only {limits.num_blocks} "
            f"of {limits.block_size} tokens each"
        )
