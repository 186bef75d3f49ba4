"""Measures the device memory of the largest step, before KV memory is sized."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from src.core.config import MIB, Config
from src.core.errors import ConfigError
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.devices import Device, give_back_memory
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import padding_inputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache, block_size_of
from src.engine.execution.row_state import RowState
from src.engine.sampling import SampleBatch, Sampler, SamplingState
from src.models import ServedModel
from src.ops.declaration import Backend

logger = logging.getLogger(__name__)


class MemoryGauge(Protocol):
    """Counts the bytes that tensors take on a device."""

    def begin(self) -> None:
        """Start counting."""

    def peak(self) -> int:
        """Peak bytes since :meth:`begin`, without the bytes that were taken before."""


class CudaGauge:
    """Asks torch's allocator, so steps need only be enqueued, not finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """See :class:`MemoryGauge`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See :class:`MemoryGauge`."""
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
) -> int:
    """The most bytes that a step takes beside weights and KV memory, rows and sampling included.

    Blocks while it runs such a step. 0 without a ``gauge``.

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
            compute_largest_step(config, model, attention)
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
    config: Config, model: ServedModel, attention: Backend | None = None
) -> None:
    """Run a step of ``max_num_batched_tokens`` tokens that samples as many rows as possible.

    All tokens are padding, so no KV is written. The rows ask for every sampling feature whose
    memory grows with the vocabulary or with the context.
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
    inputs = padding_inputs(scheduler.max_num_batched_tokens, rows)
    hidden = ForwardPass(model, cache, attention)(inputs, model.functions)
    count = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    logits = model.logits(model.functions, hidden[:count])
    # In a real step `hidden` lives until prompts are scored, in slices of at most this many rows.
    batch = _demanding_batch(sampler, config, count, spec.max_positions)
    mask = torch.zeros(logits.shape, dtype=torch.float32, device=spec.device)
    batch = SampleBatch(batch.rows, batch.positions, mask=mask)
    sampler.sample(logits, batch, rows.tokens)


def _demanding_batch(
    sampler: Sampler, config: Config, count: int, max_positions: int
) -> SampleBatch:
    params = SamplingParams(
        top_k=2,
        top_p=0.5,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logprobs=config.limits.max_logprobs,
    )
    request = DeviceRequest(key=-1, prompt_len=1, params=params)
    for row in range(count):
        sampler.state.install(row, request, 1)
    return SampleBatch(list(range(count)), [max_positions - 1] * count)
