"""Plans which steps an engine captures, before its KV memory is sized."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from src.compile.graphs import CaptureBackend, PaddingLadder
from src.core.collector import frozen_collector, thaw_collector
from src.core.config import MIB, Config
from src.core.draft_counts import most_sampled
from src.engine.devices import Device
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs.memory import trial_bytes
from src.engine.execution.graphs.pool import GraphPool
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache, block_size_of
from src.engine.execution.mixers import MIXERS
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler, SamplingState
from src.engine.speculation.choice import Traits, device_bounds
from src.engine.speculation.on_device import Bounds
from src.models import ServedModel
from src.ops.declaration import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphPlan:
    """The backend, the shapes to capture, and the device bytes that they will take."""

    backend: CaptureBackend
    ladder: PaddingLadder
    bytes: int


class DraftsNotCapturedError(RuntimeError):
    """Steps with drafts cannot be captured; it is not known whether others can."""


def bounds_of(config: Config, model: ServedModel) -> Bounds | None:
    """What the model's device looks up of drafts, if it makes them."""
    return device_bounds(config.speculation, Traits.of(config, model))


def ladder_of(config: Config, model: ServedModel, max_rows: int) -> PaddingLadder:
    """The shapes of a model's steps of up to ``max_rows`` rows.

    The texts of an encoder are computed as a whole, so none of its steps is a decode step.
    """
    decodes = all(layer.lasts != "step" for layer in model.kv_cache_spec())
    bounds = bounds_of(config, model)
    drafts = 0 if bounds is None else bounds.most
    return PaddingLadder(
        max_rows if decodes else 0,
        config.compile.cuda_graph_max_tokens,
        adapts=model.adapters is not None,
        max_drafts=drafts,
        max_sampled=most_sampled(max_rows, drafts),
    )


def plan_graphs(
    config: Config,
    device: Device,
    model: ServedModel,
    backend: CaptureBackend | None,
    attention: Backend | None = None,
) -> GraphPlan | None:
    """Measure by trial captures what graphs will take; ``None`` if none will be captured.

    Parameters
    ----------
    backend
        ``None`` if the device cannot capture.
    attention
        See `ForwardPass`.

    Raises
    ------
    DraftsNotCapturedError
        A step could not be captured, and steps are to have drafts.
    """
    if backend is None or not config.compile.captures:
        return None
    if not all(MIXERS[mixer.kind].is_captured for mixer in model.mixers):
        logger.info("steps are not captured: the model has a mixer that cannot be")
        return None
    if model.own_inputs:
        logger.info("steps are not captured: the model has step inputs of its own")
        return None
    ladder = ladder_of(config, model, config.scheduler.max_num_seqs)
    has_drafts, failure = bounds_of(config, model) is not None, None
    with torch.inference_mode(), device.stream(), frozen_collector(collect=False):
        try:
            taken = _trial(config, model, backend, ladder, attention)
        except Exception as error:
            # On the capturing stream, because otherwise its capture would go on.
            backend.abandon()
            taken, failure = None, str(error)
            if not has_drafts:
                logger.exception("steps cannot be captured: they run without graphs")
    if taken is None:
        thaw_collector()
        if has_drafts and failure is not None:
            # Not from the error, whose frames keep the memory of the trial.
            raise DraftsNotCapturedError(f"its steps cannot be captured: {failure}")
        return None
    logger.info("%d shapes will be captured, in %.0f MiB", len(ladder.shapes), taken / MIB)
    return GraphPlan(backend, ladder, taken)


def _trial(
    config: Config,
    model: ServedModel,
    backend: CaptureBackend,
    ladder: PaddingLadder,
    attention: Backend | None,
) -> int | None:
    spec, max_num_seqs = model.spec, config.scheduler.max_num_seqs
    block_size = block_size_of(config.cache, spec.device)
    # A pool of one block, which padding never writes.
    cache = allocate_kv_cache(
        model.kv_cache_spec(), KVCachePlan(block_size, 1, bytes_per_block=0), spec.device
    )
    rows = RowState(
        max_num_seqs=max_num_seqs,
        max_model_len=spec.max_positions,
        block_size=block_size,
        device=spec.device,
        page_blocks=cache.layout.page_blocks,
    )
    sampler = Sampler(SamplingState(max_num_seqs, spec.vocab_size, spec.device))
    forward = ForwardPass(model, cache, attention)
    if not all(owner.honours.captured for owner in forward.owners.values()):
        logger.info("steps are not captured: an attention backend cannot be")
        return None
    bounds = bounds_of(config, model)
    pool = GraphPool(
        backend,
        ladder,
        forward,
        Code.eager(model),
        rows,
        sampler,
        None if bounds is None else bounds.proposing,
    )
    return trial_bytes(backend, ladder.shapes, pool.capture)
