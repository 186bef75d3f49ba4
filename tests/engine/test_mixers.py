"""What the layers of a step share between them, and what each of them has for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.engine.execution import mixers
from src.engine.execution.inputs import AttentionRows
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.mixers import MIXERS
from src.models import Mixer
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.program import StepTensor


def attention(layer: int, heads: int, kv_heads: int, dim: int) -> Mixer:
    """An attention layer without rotation."""
    spec = AttentionMixerSpec(heads, kv_heads, dim, torch.float32, 1.0, None, None, None, False)
    writes = StepTensor("attended", (heads * dim,), torch.float32)
    return Mixer("attention", layer, spec, None, ("query", "key", "value"), writes)


def test_layers_of_a_group_share_a_decode_schedule_only_if_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []

    def noted(keys: torch.Tensor, num_heads: int, *_: Any) -> None:
        made.append((num_heads, *keys.shape[2:]))

    monkeypatch.setattr(mixers, "step_schedule", noted)
    shapes = [(4, 2, 8), (8, 2, 8), (4, 2, 16), (8, 4, 8), (8, 2, 8)]
    layers = [attention(number, *shape) for number, shape in enumerate(shapes)]
    kv = [layer.spec.kv() for layer in layers]
    cache = allocate_kv_cache(kv, KVCachePlan(4, 2, 0), torch.device("cpu"))
    assert len(cache.layout.groups) == 1
    rows = AttentionRows(
        slot_mappings_t=(torch.tensor([0]),),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_b=torch.tensor([1], dtype=torch.int32),
        block_tables_b=(torch.zeros(1, 1, dtype=torch.int32),),
        max_query_len=1,
        max_seq_len=1,
    )
    for layer, (heads, kv_heads, dim) in zip(layers, shapes, strict=True):
        mixer = MIXERS["attention"](layer, AttentionMixerWeights(), cache, None)
        given = [torch.randn(1, count, dim) for count in (heads, kv_heads, kv_heads)]
        mixer.mix(rows, given, torch.empty(1, heads, dim))  # type: ignore[arg-type]
    # The schedule of the first serves the fourth, which has as many query heads for a key head.
    assert made == [(4, 2, 8), (8, 2, 8), (4, 2, 16)]
