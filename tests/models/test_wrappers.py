"""Checkpoints of models with images whose text part is a family's: it is served as that family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.errors import ModelLoadError
from src.models import load_config, load_model
from src.models.implementations import choose_implementation
from tests.models.test_oracle import check_float32
from tests.support.checkpoints import TINY, make_checkpoint


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random checkpoint of Llama 4 with its vision model, and transformers' model of it."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

    folder = tmp_path_factory.mktemp("wrapped")
    make_checkpoint(folder / "text", "llama4")
    text = Llama4TextConfig.from_pretrained(folder / "text").to_dict()
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vision_output_dim": 32,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    config = Llama4Config(text_config=text, vision_config=vision)
    torch.manual_seed(1)
    model = Llama4ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder / "whole")
    return folder / "whole", model


def test_the_text_part_gives_the_logits_of_its_language_model(wrapped: tuple[Path, Any]) -> None:
    path, whole = wrapped
    assert choose_implementation(path, "auto").name == "native"
    model = load_model(path)
    check_float32(model, whole.language_model)
    chunks = {layer.attention.chunk for layer in model.config.layers}
    assert chunks == {TINY["llama4"]["attention_chunk_size"], None}


def test_a_text_model_that_was_saved_by_itself_may_have_the_file_of_the_whole(
    wrapped: tuple[Path, Any], tmp_path: Path
) -> None:
    wrapped[1].language_model.save_pretrained(tmp_path)
    raw = json.loads((wrapped[0] / "config.json").read_text())
    for change in ({}, raw | {"architectures": ["Llama4ForCausalLM"]}):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        check_float32(load_model(tmp_path), wrapped[1].language_model)


def test_a_file_without_architectures_is_told_by_its_model_type(
    wrapped: tuple[Path, Any], tmp_path: Path
) -> None:
    raw = json.loads((wrapped[0] / "config.json").read_text())
    dtype = raw["text_config"].pop("dtype", None) or raw.pop("dtype")
    for change in ({"architectures": None}, {"architectures": []}, {}):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"} | change))
        config = load_config(tmp_path)
        assert (config.architecture, config.dtype) == ("Llama4ForCausalLM", "bfloat16")
    assert dtype is not None


@pytest.mark.parametrize("whole", [None, {}])
def test_a_quantization_of_the_text_part_is_read(
    whole: Any, wrapped: tuple[Path, Any], tmp_path: Path
) -> None:
    raw = json.loads((wrapped[0] / "config.json").read_text())
    raw["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": whole}))
    formats = load_config(tmp_path).formats
    assert formats is not None
    assert formats.name == "fp8 with scales per tensor"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config must be an object, got None"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"quantization_config": {"quant_method": "quark"}}, r"quantization_config \(quark"),
    ],
)
def test_what_cannot_be_read_is_refused(
    change: dict[str, Any], message: str, wrapped: tuple[Path, Any], tmp_path: Path
) -> None:
    raw = json.loads((wrapped[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)
