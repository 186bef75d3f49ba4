"""Where a checkpoint's tensors go: parts of fused parameters, shards of ranks, transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src.core.errors import ModelLoadError
from src.distributed import Group
from src.models.builder import ProgramBuilder
from src.models.checkpoint import open_checkpoint
from src.models.config import ModelConfig
from src.models.decoder import write_decoder
from src.models.layers.attention import apply_rope
from src.models.loading.filling import check_tensors, fill
from src.models.model import Model, ModelOptions
from src.models.registry import family_of, load_config
from src.models.weights.methods import formats_of
from src.models.weights.parameters import (
    Parameter,
    Placement,
    own_part,
    rows_of,
    stored_shape,
)
from src.models.weights.schemes.columns import starts_of
from src.models.weights.transforms import InHalves, Transposed
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")


def loaded(path: Path, write: Any = None, **options: Any) -> Model:
    config = load_config(path)
    write = write or family_of(config.architecture).write
    given = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, **options)
    model = Model(config, write, given)
    stored = open_checkpoint(path)
    check_tensors(path, stored, model, set())
    fill(model, stored, lambda _: None, lambda: None)
    return model


def part(tensor: Tensor, rank: int, dim: int) -> Tensor:
    return tensor.chunk(2, dim=dim)[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_reads_its_half(rank: int, tmp_path: Path) -> None:
    stored = load_file(make_checkpoint(tmp_path) / "model.safetensors")
    model = loaded(tmp_path, group=Group(rank, 2))
    layer = {
        name.removeprefix("model.layers.1.").removesuffix(".weight"): tensor
        for name, tensor in stored.items()
    }
    heads = [part(layer[f"self_attn.{name}_proj"], rank, 0) for name in "qkv"]
    inner = [part(layer[f"mlp.{name}_proj"], rank, 0) for name in ("gate", "up")]
    expected = {
        "qkv_weight": torch.cat(heads),
        "output_weight": part(layer["self_attn.o_proj"], rank, 1),
        "gate_up_weight": torch.cat(inner),
        "down_weight": part(layer["mlp.down_proj"], rank, 1),
        "input_norm": layer["input_layernorm"],
    }
    for name, tensor in expected.items():
        assert torch.equal(model.weights[f"layers.1.{name}"], tensor), name
    # Nobody shares these out.
    assert torch.equal(model.weights["embedding"], stored["model.embed_tokens.weight"])
    assert torch.equal(model.weights["head"], stored["lm_head.weight"])
    spec = model.program.mixers[0].spec
    assert (spec.num_heads, spec.num_kv_heads) == (2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_reads_its_half_of_every_expert(rank: int, tmp_path: Path) -> None:
    stored = load_file(make_checkpoint(tmp_path, "qwen3_moe") / "model.safetensors")
    model = loaded(tmp_path, group=Group(rank, 2))
    for expert in range(8):
        own = f"model.layers.0.mlp.experts.{expert}"
        gate, up, down = (stored[f"{own}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gate_up = model.weights["layers.0.experts.gate_up"][expert]
        assert torch.equal(gate_up, torch.cat([part(gate, rank, 0), part(up, rank, 0)]))
        assert torch.equal(model.weights["layers.0.experts.down"][expert], part(down, rank, 1))
    assert torch.equal(model.weights["layers.0.router"], stored["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_rounds_is_its_half(rank: int, tmp_path: Path) -> None:
    formats = formats_of("int8", 32, rounds_inputs=False)
    make_checkpoint(tmp_path, hidden_size=128, intermediate_size=128, head_dim=32)
    mine = loaded(tmp_path, group=Group(rank, 2), formats=formats)
    whole = loaded(tmp_path, formats=formats)
    # Rows have scales of their own, so a half of them is a half of what all are.
    half = mine.weights["layers.0.gate_up_weight"].dequantized()  # type: ignore[union-attr]
    both = whole.weights["layers.0.gate_up_weight"].dequantized()  # type: ignore[union-attr]
    gate, up = both.chunk(2)
    assert torch.equal(half, torch.cat([part(gate, rank, 0), part(up, rank, 0)]))


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_key_value_heads=1)
    with pytest.raises(ValueError, match="a dimension of 1 cannot be divided among 2 ranks"):
        loaded(tmp_path, group=Group(0, 2))


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_transforms_and_views_with_gaps(rank: int | None, tmp_path: Path) -> None:
    """Columns of a parameter, one half of which is stored the other way around."""
    group = Group() if rank is None else Group(rank, 2)

    def write(builder: ProgramBuilder, config: ModelConfig) -> None:
        write_decoder(builder, config)
        width = group.shard(6)
        builder.parameter(
            "extra",
            (5, 2 * width),
            "vector",
            (
                Placement("plain", (slice(None), slice(0, width)), shard=1),
                Placement("turned", (slice(None), slice(width, None)), 0, Transposed()),
            ),
        )

    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    plain, turned = torch.randn(5, 6), torch.randn(6, 5)
    save_file(load_file(file) | {"plain": plain, "turned": turned}, file, {"format": "pt"})
    if rank is not None:
        plain, turned = part(plain, rank, 1), part(turned, rank, 0)
    model = loaded(tmp_path, write, group=group)
    assert torch.equal(model.weights["extra"], torch.cat([plain, turned.t()], dim=1))


def test_a_tensor_of_another_shape_is_refused_by_what_all_ranks_have(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:, :32].contiguous()}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{name} \(expected \[64, 64\], got \[64, 32\]\)"):
        loaded(tmp_path, group=Group(1, 2))


@pytest.mark.parametrize("shard", [0, 1, None])
def test_parts_of_ranks_make_the_whole(shard: int | None) -> None:
    stored, placement = torch.randn(6, 4), Placement("x", shard=shard)
    parts = [own_part(stored, placement, rank, 2) for rank in range(2)]
    if shard is None:
        assert all(each is stored for each in parts)
    else:
        assert torch.equal(torch.cat(parts, dim=shard), stored)
        # Views: nothing is copied but into the parameter.
        assert all(
            each.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            for each in parts
        )
    assert {stored_shape(tuple(each.shape), placement, 2) for each in parts} == {(6, 4)}
    turned = Placement("x", (), shard, Transposed())
    assert {stored_shape(tuple(each.t().shape), turned, 2) for each in parts} == {(6, 4)}


@pytest.mark.parametrize(("start", "rotary_dim"), [(0, 16), (0, 8), (8, 8), (4, 8)])
def test_rows_in_halves_score_as_interleaved_ones_do_in_the_reference(
    start: int, rotary_dim: int
) -> None:
    """Products of rotated queries and keys, for heads that are rotated in any of their parts."""
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    heads, head_dim, tokens, hidden = 3, 16, 5, 24
    residual = torch.randn(tokens, hidden, dtype=torch.float64)
    weights = torch.randn(2, heads * head_dim, hidden, dtype=torch.float64)
    angles = torch.rand(tokens, rotary_dim // 2, dtype=torch.float64) * 6
    end = start + rotary_dim

    def scores(query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("thd,shd->hts", query, key)

    def projected(weight: Tensor) -> Tensor:
        return (residual @ weight.t()).unflatten(1, (heads, head_dim))

    table = torch.cat([angles, angles], dim=-1)[None]  # As transformers' rotary embedding has it.
    plain = [projected(weight) for weight in weights]
    moved = [each[..., start:end].transpose(0, 1)[None] for each in plain]
    rotated = apply_rotary_pos_emb(*moved, table.cos(), table.sin())
    for each, part in zip(plain, rotated, strict=True):
        each[..., start:end] = part[0].transpose(0, 1)
    want = scores(plain[0], plain[1])

    order = InHalves(head_dim, rotary_dim, start)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    mine = [projected(order(weight)) for weight in weights]
    for each in mine:
        each[..., start:end] = apply_rope(each[..., start:end], cos_sin, rotary_dim)
    torch.testing.assert_close(scores(mine[0], mine[1]), want)


def test_rows_in_halves_leave_the_heads_behind_the_first_few() -> None:
    stored = torch.arange(24)
    got = InHalves(8, 4, start=2, heads=2)(stored)
    first = [0, 1, 2, 4, 3, 5, 6, 7]
    assert got.tolist() == [*first, *(8 + row for row in first), *range(16, 24)]
    by_head = InHalves(8, 4, start=2, dim=1)(stored.view(3, 8))
    assert by_head.tolist() == [[8 * head + row for row in first] for head in range(3)]


@pytest.mark.parametrize("transform", [InHalves(16, 16), Transposed()])
@pytest.mark.parametrize("shape", [(64, 48), (64,), (32, 64), (1, 64, 64)])
def test_a_transformed_tensor_of_another_shape_is_refused(
    transform: InHalves | Transposed, shape: tuple[int, ...], tmp_path: Path
) -> None:
    def write(builder: ProgramBuilder, config: ModelConfig) -> None:
        write_decoder(builder, config)
        builder.parameter("extra", (64, 64), "vector", (Placement("extra", (), 0, transform),))

    file = make_checkpoint(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"extra": torch.zeros(shape)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"mis-shaped: extra \(expected \[64, 64\], got"):
        loaded(tmp_path, write)


def test_rows_of_one_tensor_or_of_one_for_each_part() -> None:
    assert rows_of(["all"], [3, 4]) == (Placement("all", shard=0),)
    assert rows_of(["one", "other"], [3, 4]) == (
        Placement("one", (slice(0, 3),), 0),
        Placement("other", (slice(3, 7),), 0),
    )
    with pytest.raises(ValueError, match="2 tensors for 3 parts"):
        rows_of(["one", "other"], [1, 2, 3])


def test_first_rows_of_parts_ascend() -> None:
    """As parts of a matrix that is decoded are cut, whatever order they are placed in."""
    parts = rows_of(["a", "b", "c"], [4, 2, 3])
    placed = (parts[2], parts[0], parts[1], parts[0])
    parameter = Parameter("x", (9, 4), "matrix", placed, None, torch.float32)
    assert starts_of(parameter) == (0, 4, 6)
