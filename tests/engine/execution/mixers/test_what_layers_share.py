"""What the layers of a step share between them, and what each of them has for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src import ops
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import StepInputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.mixers import attention as attention_mixer
from src.engine.sampling import SampleBatch
from src.models import Mixer
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.program import StepTensor


def attention(layer: int, heads: int, kv_heads: int, dim: int) -> Mixer:
    """An attention layer without rotation."""
    spec = AttentionMixerSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        scale=1.0,
        window=None,
        cap=None,
        rotates=None,
        deterministic=False,
    )
    writes = StepTensor("attended", (heads * dim,), torch.float32)
    return Mixer("attention", layer, spec, None, ("query", "key", "value"), writes)


def test_layers_of_a_group_share_a_decode_schedule_only_if_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    used: list[torch.Tensor | None] = []

    def noted(keys: torch.Tensor, num_heads: int, *_: Any) -> torch.Tensor:
        made.append((num_heads, *keys.shape[2:]))
        return torch.tensor([len(made)])

    attend = ops.paged_attention

    def attending(*arguments: Any) -> None:
        used.append(arguments[-3])
        attend(*arguments)

    monkeypatch.setattr(attention_mixer, "step_schedule", noted)
    monkeypatch.setattr(attention_mixer, "paged_attention", attending)
    shapes = [(4, 2, 8), (8, 2, 8), (4, 2, 16), (8, 4, 8), (8, 2, 8)]
    layers = [attention(number, *shape) for number, shape in enumerate(shapes)]
    kv = [layer.spec.kv() for layer in layers]
    cache = allocate_kv_cache(kv, KVCachePlan(4, 2, 0), torch.device("cpu"))
    assert len(cache.layout.groups) == 1
    none = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(
        slot_mappings_t=(torch.tensor([0]),),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_b=torch.tensor([1], dtype=torch.int32),
        block_tables_b=(torch.zeros(1, 1, dtype=torch.int32),),
        max_query_len=1,
        max_seq_len=1,
        input_ids_t=none,
        positions_t=none,
        sample_index_s=none,
        samplers=SampleBatch([], [], none),
        sampled_rows_s=none,
        sampled_positions_s=none,
        rows_b=none,
    )
    model: Any = SimpleNamespace(
        mixers=layers,
        mixer_weights=[AttentionMixerWeights()] * 5,
        spec=SimpleNamespace(device=torch.device("cpu")),
    )
    forward = ForwardPass(model, cache)
    metadata = forward.prepare(inputs)
    # The schedule of the first serves the fourth, which has as many query heads for a key head.
    assert made == [(4, 2, 8), (8, 2, 8), (4, 2, 16)]
    for layer, (heads, kv_heads, dim) in zip(layers, shapes, strict=True):
        given = [torch.randn(1, count, dim) for count in (heads, kv_heads, kv_heads)]
        forward.mix(inputs, metadata, layer, given, torch.empty(1, heads, dim))
    assert [int(each) for each in used if each is not None] == [1, 2, 3, 1, 2]
    assert made == [(4, 2, 8), (8, 2, 8), (4, 2, 16)]
