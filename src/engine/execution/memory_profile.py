"""Measures the device memory of the largest step, before KV memory is sized."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from src.core.config import MIB, Config
from src.core.draft_counts import most_sampled
from src.core.errors import ConfigError
from src.core.plan import RowStep, StepPlan
from src.core.request import Pooling
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.core.task import Task
from src.engine.devices import Device, give_back_memory
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import padding_inputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache, block_size_of
from src.engine.execution.pooling import RowPooling, Vectors, pooled_by
from src.engine.execution.row_state import RowState
from src.engine.sampling import SampleBatch, Sampler, SamplingState
from src.engine.speculation.choice import Traits, choice_of, most_drafts, state_backups
from src.engine.speculation.states_behind import MOST_AGAIN
from src.models import ServedModel
from src.ops.declaration import Backend

logger = logging.getLogger(__name__)


class MemoryGauge(Protocol):
    """Counts the bytes that tensors take on a device."""

    def begin(self) -> None:
        """Start counting."""

    def peak(self) -> int:
        """Peak bytes since `begin`, without the bytes that were taken before."""


class CudaGauge:
    """Asks torch's allocator, so steps need only be enqueued, not finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """See `MemoryGauge`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `MemoryGauge`."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def memory_gauge(device: torch.device) -> MemoryGauge | None:
    """The gauge of ``device``; ``None`` for the host, whose memory is given as it is touched."""
    return CudaGauge(device) if device.type == "cuda" else None


def step_bytes(
    config: Config,
    device: Device,
    model: ServedModel,
    gauge: MemoryGauge | None,
    attention: Backend | None = None,
    drafts: Callable[[Tensor], Tensor | None] | None = None,
) -> int:
    """The most bytes that a step takes beside weights and KV memory, rows and sampling included.

    Blocks while it runs such a step. 0 without a ``gauge``. See `compute_largest_step`.

    Raises
    ------
    ConfigError
        The step does not fit even without KV memory.
    """
    if gauge is None:
        return 0
    try:
        with torch.inference_mode(), device.stream():
            gauge.begin()
            compute_largest_step(config, model, attention, drafts)
        device.synchronize()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of scheduler.max_num_batched_tokens = "
            f"{config.scheduler.max_num_batched_tokens} tokens and scheduler.max_num_seqs = "
            f"{config.scheduler.max_num_seqs} rows does not fit the device's memory beside the "
            "weights: lower them"
        ) from error
    taken = gauge.peak()
    # Memory that the allocator kept becomes free for KV memory.
    give_back_memory(model.spec.device.type)
    logger.info("the largest step takes %.0f MiB beside KV memory", taken / MIB)
    return taken


def compute_largest_step(
    config: Config,
    model: ServedModel,
    attention: Backend | None = None,
    drafts: Callable[[Tensor], Tensor | None] | None = None,
    *,
    is_captured: bool = False,
) -> None:
    """Run a step of the most tokens, see `most_tokens`, that samples as many positions as may be.

    All tokens are padding, so no KV is written. The rows ask for every sampling feature whose
    memory grows with the vocabulary or with the context; they are sampled twice, since the two ways
    to truncate exclude each other. With ``is_captured`` once: the longer one is in no graph.

    If the model pools, a step before it gives a result of each of as many tokens. What that keeps
    until its copy to the host has run is taken meanwhile, as it is while the next step is computed.

    A drafter reads what the step before has left, and then the step is computed: ``drafts`` runs
    the former, and returns what is kept meanwhile (`engine.drafters`).
    """
    spec, scheduler = model.spec, config.scheduler
    block_size = block_size_of(config.cache, spec.device)
    # A pool of one block, which padding never writes.
    plan = KVCachePlan(block_size, 1, bytes_per_block=0)
    cache = allocate_kv_cache(model.kv_cache_spec(), plan, spec.device)
    rows = RowState(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=spec.max_positions,
        block_size=block_size,
        device=spec.device,
        page_blocks=cache.layout.page_blocks,
        own_inputs=model.own_inputs,
    )
    # Rows look full of tokens, because penalties read them.
    rows.tokens.zero_()
    sampler = Sampler(SamplingState(scheduler.max_num_seqs, spec.vocab_size, spec.device))
    inputs = padding_inputs(most_tokens(config, model), rows)
    forward = ForwardPass(model, cache, attention)
    kept = None
    if not is_captured and (asks := _pooled_requests(config, model)):
        kept = _pooled_steps(config, model, forward(inputs, model.functions), asks)
    waiting = None
    if not is_captured and drafts is not None:
        waiting = drafts(forward(inputs, model.functions))
    hidden = forward(inputs, model.functions)
    count = min(_most_sampled(config, model), scheduler.max_num_batched_tokens)
    # In a real step `hidden` lives until prompts are scored, in slices of at most this many rows.
    demanding = _demanding(config.limits.max_logprobs)
    for params in demanding[:1] if is_captured else demanding:
        logits = model.logits(model.functions, hidden[:count])
        if logits.shape[-1] != spec.vocab_size:
            # A model without a head samples nothing.
            return
        request = DeviceRequest(key=-1, prompt_len=1, params=params)
        for row in range(scheduler.max_num_seqs):
            sampler.state.install(row, request, 1)
        mask = torch.zeros(logits.shape, dtype=torch.float32, device=spec.device)
        positions = [spec.max_positions - 1] * count
        # With drafts a row samples several positions.
        sampling = [entry % scheduler.max_num_seqs for entry in range(count)]
        sampler.sample(logits, SampleBatch(sampling, positions, mask=mask), rows.tokens)
        del logits, mask
    del kept, waiting


def _pooled_requests(config: Config, model: ServedModel) -> tuple[DeviceRequest, ...]:
    """What takes most of the requests that are pooled; the last one takes most of them.

    Empty if none is served. A model may still say of itself that it gives no vectors.
    """
    asked = config.model.tasks

    def ask(task: Task, pooling: Pooling) -> tuple[DeviceRequest, ...]:
        if asked != "auto" and task not in asked:
            return ()
        params = SamplingParams()
        return (DeviceRequest(key=-1, prompt_len=1, params=params, task=task, pooling=pooling),)

    own = model.classifier
    if own is None:
        return (*ask("embed", "mean"), *ask("token_embed", "all"))
    return ask("token_classify" if own.pooling == "all" else "classify", own.pooling)


def _pooled_steps(
    config: Config, model: ServedModel, hidden: Tensor, asks: Sequence[DeviceRequest]
) -> tuple[RowPooling, Vectors | None]:
    """Pool a step's hidden states [T, H], as each of ``asks``; returns what the last one keeps."""
    plan = _whole_prompts(config, model.spec.max_positions)
    owners: list[DeviceRequest | None] = [None] * config.scheduler.max_num_seqs
    pooling = RowPooling(
        owners,
        model.spec.hidden_size,
        model.spec.device,
        deterministic=any(mixer.spec.deterministic for mixer in model.mixers),
    )
    vectors = None
    for request in asks:
        owners[:] = [request] * len(owners)
        # Its score tokens are a few columns of logits that sampling has more of.
        vectors = pooled_by(pooling, plan, hidden, model, model.functions, None)
        if vectors is not None:
            # The copy to the host is made of numbers that stand together.
            vectors.copied(lambda flat: flat)
    return pooling, vectors


def _whole_prompts(config: Config, longest: int) -> StepPlan:
    """A step of as few rows as have all its tokens, from their first to their last."""
    left = config.scheduler.max_num_batched_tokens
    rows: list[RowStep] = []
    while left and len(rows) < config.scheduler.max_num_seqs:
        count = min(left, longest)
        # It begins behind its first token, so that the row's sum is kept.
        rows.append(RowStep(len(rows), 0, start=1, num_tokens=count, samples=False, pools=True))
        left -= count
    return StepPlan(0, [], [], rows)


def most_tokens(config: Config, model: ServedModel) -> int:
    """The most tokens of a step: those that are planned, and those that are computed again."""
    planned = config.scheduler.max_num_batched_tokens
    falls_behind = state_backups(choice_of(config, model), Traits.of(config, model)) > 0
    return planned + MOST_AGAIN if falls_behind else planned


def _most_sampled(config: Config, model: ServedModel) -> int:
    """The most positions that a step samples, with drafts if somebody drafts for the model."""
    drafts = most_drafts(config.speculation, choice_of(config, model))
    return most_sampled(config.scheduler.max_num_seqs, drafts)


def _demanding(logprobs: int) -> tuple[SamplingParams, ...]:
    """What all rows ask for: the few likeliest tokens, and then what looks at all tokens."""
    few = SamplingParams(
        top_k=2,
        top_p=0.5,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logprobs=logprobs,
    )
    changes = {"top_k": 0, "top_p": 0.9, "typical_p": 0.9, "top_n_sigma": 1.0}
    return few, msgspec.structs.replace(few, **changes)
