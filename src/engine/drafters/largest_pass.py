"""The largest pass of a drafter, which is run where memory of the largest step is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from src.core.config import Config
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import padding_inputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache, block_size_of
from src.engine.execution.row_state import RowState
from src.models import Model


def run_largest_pass(
    model: Model,
    config: Config,
    num_tokens: int,
    logits: Callable[[Tensor], Tensor],
    own_t: Mapping[str, Tensor] | None = None,
) -> None:
    """Run padding through a drafter's layers, and its head for one position of each row.

    Parameters
    ----------
    num_tokens
        The most tokens that it reads at once.
    logits
        Scores of hidden states [S, H].
    own_t
        What its program reads beside tokens, [T, ...].
    """
    device = model.spec.device
    block_size = block_size_of(config.cache, device)
    # A pool of one block, which padding never writes.
    plan = KVCachePlan(block_size, 1, bytes_per_block=0)
    cache = allocate_kv_cache(model.kv_cache_spec(), plan, device)
    rows = RowState(
        max_num_seqs=1,
        max_model_len=block_size,
        block_size=block_size,
        device=device,
        page_blocks=cache.layout.page_blocks,
    )
    inputs = replace(padding_inputs(num_tokens, rows), own_t=own_t or {})
    outputs: dict[str, Tensor] = {}
    hidden = ForwardPass(model, cache)(inputs, model.functions, outputs)
    count = min(config.scheduler.max_num_seqs, num_tokens)
    logits(hidden[:count])
