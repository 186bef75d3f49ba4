"""Quantized checkpoints give the logits of their dequantized weights in transformers.

Weight-only formats: float32, within 1e-4 of a row's largest logit, whole and in chunks.
With rounded inputs: transformers' linear layers round their inputs as the format says it, and
logits differ by at most 3 % of a row's largest, since a value near the middle of two steps may fall
to either side.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src import LLM, SamplingParams
from src.core.config import Config, ModelSection
from src.core.errors import ModelLoadError
from src.distributed import Group
from src.engine.sizing.planning import Question, plan_model
from src.models import Model, load_config, load_model
from src.models.loading.loader import outline_model
from src.models.loading.options import LoadOptions
from src.ops.matrix import Encoding, Matrix
from src.ops.projections import projection
from src.ops.projections.projection import InputRounding, Projection
from tests.models.harness import PagedSequence, dense_logits
from tests.models.test_oracle import (
    FLOAT32_TOLERANCE,
    prompt_of,
    reference_logits,
    relative_error,
)
from tests.models.test_placements import loaded
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import greedy, random_prompts, small_config
from tests.support.quantized import (
    Packer,
    awq,
    change_config,
    change_tensors,
    form_of,
    fp8,
    gptq,
    int8,
    nvfp4,
    packed,
    write_quantized,
)

ROUNDED_TOLERANCE = 0.03


def weights(kind: str = "int", bits: int = 4, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel"} | others


def compressed(form: str, weights: dict[str, Any], inputs: Any = None, **others: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    } | others


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PER_GROUP = weights(strategy="group", group_size=32)
UNEVEN = PER_GROUP | {"symmetric": False}
TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
NVFP4_WEIGHTS = weights("float", 4, strategy="tensor_group", group_size=16)
A4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
      "symmetric": True, "dynamic": "local"}  # fmt: skip
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
}  # fmt: skip
WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "awq": (AWQ, awq(32), "levels"),
    "awq-rows": (AWQ | {"group_size": -1}, awq(-1), "levels"),
    "gptq": (GPTQ, gptq(), "levels"),
    "gptq-lies": (GPTQ, gptq(lies=True), "levels"),
    "gptq-zeros": (GPTQ | {"sym": False}, gptq(symmetric=False), "levels"),
    "gptq-v2-8-bits-by-16": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "bits": 8, "group_size": 16},
        gptq(8, 16, symmetric=False, version=2),
        "levels",
    ),
    "gptq-order": (GPTQ | {"desc_act": True}, gptq(shuffled=True), "levels in order"),
    "gptq-order-zeros": (
        GPTQ | {"desc_act": True, "sym": False},
        gptq(shuffled=True, symmetric=False),
        "levels in order",
    ),
    "packed": (compressed("pack-quantized", PER_GROUP), packed(), "levels"),
    "packed-rows": (compressed("pack-quantized", weights()), packed(group=-1), "levels"),
    "packed-8-bits": (
        compressed("pack-quantized", weights(bits=8)), packed(8, -1), "levels",
    ),
    "packed-zeros": (
        compressed("pack-quantized", UNEVEN), packed(symmetric=False), "levels",
    ),
    "packed-order": (
        compressed("pack-quantized", PER_GROUP | {"actorder": "group"}),
        packed(shuffled=True),
        "levels in order",
    ),
    "int8": (compressed("int-quantized", weights(bits=8)), int8(), "levels"),
    "int8-zeros": (
        compressed("int-quantized", weights(bits=8, symmetric=False)),
        int8(symmetric=False),
        "levels",
    ),
    "fp8": (
        compressed("float-quantized", weights("float", 8, strategy="tensor")), fp8(), "e4m3",
    ),
    "fp8-rows": (
        compressed("naive-quantized", weights("float", 8)), fp8(per_row=True), "e4m3",
    ),
    "fp8-blocks": (
        compressed(
            "float-quantized", weights("float", 8, strategy="block", block_structure=[32, 32])
        ),
        fp8(32),
        "e4m3",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS), nvfp4(), "levels"),
    "nvfp4-w4a4": (compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS, A4), nvfp4(a4=True), "levels"),
    "modelopt": (MODELOPT, nvfp4(modelopt=True, a4=True), "levels"),
}  # fmt: skip


def check(model: Model, reference: Any) -> None:
    """The logits of a prompt, whole and in chunks, are the reference's."""
    prompt = prompt_of(24)
    want = reference_logits(reference, prompt)
    assert relative_error(dense_logits(model, prompt), want).max() < FLOAT32_TOLERANCE
    chunked = PagedSequence(model)
    parts = [chunked.append(prompt[start : start + 9]) for start in range(0, 24, 9)]
    assert relative_error(torch.cat(parts), want).max() < FLOAT32_TOLERANCE


def made(tmp_path: Path, section: Any, pack: Any, family: str = "llama", **more: Any) -> Any:
    """A quantized checkpoint, and transformers on its dequantized weights."""
    options = {key: more.pop(key) for key in ("by_name", "chosen", "field") if key in more}
    plain = make_checkpoint(tmp_path / "plain", family, **more)
    directory = write_quantized(plain, tmp_path / "quantized", section, pack, **options)
    return directory, load_reference(plain)


def held(model: Model, ending: str = "_weight") -> set[str]:
    kinds = ("matrix", "head")
    return {
        form_of(model.weights[name])
        for name, parameter in model.table.items()
        if parameter.kind in kinds and name.endswith(ending)
    }


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_are_what_the_format_says(tmp_path: Path, name: str) -> None:
    section, pack, kind = WEIGHT_ONLY[name]
    directory, reference = made(tmp_path, section, pack, num_hidden_layers=1)
    model = load_model(directory)
    assert held(model) == {kind}
    check(model, reference)
    outline = outline_model(directory)
    sizes = [sum(t.nbytes for t in one.parameters().values()) for one in (outline, model)]
    assert sizes[0] == sizes[1]


def float8_rounded(x: Tensor, scales: Tensor) -> Tensor:
    return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales


def float8_by_token(x: Tensor) -> Tensor:
    return float8_rounded(x, x.abs().amax(-1, keepdim=True) / 448)


def float8_by_block(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    return float8_rounded(blocks, blocks.abs().amax(-1, keepdim=True) / 448).flatten(-2)


def int8_rounded(x: Tensor, scales: Any) -> Tensor:
    return (x / scales).round().clamp(-128, 127) * scales


def int8_by_token(x: Tensor) -> Tensor:
    return int8_rounded(x, x.abs().amax(-1, keepdim=True) / 127.5)


ROUNDED: dict[str, tuple[dict[str, Any], Packer, str, Callable[[Tensor], Tensor]]] = {
    "fp8": (FP8, fp8(), "e4m3 by token", float8_by_token),
    "fp8-static": (
        FP8 | {"activation_scheme": "static"},
        fp8(static="input_scale"),
        "e4m3 by static",
        lambda x: float8_rounded(x, torch.tensor(0.02)),
    ),
    "fp8-static-by-its-other-name": (
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        fp8(name="weight_scale_inv", static="activation_scale"),
        "e4m3 by static",
        lambda x: float8_rounded(x, torch.tensor(0.02)),
    ),
    "fp8-blocks": (
        FP8 | {"weight_block_size": [32, 32]},
        fp8(32, name="weight_scale_inv"),
        "e4m3 by block",
        float8_by_block,
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5},
        fp8(per_row=True),
        "e4m3 by token",
        lambda x: float8_rounded(x, x.abs().amax(-1, keepdim=True).clamp(max=1.5) / 448),
    ),
    "w8a8-fp8": (
        compressed("float-quantized", weights("float", 8), TOKEN | {"type": "float"}),
        fp8(per_row=True),
        "e4m3 by token",
        float8_by_token,
    ),
    "w8a8-int8": (
        compressed("int-quantized", weights(bits=8), TOKEN | {"type": "int"}),
        int8(),
        "levels by token",
        int8_by_token,
    ),
    "w8a8-int8-static": (
        compressed(
            "int-quantized",
            weights(bits=8),
            {"num_bits": 8, "dynamic": False, "strategy": "tensor", "type": "int"},
        ),
        int8(static=True),
        "levels by static",
        lambda x: int8_rounded(x, 0.04),
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_inputs_are_rounded_as_the_format_says(tmp_path: Path, name: str) -> None:
    section, pack, kind, rounded = ROUNDED[name]
    directory, reference = made(tmp_path, section, pack, num_hidden_layers=1)
    model, plain = load_model(directory), load_model(tmp_path / "plain")
    assert held(model) == {kind}
    for module_name, module in reference.named_modules():
        if module_name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    prompt = prompt_of(40)
    want = reference_logits(reference, prompt)
    whole = dense_logits(model, prompt)
    assert relative_error(whole, want).max() < ROUNDED_TOLERANCE
    assert relative_error(whole, want).mean() < ROUNDED_TOLERANCE / 30
    # It is the rounding that is compared: without it, logits are further off.
    unrounded = relative_error(dense_logits(plain, prompt), want).mean()
    assert relative_error(whole, want).mean() < unrounded / 3
    chunked = PagedSequence(model)
    parts = [chunked.append(prompt[start : start + 7]) for start in range(0, 40, 7)]
    assert relative_error(torch.cat(parts), want).mean() < ROUNDED_TOLERANCE / 30


def test_every_matrix_of_nvfp4_has_its_own_factor(tmp_path: Path) -> None:
    """Of queries, keys and values: their scales lie in one tensor, each by its own factor."""
    for name in ("nvfp4", "modelopt"):
        section, pack, _ = WEIGHT_ONLY[name]
        plain = make_checkpoint(tmp_path / name / "plain", num_hidden_layers=1)
        tensors = load_file(plain / "model.safetensors")
        for part, factor in (("q", 1.0), ("k", 7.0), ("v", 0.01)):
            tensors[f"model.layers.0.self_attn.{part}_proj.weight"] *= factor
        save_file(tensors, plain / "model.safetensors", {"format": "pt"})
        directory = write_quantized(plain, tmp_path / name / "quantized", section, pack)
        stored = load_file(directory / "model.safetensors")
        ending = "weight_scale_2" if name == "modelopt" else "weight_global_scale"
        factors = {
            stored[f"model.layers.0.self_attn.{part}_proj.{ending}"].item() for part in "qkv"
        }
        assert len(factors) == 3
        check(load_model(directory), load_reference(plain))


def test_modelopts_own_file_stands_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With patterns of modules that are left out, and a factor that is no number refused."""
    directory, reference = made(
        tmp_path,
        None,
        lambda name: None if "layers.1.self_attn" in name else nvfp4(modelopt=True, a4=True),
        by_name=True,
    )
    left_out = ["lm_head", "model.layers.1.self_attn*"]
    section = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    own = {
        "producer": {"name": "modelopt"},
        "quantization": section | {"exclude_modules": left_out},
    }
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    with caplog.at_level("INFO"):
        model = load_model(directory)
    assert "modelopt NVFP4 (w4a4, whose inputs are not rounded)" in caplog.text
    assert form_of(model.weights["layers.1.qkv_weight"]) == "plain"
    assert form_of(model.weights["layers.1.down_weight"]) == "levels"
    check(model, reference)
    tensors = load_file(directory / "model.safetensors")
    # Inputs are not rounded: their scales say nothing, and tools write such of unused experts.
    for ignored in (0.0, float("inf")):
        change_tensors(directory, **{"down_proj.input_scale": lambda t, v=ignored: t * 0 + v})
        load_model(directory)
    for wrong in (0.0, float("nan"), -1.0):
        name = "model.layers.0.mlp.down_proj.weight_scale_2"
        save_file(
            tensors | {name: torch.tensor(wrong)},
            directory / "model.safetensors",
            {"format": "pt"},
        )
        with pytest.raises(ModelLoadError, match="factor of its scales must be a positive"):
            load_model(directory)


def test_modelopts_file_may_quantize_the_cache_alone(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    own = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    assert load_config(directory).formats is None
    check(load_model(directory), load_reference(directory))


@pytest.mark.parametrize("name", ["fp8", "fp8-rows"])
def test_rows_that_no_kernel_takes_are_decoded_once(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """80 inputs of down: no multiple of 32. A start says so, and no call decodes the matrix."""
    section, pack, _ = WEIGHT_ONLY[name]
    shape = {"num_hidden_layers": 1, "intermediate_size": 80}
    directory, reference = made(tmp_path, section, pack, **shape)
    with caplog.at_level("WARNING"):
        model = load_model(directory)
    assert held(model, "down_weight") == {"plain"}
    assert held(model, "qkv_weight") == {"e4m3"}
    assert "1 parameters (layers.0.down_weight) are decoded to float32" in caplog.text
    check(model, reference)
    assert held(outline_model(directory), "down_weight") == {"plain"}


def test_what_a_gpu_has_no_kernel_for_is_decoded_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, pack, _ = WEIGHT_ONLY["fp8"]
    directory, _ = made(tmp_path, section, pack, num_hidden_layers=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, form in (((8, 0), "plain"), ((9, 0), "e4m3")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        outline = outline_model(directory, LoadOptions(device=torch.device("cuda")))
        assert held(outline, "qkv_weight") == {form}
        assert held(outline_model(directory), "qkv_weight") == {"e4m3"}


def test_latents_are_decoded(tmp_path: Path) -> None:
    section = FP8 | {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    pack = fp8(128, name="weight_scale_inv")
    directory, reference = made(tmp_path, section, pack, "deepseekv3", kv_lora_rank=32)
    # No row of so small a model has whole blocks, so nothing rounds its inputs.
    model = load_model(directory)
    assert held(model) == {"plain"}
    check(model, reference)


def test_what_is_ignored_is_left_and_parts_may_disagree(tmp_path: Path) -> None:
    """Values of one layer, gates of another and a whole layer are plain."""
    ignored = [
        "lm_head",
        "model.layers.0.self_attn.v_proj",
        r"re:.*layers\.1\.mlp\.gate_proj$",
        "re:model.layers.2.*",
    ]
    left = re.compile(r"layers\.0\.self_attn\.v_proj|layers\.1\.mlp\.gate_proj|layers\.2\.")
    section = compressed("pack-quantized", UNEVEN, ignore=ignored)
    directory, reference = made(
        tmp_path,
        section,
        lambda name: None if left.search(name) else packed(symmetric=False),
        by_name=True,
    )
    for model in (load_model(directory), outline_model(directory)):
        kinds = {name: form_of(weight) for name, weight in model.weights.items()}
        assert kinds["layers.0.qkv_weight"] == kinds["layers.1.gate_up_weight"] == "plain"
        assert kinds["layers.0.output_weight"] == kinds["layers.1.qkv_weight"] == "levels"
        assert kinds["layers.2.down_weight"] == "plain"
    check(load_model(directory), reference)


def test_the_checkpoint_has_the_last_word_about_what_is_plain(tmp_path: Path) -> None:
    directory, reference = made(
        tmp_path,
        GPTQ,
        lambda name: None if "layers.1" in name else gptq(),
        by_name=True,
    )
    check(load_model(directory), reference)


def test_groups_of_modules_have_formats_of_their_own(tmp_path: Path) -> None:
    section = compressed("mixed", PER_GROUP)
    down = {
        "targets": ["re:.*down_proj"],
        "weights": weights("float", 8, strategy="tensor"),
        "format": "float-quantized",
    }
    section["config_groups"]["group_0"]["format"] = "pack-quantized"
    section["config_groups"]["group_1"] = down
    directory, reference = made(
        tmp_path, section, lambda name: fp8() if "down" in name else packed(), by_name=True
    )
    model = load_model(directory)
    assert held(model, "down_weight") == {"e4m3"}
    assert held(model, "qkv_weight") == {"levels"}
    check(model, reference)


def test_orders_that_differ_within_a_parameter_are_decoded(tmp_path: Path) -> None:
    seeds = itertools.count()
    section = GPTQ | {"desc_act": True, "sym": False}
    pack = gptq(shuffled=True, symmetric=False, seed=lambda: next(seeds))
    directory, reference = made(tmp_path, section, pack)
    model = load_model(directory)
    assert held(model, "qkv_weight") == {"plain"}
    assert held(model, "down_weight") == {"levels in order"}
    check(model, reference)


@pytest.mark.parametrize(
    ("file", "section", "pack"),
    [
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, awq(32)),
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, gptq()),
    ],
)
def test_files_of_older_tools(tmp_path: Path, file: str, section: Any, pack: Packer) -> None:
    directory, reference = made(tmp_path, None, pack)
    (directory / file).write_text(json.dumps(section))
    check(load_model(directory), reference)


def test_the_other_field_of_the_configuration(tmp_path: Path) -> None:
    section = compressed("pack-quantized", PER_GROUP)
    directory, reference = made(tmp_path, section, packed(), field="compression_config")
    check(load_model(directory), reference)


def test_interleaved_rows_are_reordered_with_their_scales(tmp_path: Path) -> None:
    """Cohere's queries and keys are reordered at load: of each part, rows go along."""
    directory, reference = made(tmp_path, AWQ, awq(32), "cohere")
    model = load_model(directory)
    assert held(model, "qkv_weight") == {"levels"}
    check(model, reference)


def test_rounding_at_load_is_not_for_what_is_quantized(tmp_path: Path) -> None:
    directory, _ = made(tmp_path, AWQ, awq(32), num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match=r"model\.quantization = 'int8'.*quantized already"):
        load_model(directory, LoadOptions(quantization="int8"))


def test_dummy_weights_have_the_format(tmp_path: Path) -> None:
    for name, (section, pack, kind, *_) in (WEIGHT_ONLY | ROUNDED).items():
        if name in ("gptq-order", "awq", "fp8-blocks", "w8a8-int8-static"):
            directory, _ = made(tmp_path / name, section, pack, num_hidden_layers=1)
            model = load_model(directory, LoadOptions(load_format="dummy"))
            assert held(model) == {kind}
            assert dense_logits(model, prompt_of(5)).isfinite().all()


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes\) is not supported"),
    "none": ({"bits": 4}, r"quantization_config \("),
    "no object": ("awq", r"\(awq\): it must be an object"),
    "awq bits": (AWQ | {"bits": 3}, "bits must be 4, got 3"),
    "awq gemv": (AWQ | {"version": "gemv"}, "version must be 'gemm', got 'gemv'"),
    "awq group": (AWQ | {"group_size": 10**9}, "group_size must be -1 or from 1 to"),
    "awq no group": (AWQ | {"group_size": "32"}, "group_size must be -1"),
    "gptq bits": (GPTQ | {"bits": 3}, "bits must be 4 or 8, got 3"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq'"),
    "gptq marlin flag": (GPTQ | {"is_marlin_format": True}, "is_marlin_format = True"),
    "gptq rule": (
        GPTQ | {"dynamic": {"+:x": {"bits": 3}}},
        r"dynamic\['\+:x'\]\.bits must be 4 or 8, got 3",
    ),
    "gptq form": (
        GPTQ | {"dynamic": {"x": {"pack_dtype": "int8"}}},
        r"dynamic\['x'\]\.pack_dtype = 'int8' is not supported",
    ),
    "gptq no rule": (GPTQ | {"dynamic": {"x": 4}}, r"dynamic\['x'\] must be an object"),
    "gptq pattern": (GPTQ | {"dynamic": {"-:(": {}}}, "malformed"),
    "fp8 form": (FP8 | {"fmt": "e5m2"}, "fmt must be 'e4m3', got 'e5m2'"),
    "fp8 scheme": (FP8 | {"activation_scheme": "other"}, "activation_scheme must be"),
    "fp8 block": (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two positive"),
    "fp8 names": (FP8 | {"ignored_layers": "x"}, "must be a list of names"),
    "fbgemm bound": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": -1},
        "activation_scale_ub must be a positive",
    ),
    "nvfp4 group": (
        compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS | {"group_size": 32}),
        "group_size must be 16, got 32",
    ),
    "nvfp4 inputs": (
        compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS, TOKEN | {"type": "float"}),
        "num_bits must be 4, got 8",
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", NVFP4_WEIGHTS), "format must be one of"),
    "modelopt": (MODELOPT | {"quant_algo": "FP8"}, "quant_algo must be 'nvfp4', got 'fp8'"),
    "modelopt cache": (
        MODELOPT | {"kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo must be 'fp8'",
    ),
    "bits": (compressed("pack-quantized", weights(bits=3)), "num_bits must be 4 or 8, got 3"),
    "strategy": (compressed("pack-quantized", weights(strategy="x")), "strategy must be"),
    "cache": (
        compressed("int-quantized", weights(bits=8), kv_cache_scheme={"num_bits": 4}),
        r"kv_cache_scheme\.num_bits must be 8, got 4",
    ),
    "sparse": (
        compressed("int-quantized", weights(bits=8), sparsity_config={"format": "24"}),
        "sparsity_config",
    ),
    "inputs": (
        compressed("int-quantized", weights(bits=8), TOKEN | {"symmetric": False}),
        "symmetric must be True",
    ),
    "no groups": (compressed("int-quantized", {}, config_groups={}), "config_groups must be"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", num_hidden_layers=1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(plain: Path, name: str) -> None:
    section, message = REFUSED[name]
    change_config(plain, quantization_config=section)
    with pytest.raises(ModelLoadError, match=message):
        load_config(plain)


HOSTILE: dict[str, tuple[Any, Packer, dict[str, Callable[[Tensor], Tensor | None]], str]] = {
    "qzeros": (AWQ, awq(32), {"qzeros": lambda t: t[:1]}, "mis-shaped: .*qzeros"),
    "scales": (AWQ, awq(32), {"scales": lambda t: t.T}, "mis-shaped: .*scales"),
    "no scales": (AWQ, awq(32), {"scales": lambda t: None}, "missing: .*scales"),
    "words": (AWQ, awq(32), {"qweight": lambda t: t.float()}, r"mis-typed: .*torch\.int32"),
    "order": (
        GPTQ | {"desc_act": True},
        gptq(shuffled=True),
        {"g_idx": lambda t: t + 1},
        "g_idx must be from 0 to ",
    ),
    "below": (
        GPTQ | {"desc_act": True},
        gptq(shuffled=True),
        {"g_idx": lambda t: t - 1},
        "g_idx must be from 0 to ",
    ),
    "uneven": (
        GPTQ | {"desc_act": True},
        gptq(shuffled=True),
        {"g_idx": lambda t: t * 0},
        "g_idx has groups of different sizes",
    ),
    "order unsaid": (GPTQ, gptq(), {"g_idx": lambda t: t.flip(0)}, "desc_act is false"),
    "group": (AWQ | {"group_size": 2**20}, awq(32), {}, "mis-shaped: .*qzeros"),
    "shape": (
        compressed("pack-quantized", PER_GROUP),
        packed(),
        {"weight_shape": lambda t: t * 2},
        "weight_shape is",
    ),
    "fp8 scale": (FP8, fp8(), {"weight_scale": lambda t: None}, "expected one weight_scale"),
    "fp8 scales": (FP8, fp8(), {"weight_scale": lambda t: t.repeat(3)}, "mis-shaped: .*_scale"),
    "blocks": (
        FP8 | {"weight_block_size": [32, 32]},
        fp8(32, name="weight_scale_inv"),
        {"weight_scale_inv": lambda t: t[:1]},
        "mis-shaped: .*weight_scale_inv",
    ),
    "e5m2": (
        FP8, fp8(), {"q_proj.weight": lambda t: t.float().to(torch.float8_e5m2)}, "dtype F8_E5M2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_that_do_not_fit_end_in_one_clear_error(tmp_path: Path, name: str) -> None:
    section, pack, changes, message = HOSTILE[name]
    directory, _ = made(tmp_path, section, pack, num_hidden_layers=1)
    change_tensors(directory, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(directory)


def test_scales_of_a_cache_are_kept(tmp_path: Path) -> None:
    section = compressed(
        "pack-quantized",
        PER_GROUP,
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    )
    directory, reference = made(tmp_path, section, packed())
    tensors = load_file(directory / "model.safetensors")
    own = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.2.self_attn.k_proj.k_scale": torch.tensor(2.0),
    }
    save_file(tensors | own, directory / "model.safetensors", {"format": "pt"})
    model = load_model(directory)
    assert model.kv_scales == {0: (0.5, 0.25), 2: (2.0, 1.0)}
    check(model, reference)
    bad = {"model.layers.1.self_attn.k_scale": torch.tensor(-1.0)}
    save_file(tensors | bad, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.k_scale"):
        load_model(directory)


@pytest.mark.parametrize("name", ["awq", "gptq", "packed-zeros", "fp8-rows", "fp8-blocks"])
def test_ranks_hold_parts_of_what_is_stored(tmp_path: Path, name: str) -> None:
    """Of two ranks; rows and groups of columns are cut, and sums of both parts are the whole."""
    section, pack, kind = WEIGHT_ONLY[name]
    shape = {"num_hidden_layers": 1, "intermediate_size": 128}
    directory, _ = made(tmp_path, section, pack, **shape)
    formats = load_config(directory).formats
    whole = loaded(directory, formats=formats)
    parts = [loaded(directory, formats=formats, group=Group(rank, 2)) for rank in range(2)]
    for weight, dim, sections in (
        ("qkv_weight", 0, [64, 32, 32]), ("gate_up_weight", 0, [128, 128]),
        ("output_weight", 1, None), ("down_weight", 1, None),
    ):  # fmt: skip
        held = [model.weights[f"layers.0.{weight}"] for model in (whole, *parts)]
        assert {form_of(one) for one in held} == {kind}
        want, *halves = (one.dequantized() for one in held)
        if dim == 1:
            got = torch.cat(halves, 1)
        else:
            cut = [half.split([size // 2 for size in sections]) for half in halves]
            got = torch.cat([rows for pair in zip(*cut, strict=True) for rows in pair])
        assert torch.equal(got, want)


def test_groups_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    section, pack, _ = WEIGHT_ONLY["awq"]
    directory, _ = made(tmp_path, section, pack, num_hidden_layers=1)
    formats = load_config(directory).formats
    with pytest.raises(ModelLoadError, match="48 inputs each, which groups of 32 do not divide"):
        loaded(directory, formats=formats, group=Group(0, 2))


def test_products_of_the_device_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that a GPU gets, which torch has for the CPU as well."""
    torch.manual_seed(0)
    x, matrix = torch.randn(5, 64).bfloat16(), torch.randn(48, 64)
    scales = InputRounding("token", "e4m3").scales(matrix)
    values = projection.to_float8(matrix, scales)
    held = Matrix(values, Encoding("e4m3", None, torch.float32), scales.squeeze(1))
    weight = Projection(held, InputRounding("token", "e4m3"))
    bias = torch.randn(48).bfloat16()
    want = weight.multiply(x, bias)
    monkeypatch.setattr(projection, "_multiplies_float8", lambda *given: True)
    got = weight.multiply(x, bias)
    assert_rounded_twice(got, want, bias)
    static = Projection(held, InputRounding("static", "e4m3", torch.full((1, 1), 0.01)))
    got = static.multiply(x, bias)
    monkeypatch.undo()
    assert_rounded_twice(got, static.multiply(x, bias), bias)


def assert_rounded_twice(got: torch.Tensor, want: torch.Tensor, bias: torch.Tensor) -> None:
    """Both are the same sums, rounded to bfloat16 without the bias and again with it, or less.

    Each of four roundings is by half an epsilon of what is rounded. A product is at most as large
    as its result and the bias together.
    """
    unit, sizes = torch.finfo(torch.bfloat16).eps / 2, want.double().abs()
    most = unit * (2 * (sizes + bias.double().abs()) + 2 * sizes)
    assert ((got.double() - want.double()).abs() <= most).all()


def test_an_engine_serves_them_and_says_what_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy tokens of several requests at once, in chunks."""
    section = compressed("float-quantized", weights("float", 8))
    directory, reference = made(
        tmp_path, section, fp8(per_row=True), num_hidden_layers=2, tokenizer=True
    )
    config = small_config(directory, scheduler__max_num_batched_tokens=16)
    prompts = random_prompts(3, longest=40)
    with caplog.at_level("INFO"), LLM(config) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 8)
    assert "compressed-tensors float-quantized (w8), 8 matrices as they are stored" in caplog.text
    plan = plan_model(Config(model=ModelSection(path=str(directory))), Question())
    assert plan.quantization == "compressed-tensors float-quantized (w8)"


def test_biases_of_zeros_are_passed_over_and_others_refused(tmp_path: Path) -> None:
    directory, reference = made(tmp_path, GPTQ, gptq(), num_hidden_layers=1)
    file, name = directory / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    tensors = load_file(file)
    save_file(tensors | {name: torch.zeros(96)}, file, {"format": "pt"})
    check(load_model(directory), reference)
    save_file(tensors | {name: torch.ones(96)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"unexpected: {name}"):
        load_model(directory)
