from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from src.core.errors import ModelLoadError
from src.models.layers.rope import parse_rope, rope_table
from tests.support.checkpoints import ROPES

TRAINED, LENGTH = 256, 300


def reference_table(parameters: dict[str, Any], head_dim: int, length: int) -> torch.Tensor:
    """Cosines, then sines, as transformers computes them in one pass over `length` tokens."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


def parameters_of(name: str, head_dim: int) -> dict[str, Any]:
    """A variant's parameters; lists of them have an entry for each pair of a head."""
    factors = [1.0 + 0.1 * pair for pair in range(head_dim // 2)]
    lists = {"short_factor": factors, "long_factor": [2 * factor for factor in factors]}
    return ROPES[name] | (lists if name == "longrope" else {})


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [1, TRAINED, LENGTH])
def test_the_table_is_the_references(name: str, head_dim: int, length: int) -> None:
    parameters = parameters_of(name, head_dim)
    rope = parse_rope({"rope_parameters": parameters}, TRAINED)
    got = rope_table(rope, head_dim, TRAINED, length)
    assert got.dtype == torch.float32
    assert got.shape == (length, head_dim)
    want = reference_table(parameters, head_dim, length)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


# Of eight dimensions: where the ramp between kept and stretched frequencies would begin before the
# first one or end behind the last one, and where it begins and ends in one place.
YARN_EDGES: dict[str, dict[str, Any]] = {
    "lower": {"original_max_position_embeddings": 64},
    "upper": {"rope_theta": 10.0, "original_max_position_embeddings": 1024},
    "both": {"rope_theta": 10.0, "original_max_position_embeddings": 1024, "beta_fast": 600.0},
    "neither": {"rope_theta": 100.0, "original_max_position_embeddings": 1024},
    "no ramp": {"original_max_position_embeddings": 6},
    "parts of dimensions": {"original_max_position_embeddings": 1024, "truncate": False},
    "upper part": {
        "rope_theta": 10.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
}


@pytest.mark.parametrize("edge", YARN_EDGES)
def test_yarn_is_the_reference_s_where_its_ramp_is_clamped(edge: str) -> None:
    parameters = ROPES["yarn"] | YARN_EDGES[edge]
    got = rope_table(parse_rope({"rope_parameters": parameters}, TRAINED), 8, TRAINED, LENGTH)
    torch.testing.assert_close(got, reference_table(parameters, 8, LENGTH), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("yarn", {"original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ("llama3", {"original_max_position_embeddings": 1e300}, "original_max_position_embeddings"),
        ("yarn", {"rope_theta": 1.0}, "rope_theta must be more than 1"),
        ("yarn", {"factor": 1e308}, "factor must be from 1 to"),
        ("linear", {"factor": 10**400}, "factor must be a number"),
        ("default", {"rope_theta": 10**400}, "rope_theta must be a number"),
    ],
)
def test_numbers_beyond_any_model_are_refused(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        parse_rope({"rope_parameters": ROPES[name] | changes}, TRAINED)


def test_one_pair_cannot_be_stretched_dynamically() -> None:
    rope = parse_rope({"rope_parameters": ROPES["dynamic"]}, TRAINED)
    assert rope.rotary_dim(4) == 4
    with pytest.raises(ModelLoadError, match="dynamic"):
        rope.rotary_dim(2)


@pytest.mark.parametrize("name", [n for n in ROPES if n not in ("dynamic", "longrope")])
def test_only_dynamic_and_longrope_depend_on_the_length_of_the_table(name: str) -> None:
    rope = parse_rope({"rope_parameters": ROPES[name]}, TRAINED)
    longer = rope_table(rope, 16, TRAINED, LENGTH)
    assert torch.equal(longer[:TRAINED], rope_table(rope, 16, TRAINED, TRAINED))


def test_a_position_is_a_rotation_by_position_times_frequency() -> None:
    """Straight from the definition, without transformers."""
    table = rope_table(parse_rope({"rope_theta": 100.0}, TRAINED), 8, TRAINED, 12)
    angle = 11 * 100.0 ** -(2 * 3 / 8)
    want = torch.tensor([math.cos(angle), math.sin(angle)])
    torch.testing.assert_close(table[11, [3, 7]], want)
