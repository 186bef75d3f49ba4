"""Scales and zero points at the ends of their ranges, in every format of quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.weights.schemes.layouts import GptqLayout
from src.models.weights.schemes.of_methods import read_gptq
from src.ops.projections.projection import Projection
from tests.models.harness import dense_logits
from tests.models.test_oracle import prompt_of, reference_logits, relative_error
from tests.models.test_quantized_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    PER_GROUP,
    ROUNDED,
    ROUNDED_TOLERANCE,
    WEIGHT_ONLY,
    check,
    compressed,
    float8_rounded,
    made,
)
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.gguf_files import Type, gguf, write_gguf
from tests.support.quantized import (
    Packer,
    awq,
    change_tensors,
    form_of,
    fp8,
    gptq,
    packed,
    to_words,
    write_quantized,
)

NAN, INFINITE = float("nan"), float("inf")
# Format -> its section, its packer, and the end of the name of its scales.
SCALES: dict[str, tuple[Any, Packer, str]] = {
    "awq": (AWQ, awq(32), "scales"),
    "gptq": (GPTQ, gptq(), "scales"),
    "packed": (compressed("pack-quantized", PER_GROUP), packed(), "weight_scale"),
    "int8": (*WEIGHT_ONLY["int8"][:2], "weight_scale"),
    "fp8": (FP8, fp8(), "weight_scale"),
    "fp8-blocks": (*ROUNDED["fp8-blocks"][:2], "weight_scale_inv"),
    "fbgemm": (*ROUNDED["fbgemm"][:2], "weight_scale"),
}
STATIC = (FP8 | {"activation_scheme": "static"}, fp8(static="input_scale"))


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        scales.view(-1)[-1] = value
        return scales

    return change


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    section, pack, ending = SCALES[name]
    directory, _ = made(tmp_path, section, pack, num_hidden_layers=1)
    change_tensors(directory, **{ending: spoilt(value)})
    with pytest.raises(ModelLoadError, match=r"_proj\.weight: its scales must be finite numbers"):
        load_model(directory)


@pytest.mark.parametrize("value", [NAN, INFINITE, 0.0, -0.02])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_inputs_are_divided_by_positive_numbers_only(
    tmp_path: Path, name: str, value: float
) -> None:
    section, pack = STATIC if name == "fp8" else ROUNDED["w8a8-int8-static"][:2]
    directory, _ = made(tmp_path, section, pack, num_hidden_layers=1)
    change_tensors(directory, input_scale=spoilt(value))
    with pytest.raises(ModelLoadError, match="the scale of its inputs must be a positive number"):
        load_model(directory)


def with_zeros(pack: Packer) -> Packer:
    """Packs matrices of which a group, a row and a block are zeros, with scales of zero there."""

    def packed_with_zeros(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weight = weight.clone()
        weight[:32, :32] = 0
        weight[-1] = 0
        return pack(weight)

    return packed_with_zeros


@pytest.mark.parametrize("name", [name for name in SCALES if name != "fp8"])
def test_groups_of_zeros_have_scales_of_zero(tmp_path: Path, name: str) -> None:
    section, pack, ending = SCALES[name]
    directory, reference = made(tmp_path, section, with_zeros(pack), num_hidden_layers=1)
    scales = load_file(directory / "model.safetensors")
    assert any((each == 0).any() for n, each in scales.items() if n.endswith(ending))
    model = load_model(directory)
    assert dense_logits(model, prompt_of(24)).isfinite().all()
    if "fp8" not in name and name != "fbgemm":  # whose inputs are rounded
        check(model, reference)


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "int8"])
def test_negative_scales_are_numbers_as_others(tmp_path: Path, name: str) -> None:
    """Some tools store them, for a range that reaches farther above zero than below."""
    section, pack, _ = SCALES[name]

    def negative(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, values = pack(weight)
        return {n: -part if "scale" in n else part for n, part in parts.items()}, -values

    directory, reference = made(tmp_path, section, negative, num_hidden_layers=1)
    check(load_model(directory), reference)


def file_of(tmp_path: Path, kind: Type) -> Path:
    checkpoint = make_checkpoint(
        tmp_path / "of", num_hidden_layers=1, hidden_size=256, intermediate_size=256, head_dim=64
    )
    return write_gguf(tmp_path / "m.gguf", checkpoint, "llama", lambda name: kind)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K])
@pytest.mark.parametrize("value", [NAN, INFINITE])
@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "token_embd.weight"])
def test_scales_of_blocks_that_are_no_numbers_are_refused(
    tmp_path: Path, kind: Type, value: float, name: str
) -> None:
    path = file_of(tmp_path, kind)
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    at = 208 if kind == Type.Q6_K else 0
    with path.open("r+b") as file:
        file.seek(tensor.data_offset + at)
        file.write(np.float16(value).tobytes())
    with pytest.raises(ModelLoadError, match="the scales of its blocks must be finite numbers"):
        load_model(path)


def reference_zeros(points: Tensor, bits: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Zero points [G, N] as tools store them in GPTQ's first version, and their sections."""
    most = 2**bits - 1
    plain = to_words(points.numpy(), bits)
    one = sum(1 << at for at in range(0, 32, bits))
    borrowed = (plain.numpy().view(np.uint32) - np.uint32(one)).view(np.int32)
    section = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False}
    return {
        "level by level": (to_words((points.numpy() - 1) & most, bits), section),
        "words": (
            torch.from_numpy(borrowed.copy()),
            section | {"meta": {"quantizer": ["gptqmodel:5.6.0"]}},
        ),
        "second version": (plain, section | {"checkpoint_format": "gptq_v2"}),
    }


@pytest.mark.parametrize("way", ["level by level", "words", "second version"])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_zero_in_the_first_version_of_gptq(bits: int, way: str) -> None:
    """0 less one is the largest level. GPTQModel subtracts from words, where 0 borrows."""
    points = torch.randint(0, 2**bits, (4, 64), generator=torch.Generator().manual_seed(0))
    points[0, :16] = 0
    points[1, ::2] = 0
    stored, section = reference_zeros(points, bits)[way]
    layout = read_gptq(section).schemes.scheme.packing.layout  # type: ignore[attr-defined]
    assert isinstance(layout, GptqLayout)
    tensors = {
        "levels": torch.zeros(32 * 4 * bits // 32, 64, dtype=torch.int32),
        "zeros": stored,
        "scales": torch.ones(4, 64),
    }
    read = layout.read(tensors)
    assert read.zeros is not None
    assert torch.equal(read.zeros, points.T.float())


def test_a_model_with_zero_points_of_zero(tmp_path: Path) -> None:
    """Of groups without a negative weight."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weight = weight.clone()
        weight[:, :32] = weight[:, :32].abs()
        return gptq(symmetric=False)(weight)

    directory, reference = made(tmp_path, GPTQ | {"sym": False}, pack, num_hidden_layers=1)
    check(load_model(directory), reference)


def test_parts_with_static_scales_of_their_own(tmp_path: Path) -> None:
    """Weights keep the scale of their part. Inputs are shared, so theirs is the largest."""
    scales = {
        "q": 0.013,
        "k": 0.03,
        "v": 0.02,
        "o": 0.011,
        "gate": 0.017,
        "up": 0.025,
        "down": 0.01,
    }
    plain = make_checkpoint(tmp_path / "plain", num_hidden_layers=1)
    tensors = load_file(plain / "model.safetensors")
    for size, (name, weight) in enumerate(tensors.items(), 1):
        # Parts of very different sizes.
        if "_proj" in name:
            tensors[name] = weight * (0.2 * size)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})

    def pack_of(name: str) -> Packer:
        own = scales.get(name.rpartition("_proj")[0].rpartition(".")[2], 1.0)

        def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            parts, values = STATIC[1](weight)
            return parts | {"input_scale": torch.tensor(own)}, values

        return pack

    directory = write_quantized(plain, tmp_path / "quantized", STATIC[0], pack_of, by_name=True)
    model, reference = load_model(directory), load_reference(plain)
    fused = {"q": 0.03, "k": 0.03, "v": 0.03, "gate": 0.025, "up": 0.025}
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            part = name.rpartition(".")[2].removesuffix("_proj")
            scale = torch.tensor(fused.get(part, scales[part]))
            module.register_forward_pre_hook(
                lambda _, given, scale=scale: (float8_rounded(given[0], scale),)
            )
    weight = model.weights["layers.0.qkv_weight"]
    assert form_of(weight) == "e4m3 by static"
    assert isinstance(weight, Projection)
    assert weight.matrix.scales is not None
    assert len(weight.matrix.scales.unique()) == 3
    prompt = prompt_of(40)
    errors = relative_error(dense_logits(model, prompt), reference_logits(reference, prompt))
    assert errors.max() < ROUNDED_TOLERANCE
    assert errors.mean() < ROUNDED_TOLERANCE / 30


@pytest.mark.parametrize("name", ["awq", "gptq", "packed-zeros", "fp8"])
def test_a_tied_head_is_the_plain_embedding(tmp_path: Path, name: str) -> None:
    section, pack, kind = WEIGHT_ONLY[name]
    if name == "gptq":
        # Which says nothing where there is no head.
        section = section | {"lm_head": True}
    directory, reference = made(tmp_path, section, pack, num_hidden_layers=1, tie=True)
    model = load_model(directory)
    assert {form_of(model.weights[f"layers.0.{name}_weight"]) for name in ("qkv", "down")} == {kind}
    assert isinstance(model.weights["embedding"], Tensor)
    check(model, reference)


CACHE_NAMES = ("self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.attn.{}_scale")


@pytest.mark.parametrize("form", CACHE_NAMES)
def test_fp8_models_with_scales_of_a_cache(tmp_path: Path, form: str) -> None:
    directory, _ = made(tmp_path, *STATIC, num_hidden_layers=2)
    want = dense_logits(load_model(directory), prompt_of(24))
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        for kind, value in (("k", 0.25), ("v", 0.5)):
            name = f"model.layers.{layer}.{form.format(kind)}"
            tensors[name] = torch.tensor([value], dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    model = load_model(directory)
    assert model.kv_scales == {0: (0.25, 0.5), 1: (0.25, 0.5)}
    assert torch.equal(dense_logits(model, prompt_of(24)), want)
    for value in (NAN, INFINITE, 0.0):
        bad = tensors | {f"model.layers.1.{form.format('k')}": torch.tensor(value)}
        save_file(bad, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"layers\.1\..*k_scale must be positive"):
            load_model(directory)
