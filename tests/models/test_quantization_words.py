"""Spellings of quantized checkpoints that say nothing about their tensors, and rules by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.core.errors import ModelLoadError
from src.models import load_config, load_model
from src.models.loading.options import LoadOptions
from tests.models.test_quantized_checkpoints import (
    GPTQ,
    PER_GROUP,
    TOKEN,
    check,
    compressed,
    held,
    made,
    weights,
)
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.quantized import change_config, gptq, packed

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
DENSE = {
    "format": "dense", "global_sparsity": 0.07, "sparsity_structure": "unstructured",
    "ignore": [], "targets": [], "registry_requires_subclass": False,
}  # fmt: skip
PACKED = compressed("pack-quantized", PER_GROUP)
OF_ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "output_activations": CACHE}

WORDS: dict[str, dict[str, Any]] = {
    "a sparsity of dense weights": PACKED | {"sparsity_config": DENSE},
    "frozen": PACKED | {"quantization_status": "frozen"},
    "initialized": PACKED | {"quantization_status": "initialized"},
    "a group of the cache beside": PACKED
    | {"config_groups": {"cache": OF_ATTENTION, **PACKED["config_groups"]}},
    "groups of the cache by the names of what makes it": PACKED
    | {
        "config_groups": {
            "cache": OF_ATTENTION | {"targets": ["re:.*k_proj", "re:.*v_proj", "re:.*mlp"]},
            **PACKED["config_groups"],
        }
    },
    "nested": {"quant_method": "compressed-tensors", "sparsity_config": DENSE,
               "quantization_config": {n: v for n, v in PACKED.items() if n != "quant_method"}},
    "nested without a method": {
        "sparsity_config": None,
        "quantization_config": {n: v for n, v in PACKED.items() if n != "quant_method"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_words_without_effect_are_passed_over(name: str, field: str, tmp_path: Path) -> None:
    directory, reference = made(tmp_path, WORDS[name], packed(), field=field)
    model = load_model(directory)
    assert held(model, "down_weight") == {"levels"}
    check(model, reference)


CACHE_ALONE: dict[str, dict[str, Any]] = {
    "no groups": {"config_groups": {}, "kv_cache_scheme": CACHE},
    "a group of attention": {"config_groups": {"group_0": OF_ATTENTION}},
    "a pattern of attention": {
        "config_groups": {
            "group_0": {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": CACHE}
        }
    },
}


@pytest.mark.parametrize("name", CACHE_ALONE)
def test_a_checkpoint_whose_cache_alone_is_quantized_is_a_plain_one(
    name: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / "model")
    reference = load_reference(directory)
    section = {"quant_method": "compressed-tensors", "format": "dense", **CACHE_ALONE[name]}
    change_config(directory, quantization_config=section)
    tensors = load_file(directory / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(0.5) for kind in "kv"}
    save_file(tensors | scales, directory / "model.safetensors", {"format": "pt"})
    assert load_config(directory).formats is None
    model = load_model(directory)
    assert model.kv_scales == {0: (0.5, 0.5)}
    check(model, reference)
    assert "layers.0.down_weight" in load_model(directory, LoadOptions(quantization="int8")).methods


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": (PACKED | {"sparsity_config": DENSE | {"format": "sparse-bitmask"}},
               r"sparsity_config\.format must be 'dense'"),
    "a status": (PACKED | {"quantization_status": "strange"}, "quantization_status must be"),
    "no groups and no cache": (PACKED | {"config_groups": {}}, "config_groups must be an object"),
    "inputs alone": (
        {"quant_method": "compressed-tensors", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": None, "input_activations": TOKEN}}},
        "weights must be an object, since input_activations are to be rounded",
    ),
    "inputs of some matrices": (
        PACKED | {"config_groups": PACKED["config_groups"] | {"group_1": {
            "targets": ["re:.*down_proj"], "weights": None, "input_activations": TOKEN}}},
        r"config_groups rounds the inputs of model\.layers\.0\.mlp\.down_proj, but not its weights",
    ),
    "a cache of integers": (
        {"quant_method": "compressed-tensors", "config_groups": {},
         "kv_cache_scheme": CACHE | {"type": "int"}},
        r"kv_cache_scheme\.type must be 'float'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_words_with_effect_are_refused_by_name(name: str, tmp_path: Path) -> None:
    section, message = REFUSED[name]
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    change_config(directory, quantization_config=section)
    with pytest.raises(ModelLoadError, match=message):
        load_model(directory)


RULES: dict[str, dict[str, Any]] = {
    "the same bits": {"+:.*down_proj": {"bits": 4, "group_size": 32, "mse": 2.0}},
    "no sign": {".*down_proj": {"bits": 4}},
    "nothing": {"+:.*": {}},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_gptq_that_change_nothing_are_served(name: str, tmp_path: Path) -> None:
    directory, reference = made(tmp_path, GPTQ | {"dynamic": RULES[name]}, gptq())
    model = load_model(directory)
    assert held(model, "down_weight") == {"levels"}
    check(model, reference)


def test_rules_of_gptq_may_have_other_bits_and_groups(tmp_path: Path) -> None:
    rules = {"+:.*down_proj": {"bits": 8, "group_size": 16}, r".*\.o_proj": {"group_size": -1}}

    def pack(name: str) -> Any:
        if "down_proj" in name:
            return gptq(8, 16)
        return gptq(group=-1) if "o_proj" in name else gptq()

    directory, reference = made(tmp_path, GPTQ | {"dynamic": rules}, pack, by_name=True)
    model = load_model(directory)
    for name in ("down_weight", "output_weight", "qkv_weight"):
        assert held(model, name) == {"levels"}
    check(model, reference)


@pytest.mark.parametrize("first", ["+", "-"])
def test_the_first_rule_that_a_module_matches_counts(first: str, tmp_path: Path) -> None:
    """The tensors would tell, if they were of that form; they are said to be of the other."""
    both = {"+:.*down_proj": {"bits": 4}, "-:.*proj": {}}
    rules = dict(sorted(both.items(), key=lambda rule: not rule[0].startswith(first)))
    directory, reference = made(
        tmp_path,
        GPTQ | {"dynamic": rules},
        lambda name: gptq() if "down" in name and first == "+" else None,
        by_name=True,
    )
    formats = load_config(directory).formats
    assert formats is not None
    schemes = formats.schemes  # type: ignore[attr-defined]
    down = schemes.of("model.layers.0.mlp.down_proj", is_head=False)
    assert (down is not None) == (first == "+")
    assert schemes.of("model.layers.0.mlp.up_proj", is_head=False) is None
    check(load_model(directory), reference)


def test_weights_of_fp8_beside_a_group_of_the_cache(tmp_path: Path) -> None:
    section = compressed("float-quantized", weights("float", 8, strategy="tensor"))
    section["config_groups"]["group_1"] = OF_ATTENTION
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    change_config(directory, quantization_config=section)
    formats = load_config(directory).formats
    assert formats is not None
    assert formats.name == "compressed-tensors float-quantized (w8)"
