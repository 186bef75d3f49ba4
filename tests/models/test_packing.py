"""Packed weights: their values are transformers', and checkpoints with them give its logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from src.core.errors import ModelLoadError
from src.models import Model, load_config, load_model
from src.models.checkpoint import first_dtype
from src.models.loading.options import LoadOptions
from src.models.weights.packing import Mxfp4
from src.ops.matrix import Matrix
from src.ops.projections.projection import Projection
from tests.models.harness import dense_logits
from tests.models.test_oracle import check_float32
from tests.support.checkpoints import load_reference, make_checkpoint

EXPERTS, LAYERS = 6, 3


def packed(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales for values of a shape, of ordinary size."""
    random = torch.Generator().manual_seed(seed)
    forms = Mxfp4().forms("experts", shape)
    blocks, scales = (forms[role].shapes[0] for role in ("blocks", "scales"))
    return (
        torch.randint(0, 256, blocks, generator=random, dtype=torch.uint8),
        torch.randint(120, 125, scales, generator=random, dtype=torch.uint8),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_and_scale_is_as_transformers_reads_it(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(255, -1, -1, -1)
    scales = torch.arange(255, dtype=torch.uint8).view(-1, 1, 1).expand(-1, 16, 1)
    expected = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous(), dtype=dtype)
    got = Mxfp4().unpack({"blocks": blocks, "scales": scales}).to(dtype)
    assert got.shape == (255, 16, 32)
    assert torch.equal(got, expected.transpose(1, 2))


class Checkpoints:
    """A checkpoint with packed experts in some layers, and one of the same values in float32."""

    def __init__(self, folder: Path, left_out: list[str], layers: set[int], **more: Any) -> None:
        self.plain = make_checkpoint(folder / "plain", "gpt_oss", sliding_window=8, **more)
        tensors = load_file(self.plain / "model.safetensors")
        self.tensors = dict(tensors)
        for layer in layers:
            for name in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{name}"
                count, inputs, outputs = tensors[name].shape
                blocks, scales = packed(count, outputs, inputs, seed=layer)
                values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                tensors[name] = values.contiguous()
                del self.tensors[name]
                self.tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        save_file(tensors, self.plain / "model.safetensors", {"format": "pt"})
        self.packed = folder / "packed"
        shutil.copytree(self.plain, self.packed)
        self.config = json.loads((self.plain / "config.json").read_text())
        quantization: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
        self.config["quantization_config"] = quantization
        self.write()

    def write(self) -> None:
        (self.packed / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.packed / "model.safetensors", {"format": "pt"})


LEFT_OUT = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]


@pytest.mark.parametrize(
    ("left_out", "layers"),
    [
        (LEFT_OUT, {0, 1, 2}),
        ([*LEFT_OUT, "model.layers.1"], {0, 2}),
        (["layers.0.mlp.experts", "model.layers.*.self_attn", "model.layers.2.mlp"], {1}),
    ],
)
def test_a_packed_checkpoint_gives_the_logits_of_its_values(
    left_out: list[str], layers: set[int], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, left_out, layers)
    model, plain = load_model(checkpoints.packed), load_model(checkpoints.plain)
    same_values(model, plain, layers)
    check_float32(model, load_reference(checkpoints.plain))


def same_values(model: Model, plain: Model, layers: set[int]) -> None:
    """The parameters are the plain ones; experts of these layers are packed as in the file."""
    for name, value in plain.weights.items():
        own = model.weights[name]
        if any(name.startswith(f"layers.{i}.experts.") for i in layers) and "bias" not in name:
            assert isinstance(own, Matrix)
            # Half a byte a number, and a byte for 32 of them.
            assert own.nbytes == own.values.nbytes * 17 // 16 == value.numel() * 17 // 32
            own = own.dequantized()
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own.to(value.dtype), value), name


def test_values_are_the_models_in_any_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model in bfloat16 is the one of plain weights: products are of the same numbers."""
    checkpoints = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2})
    with caplog.at_level("INFO"):
        model, plain = (
            load_model(path, LoadOptions(dtype="bfloat16"))
            for path in (checkpoints.packed, checkpoints.plain)
        )
    same_values(model, plain, {0, 1, 2})
    assert "experts of mxfp4, 6 matrices as they are stored" in caplog.text
    assert "decoded" not in caplog.text
    prompt = list(range(3, 40))
    ours, theirs = dense_logits(model, prompt), dense_logits(plain, prompt)
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_what_is_rounded_at_load_leaves_packed_experts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2})
    model = load_model(checkpoints.packed, LoadOptions(quantization="int8"))
    assert isinstance(model.weights["layers.1.qkv_weight"], Projection)
    assert isinstance(model.weights["layers.1.experts.down"], Matrix)
    assert dense_logits(model, [3, 4, 5]).isfinite().all()


def test_dummy_weights_are_packed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2})
    model = load_model(checkpoints.packed, LoadOptions(load_format="dummy"))
    weight = model.weights["layers.1.experts.gate_up"]
    assert isinstance(weight, Matrix)
    values = weight.dequantized()
    # As random weights: of variance 1 / inputs, up to the rounding to four bits.
    assert 0.8 < values.var() * values.shape[-1] < 1.2
    assert dense_logits(model, [3, 4, 5]).isfinite().all()


def test_packed_bytes_are_not_taken_for_the_dtype_of_a_file_that_names_none(tmp_path: Path) -> None:
    """As gpt-oss-20b's. transformers takes the first tensor of numbers."""
    from transformers.modeling_utils import get_state_dict_dtype

    for dtype in (torch.bfloat16, torch.uint8):
        tensors = {
            "a_blocks": torch.zeros(2, 4, dtype=torch.uint8),
            "b_bias": torch.zeros(2, dtype=dtype),
        }
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        assert first_dtype(tmp_path) == get_state_dict_dtype(tensors) == dtype


def refusal(checkpoints: Checkpoints) -> str:
    checkpoints.write()
    with pytest.raises(ModelLoadError) as caught:
        load_model(checkpoints.packed)
    return str(caught.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2})
    experts = "model.layers.1.mlp.experts"
    tensors = dict(checkpoints.tensors)
    changes: list[tuple[str, Any, str]] = [
        ("down_proj_blocks", lambda t: t[:5].contiguous(), r"mis-shaped: .*down_proj_blocks"),
        (
            "gate_up_proj_scales",
            lambda t: t[..., :1].contiguous(),
            "mis-shaped: .*gate_up_proj_scales",
        ),
        ("down_proj_scales", lambda t: t.float(), "mis-typed: .*down_proj_scales .expected bytes"),
        (
            "down_proj_bias",
            lambda t: t.to(torch.uint8),
            "mis-typed: .*down_proj_bias .expected num",
        ),
    ]
    for name, change, message in changes:
        checkpoints.tensors = tensors | {f"{experts}.{name}": change(tensors[f"{experts}.{name}"])}
        checkpoints.write()
        with pytest.raises(ModelLoadError, match=message):
            load_model(checkpoints.packed)
    checkpoints.tensors = {name: t for name, t in tensors.items() if not name.endswith("_scales")}
    assert "missing: model.layers.0.mlp.experts.gate_up_proj_scales" in refusal(checkpoints)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        ({"quantization_config": "mxfp4"}, r"quantization_config \(mxfp4\)"),
        ({"quantization_config": {}}, "unexpected: .*down_proj_blocks"),
        ({"architectures": None, "model_type": "mixtral"}, r"quantization_config \(mxfp4\)"),
        ({"hidden_size": 72, "head_dim": 16}, "hidden_size must be a multiple of 32"),
        ({"intermediate_size": 80}, "intermediate_size must be a multiple of 32"),
        (
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": "all"}},
            "modules_to_not_convert",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2})
    checkpoints.config |= change
    checkpoints.write()
    with pytest.raises(ModelLoadError, match=message):
        load_model(checkpoints.packed)


def test_published_files_mean_what_transformers_reads_in_them(tmp_path: Path) -> None:
    """A file as gpt-oss-20b's, which names YaRN's parameters beside its base."""
    from transformers import GptOssConfig

    published = {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_local_experts": 32,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "initial_context_length": 4096,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OUT},
    }
    without_rope = {name: value for name, value in published.items() if not name.startswith("rope")}
    for given in (published, without_rope, {**without_rope, "rope_parameters": None}):
        (tmp_path / "config.json").write_text(json.dumps(given))
        config = load_config(tmp_path)
        wanted = GptOssConfig.from_pretrained(tmp_path)
        theirs = wanted.rope_parameters
        assert (config.rope.theta, config.rope.factor) == (theirs["rope_theta"], theirs["factor"])
        assert config.rope.truncate is theirs["truncate"] is False
        windows = [layer.attention.window for layer in config.layers]
        assert windows == [
            wanted.sliding_window if kind == "sliding_attention" else None
            for kind in wanted.layer_types
        ]
        assert config.max_positions == wanted.max_position_embeddings
