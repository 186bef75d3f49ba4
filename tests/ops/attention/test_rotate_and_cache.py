"""The reference against the models' own layers, which it stands in for on CUDA."""

from typing import Any

import pytest
import torch

from src.models.layers.attention import apply_rope
from src.models.layers.norms import NormSpec, rms_norm
from src.ops import ROTATE_AND_CACHE
from tests.ops.comparison import bits, fused_copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        {"padding": 3},
        {"tokens": 1, "head_dim": 128},
        {"tokens": 65, "head_dim": 24, "block_size": 5, "num_heads": 6},
    ],
)
def test_it_has_the_bits_of_the_layers(
    case: dict[str, Any], has_norms: bool, dtype: torch.dtype
) -> None:
    args = ROTATE_AND_CACHE.build("cpu", **case, has_norms=has_norms, dtype=dtype)
    query, key, value, q_norm, k_norm, eps, table, positions, slots, *_ = args
    tokens = int((slots >= 0).sum())
    before = fused_copied(args)
    ROTATE_AND_CACHE.overload(*args)
    key_cache, value_cache, out = args[9:]

    cos_sin = table[positions].to(query.dtype)
    expected = []
    for x, norm in ((before[0], q_norm), (before[1], k_norm)):
        normed = x if norm is None else rms_norm(x, norm, NormSpec(eps))
        expected.append(apply_rope(normed, cos_sin, x.shape[-1])[:tokens])
    assert torch.equal(query[:tokens], expected[0])
    assert torch.equal(key_cache.flatten(0, 1)[slots[:tokens]], expected[1])
    assert torch.equal(value_cache.flatten(0, 1)[slots[:tokens]], before[2][:tokens])

    # What belongs to nobody, and what is only read.
    assert torch.equal(bits(query[tokens:]), bits(before[0][tokens:]))
    assert torch.equal(bits(key), bits(before[1]))
    assert torch.equal(bits(value), bits(before[2]))
    for cache in (key_cache, value_cache):
        free = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool)
        free[slots[:tokens]] = False
        assert cache.flatten(0, 1)[free].isnan().all()
    assert out[:tokens].isnan().all()
    assert torch.equal(out[tokens:], torch.zeros_like(out[tokens:]))
