"""Quantized weights: what rounding does to a matrix, and that the rest of the model is exact."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from src.core.errors import ModelLoadError
from src.models import Model, load_model, outline_model
from src.models.loading.filling import reader_threads
from src.models.loading.options import LoadOptions
from src.models.weights.methods import Rounded
from src.ops.matrix import LARGEST_UNIT, Matrix, Tiling
from src.ops.projections.linear import round_inputs
from src.ops.projections.projection import Projection
from src.ops.projections.rounding import quantize
from tests.models.harness import PagedSequence, dense_logits
from tests.support.checkpoints import load_reference, make_checkpoint

TOLERANCE = 1e-4  # of a logit, relative to the largest of its row
PROMPT = [5, 17, 3, 250, 99, 4, 4, 31, 8, 120, 77, 6]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 128]),
    method=st.sampled_from(["int8", "int4"]),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_no_weight_moves_further_than_half_a_step(
    rows: int, groups: int, group_size: int, method: Any, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * group_size, generator=generator) * spread
    weight[0, :group_size] = 0  # a group of zeros has no largest value
    quantized = quantize(weight, method, group_size)
    assert quantized.scales is not None
    step, most = quantized.scales.float().abs(), torch.zeros(())
    if method == "int4":
        step = step.repeat_interleave(group_size, dim=1)
        # What the ends may lie beyond the levels: scale and offset fit all, not the ends, and the
        # offset is rounded to bfloat16.
        assert quantized.offsets is not None
        most = quantized.offsets.float().abs().repeat_interleave(group_size, dim=1) / 256 + step
    else:
        step = step[:, None]
    error = (quantized.dequantized() - weight).abs()
    assert (error <= step * 0.5 * (1 + 1e-5) + most).all()
    assert (quantized.dequantized()[0, :group_size] == 0).all()


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_what_is_representable_survives(seed: int) -> None:
    """Levels around zero whose ends are -8, and levels anywhere of which both ends occur."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-8, 8, (5, 96), generator=generator).float()
    levels[:, ::32] = -8
    scales = (torch.rand(5, 3, generator=generator) + 0.5).bfloat16().float()
    weight = levels * scales.repeat_interleave(32, dim=1)
    assert torch.equal(quantize(weight, "int4", 32).dequantized(), weight)
    levels[:, 1::32] = 7
    offsets = (scales * torch.randint(-20, 20, scales.shape, generator=generator)).bfloat16()
    moved = levels * scales.repeat_interleave(32, dim=1) - offsets.repeat_interleave(32, dim=1)
    # As near as bfloat16 has the offset.
    error = (quantize(moved, "int4", 32).dequantized() - moved).abs()
    assert (error <= moved.abs().amax() / 128).all()
    assert error.mean() < 0.01


def test_four_bits_keep_what_four_bits_with_minima_had() -> None:
    """Weights that were 4 bits with a minimum once (GGUF's Q4_1) lose next to nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator) / 16
    groups = weight.view(64, -1, 32)
    least = groups.amin(2, keepdim=True).half().float()
    step = ((groups.amax(2, keepdim=True) - least) / 15).half().float()
    once = (((groups - least) / step).round().clamp(0, 15) * step + least).view(64, 256)
    error = (quantize(once, "int4", 32).dequantized() - once).norm() / once.norm()
    assert error < 0.01
    # Weights that never were: without offsets the error would be a fifth larger.
    assert (quantize(weight, "int4", 32).dequantized() - weight).norm() / weight.norm() < 0.085


def of_layers(model: Model, name: str) -> list[Matrix]:
    """A parameter of every layer."""
    layers = range(len(model.config.layers))
    weights = [model.weights[f"layers.{layer}.{name}"] for layer in layers]
    matrices = [weight.matrix for weight in weights if isinstance(weight, Projection)]
    assert len(matrices) == len(weights)
    return matrices


def quantized_reference(directory: Path, decoder: Model) -> Any:
    """transformers with the matrices that the decoder's quantized ones stand for."""
    reference = load_reference(directory)
    with torch.no_grad():
        for number, layer in enumerate(reference.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            fused = {
                "qkv_weight": (attention.q_proj, attention.k_proj, attention.v_proj),
                "output_weight": (attention.o_proj,),
                "gate_up_weight": (mlp.gate_proj, mlp.up_proj),
                "down_weight": (mlp.down_proj,),
            }
            for name, modules in fused.items():
                weight = decoder.weights[f"layers.{number}.{name}"]
                assert isinstance(weight, Projection)
                rows = [module.out_features for module in modules]
                for module, part in zip(modules, weight.dequantized().split(rows), strict=True):
                    module.weight.copy_(part)
        assert isinstance(decoder.weights["head"], Projection)
        # Apart from the embedding, which keeps its values even where the head is tied to it.
        reference.lm_head.weight = torch.nn.Parameter(decoder.weights["head"].dequantized())
    return reference


@pytest.mark.parametrize("architecture", ["deepseekv2", "deepseekv3"])
def test_latent_attention_keeps_its_own_projection(tmp_path: Path, architecture: str) -> None:
    """The model is that of its rounded matrices; what makes keys and values is none of them."""
    directory = make_checkpoint(tmp_path, architecture, moe_intermediate_size=64)
    rounded, plain = load_model(directory, LoadOptions(quantization="int8")), load_model(directory)
    found = set()
    for name, weight in rounded.weights.items():
        if isinstance(weight, Projection):
            found.add(name.rpartition(".")[2])
            plain.replace(name, weight.dequantized())
    assert {"latent_down_weight", "output_weight", "gate_up_weight"} <= found
    assert "latent_up" not in found
    want = dense_logits(plain, PROMPT)
    for got in (dense_logits(rounded, PROMPT), PagedSequence(rounded).append(PROMPT)):
        error = (got - want).abs() / want.abs().amax(dim=-1, keepdim=True)
        assert error.max() < TOLERANCE


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "tie"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)]
)
@torch.inference_mode()
def test_the_model_is_the_one_of_the_rounded_matrices(
    tmp_path: Path, architecture: str, tie: bool, method: Any
) -> None:
    directory = make_checkpoint(tmp_path / "model", architecture, tie=tie)
    decoder = load_model(directory, LoadOptions(quantization=method))
    reference = quantized_reference(directory, decoder)
    want = reference(torch.tensor([PROMPT])).logits[0]
    for got in (dense_logits(decoder, PROMPT), PagedSequence(decoder).append(PROMPT)):
        error = (got - want).abs() / want.abs().amax(dim=-1, keepdim=True)
        assert error.max() < TOLERANCE
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(
            int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        )
    assert PagedSequence(decoder).greedy(PROMPT, 12, chunk=5) == tokens[len(PROMPT) :]
    # Rounding is not nothing: else the test above would show nothing.
    exact = dense_logits(load_model(directory), PROMPT)
    assert (got - exact).abs().max() > 10 * TOLERANCE * exact.abs().max()


@pytest.mark.parametrize("method", ["int8", "int4"])
@torch.inference_mode()
def test_inputs_are_rounded_where_that_is_asked_for(tmp_path: Path, method: Any) -> None:
    """By transformers whose linear layers are given rounded inputs, and the rounded matrices."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    directory = make_checkpoint(tmp_path / "model", "qwen3", tie=True, **sizes)
    decoder = load_model(directory, LoadOptions(quantization=method, rounds_inputs=True))
    for weight in of_layers(decoder, "down_weight"):
        assert weight.tiling is Tiling.TILES
    reference = quantized_reference(directory, decoder)
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            unit = LARGEST_UNIT if method == "int8" or name == "lm_head" else 32
            module.register_forward_pre_hook(partial(_rounded, unit))
    exact = load_model(directory, LoadOptions(quantization=method))
    errors, effects = [], []
    for prompt in [*([token] for token in PROMPT), PROMPT]:  # the last one attends as well
        want = reference(torch.tensor([prompt])).logits[0]
        largest = want.abs().amax(dim=-1, keepdim=True)
        effects.append(((dense_logits(exact, prompt) - want).abs() / largest).max())
        got = torch.stack([dense_logits(decoder, prompt), PagedSequence(decoder).append(prompt)])
        errors.append(((got - want).abs() / largest).amax(dim=(0, 2)))
    # An input on the border between two steps may fall to either side, and all behind it with it.
    assert torch.cat(errors).median() < TOLERANCE
    assert errors[-1].min() < TOLERANCE
    assert torch.cat(errors).max() < 2 * max(effects)
    # Rounding is not nothing, and not much.
    assert min(effects) > 20 * TOLERANCE
    assert max(effects) < 0.1


def _rounded(unit: int, module: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    (x,) = args
    return round_inputs(x.view(-1, x.shape[-1]), unit).view(x.shape)


def test_matrices_that_do_not_fit_strips_stay_in_rows(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
    decoder = load_model(
        make_checkpoint(tmp_path / "model", **sizes),
        LoadOptions(quantization="int8", rounds_inputs=True),
    )
    pairs = zip(of_layers(decoder, "qkv_weight"), of_layers(decoder, "down_weight"), strict=True)
    for qkv, down in pairs:
        assert (qkv.tiling, down.tiling) == (Tiling.ROWS, Tiling.TILES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_wants_digits_is_not_rounded_unasked(tmp_path: Path, dtype: str) -> None:
    directory = make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=256)
    for wish, rounds in ((None, dtype == "bfloat16"), (True, True), (False, False)):
        options = LoadOptions(dtype=dtype, quantization="int8", rounds_inputs=wish)
        decoder, outline = load_model(directory, options), outline_model(directory, options)
        # Code is compiled by the outline's shapes.
        own, planned = decoder.weights["head"].matrix, outline.weights["head"].matrix
        assert own.values.shape == planned.values.shape
        assert own.tiling is planned.tiling is (Tiling.TILES if rounds else Tiling.ROWS)


def test_few_originals_live_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is read, rounded and let go of before many others are read."""
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=12)
    plain_model = load_model(directory)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    staging = Rounded.staging

    def watched(self: Rounded, *given: Any) -> dict[str, torch.Tensor]:
        nonlocal most
        parts = staging(self, *given)
        if not parts["weight"].is_meta:
            alive.add(parts["weight"])
            most = max(most, len(alive))
        return parts

    monkeypatch.setattr(Rounded, "staging", watched)
    decoder = load_model(directory, LoadOptions(quantization="int4"))
    gc.collect()
    assert not alive
    assert most <= reader_threads() + 2 < 12 * 4
    parameters = decoder.parameters()
    assert parameters["layers.0.qkv_weight.values"].dtype == torch.uint8
    assert parameters["head.values"].dtype == torch.int8
    before = sum(tensor.nbytes for tensor in plain_model.parameters().values())
    assert sum(tensor.nbytes for tensor in parameters.values()) < before / 2


def test_rows_that_cannot_be_cut_into_groups_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", intermediate_size=48)
    with pytest.raises(ModelLoadError, match=r"quantization = 'int8'.* 48 weights .* 32"):
        load_model(directory, LoadOptions(quantization="int8"))
    directory = make_checkpoint(tmp_path / "other")
    with pytest.raises(ModelLoadError, match=r"quantization = 'int4'.* 64 weights .* 128"):
        load_model(directory, LoadOptions(quantization="int4", group_size=128))
