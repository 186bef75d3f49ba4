"""Metadata that changes what a model computes is honoured, or refused by name.

The keys are all that llama.cpp has for RoPE (`LLM_KV_ROPE_*`), as the format's own package lists
them. How they act together is llama.cpp's: `attn_factor` multiplies what the rest gives.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from src.core.errors import ModelLoadError
from src.models import load_config, load_model
from src.models.generation import parse_generation
from src.models.gguf import rope as rope_module
from src.models.gguf.configuration import read_configuration
from tests.models.gguf.test_hostile import text, write
from tests.models.gguf.test_oracle import PROMPT, assert_only_rounded, logits_of
from tests.models.harness import dense_logits
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.gguf_files import gguf, write_gguf, write_metadata

Value = float | int | bool | str | list[int]


def packed(value: Value) -> tuple[int, bytes]:
    """A value of metadata: the number of its type, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    return 9, struct.pack("<IQ", 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def file_with(path: Path, architecture: str = "llama", **values: Value) -> Path:
    """A file with little but some keys; ``__`` stands for dots."""
    sizes: dict[str, Value] = {"block_count": 1, "embedding_length": 64, "context_length": 4096}
    sizes |= {"attention.head_count": 2, "feed_forward_length": 64, "attention.head_count_kv": 2}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    sizes |= {key.replace("__", "."): value for key, value in values.items()}
    pairs = {f"{architecture}.{key}": packed(value) for key, value in sizes.items()}
    pairs["general.architecture"] = (8, text(architecture))
    return write(path, pairs, {"token_embd.weight": [64, 4]})


YARN: dict[str, Value] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
REFUSED: dict[str, tuple[dict[str, Value], str]] = {
    "sections": ({"rope__dimension_sections": [8, 4, 4, 0]}, "dimension_sections must be absent"),
    "alpha": ({"rope__scaling__alpha": 1000.0}, r"scaling\.alpha must be 0\.0 or 1\.0"),
    "log": (YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier must be 0.0"),
    "share": (YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor must be -1.0 or 1"),
    "share alone": ({"rope__scaling__yarn_ext_factor": 1.0}, "yarn_ext_factor must be -1.0 or 0"),
    "yarn's factor": (YARN | {"rope__scaling__yarn_attn_factor": 1.2}, "yarn_attn_factor must be"),
    "attention": ({"rope__scaling__attn_factor": 1.2}, r"attn_factor must be 1 with .*'linear'"),
    "a base of windows": ({"rope__freq_base_swa": 1e6}, r"freq_base_swa must be 10000\.0"),
    "a width of windows": ({"rope__dimension_count_swa": 16}, "dimension_count_swa must be"),
    "an unknown key": ({"rope__scaling__strange": 1.0}, r"rope\.scaling\.strange must be absent"),
    "a shrinking factor": ({"rope__scaling__factor": 0.5}, r"scaling\.factor must be 1 or more"),
    "text for a number": ({"rope__scaling__factor": "4"}, r"scaling\.factor must be a number"),
    "no number": ({"rope__freq_base": float("nan")}, r"freq_base must be a number"),
    "another kind": ({"rope__scaling__type": "longrope"}, "'longrope' is not served"),
    "a window": ({"attention__sliding_window": 1024}, "attention.sliding_window = 1024 is not"),
    "a soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not"),
    "a scale": ({"logit_scale": 0.5}, "logit_scale = 0.5 is not served"),
    "wider values": ({"attention__value_length": 64}, "attention.value_length = 64 is not"),
    "both directions": ({"attention__causal": False}, "attention.causal = False is not served"),
    "dense layers": ({"leading_dense_block_count": 1}, "leading_dense_block_count = 1 is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values, message = REFUSED[name]
    with pytest.raises(ModelLoadError, match=message):
        load_config(file_with(tmp_path / "m.gguf", **values))


def test_granite_without_rope_is_refused(tmp_path: Path) -> None:
    """Elsewhere that key only tells how a model was made."""
    values: dict[str, Value] = {"rope__scaling__finetuned": False}
    with pytest.raises(ModelLoadError, match=r"scaling\.finetuned must be True"):
        load_config(file_with(tmp_path / "m.gguf", "granite", **values))
    load_config(file_with(tmp_path / "n.gguf", **values))


NEUTRAL: dict[str, dict[str, Value]] = {
    "nothing": {},
    "a type without a factor": {"rope__scaling__type": "linear"},
    "none, whatever the factor": {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
    "a factor of 0": {"rope__scaling__factor": 0.0},
    "the old name": {"rope__scale_linear": 1.0},
    "what follows anyway": {
        "rope__scaling__attn_factor": 1.0,
        "rope__scaling__yarn_ext_factor": -1.0,
        "rope__scaling__yarn_attn_factor": 1.0,
        "rope__scaling__yarn_log_multiplier": 0.0,
        "rope__scaling__alpha": 0.0,
        "rope__dimension_sections": [0, 0, 0, 0],
        "rope__dimension_count": 32,
        "rope__dimension_count_swa": 32,
        "rope__freq_base_swa": 10000.0,
        "attention__sliding_window": 4096,
        "attention__value_length": 32,
    },
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_is_taken(name: str, tmp_path: Path) -> None:
    config = load_config(file_with(tmp_path / "m.gguf", **NEUTRAL[name]))
    assert config.layers[0].attention.rope.rope_type == "default"  # type: ignore[union-attr]


def test_every_key_of_rope_in_the_format_is_known() -> None:
    """What the package has is read, has a neutral value, or is looked at by itself."""
    keys = {
        value.removeprefix("{arch}.rope.")
        for name, value in vars(gguf.Keys.Rope).items()
        if not name.startswith("_")
    }
    own = {"freq_base_swa", "dimension_count_swa", "dimension_sections"}
    own |= {"scaling.yarn_ext_factor", "scaling.finetuned"}
    assert keys <= rope_module._READ | set(rope_module._NEUTRAL) | own


def changed_rope(checkpoint: Path, copy: Path, **rope: Any) -> Path:
    """The checkpoint with other parameters of RoPE."""
    copy.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            copy.joinpath(file.name).write_bytes(file.read_bytes())
    save_file(
        load_file(checkpoint / "model.safetensors"), copy / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] |= rope
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def yarn_with(value: float) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_rope_scaling_attn_factors(value)


@pytest.mark.parametrize("value", [1.0, 1.3])
def test_the_factor_of_attention_multiplies_that_of_yarn(tmp_path: Path, value: float) -> None:
    checkpoint = make_checkpoint(tmp_path / "of", "llama", rope="yarn")
    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama", also=yarn_with(value))
    factor = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]["factor"]
    product = value * (0.1 * math.log(factor) + 1)
    reference = changed_rope(checkpoint, tmp_path / "theirs", attention_factor=product)
    assert_only_rounded(
        dense_logits(load_model(path), PROMPT), logits_of(load_reference(reference))
    )


def test_the_bounds_of_yarn(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "of", "llama", rope="yarn")

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_yarn_beta_fast(8.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_rope_scaling_yarn_ext_factor(1.0)

    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama", also=also)
    reference = changed_rope(checkpoint, tmp_path / "theirs", beta_fast=8.0, beta_slow=2.0)
    assert_only_rounded(
        dense_logits(load_model(path), PROMPT), logits_of(load_reference(reference))
    )


def test_the_factor_of_attention_beside_factors_of_frequencies(tmp_path: Path) -> None:
    """Of Phi's files it is all; without it llama.cpp has 1."""
    checkpoint = make_checkpoint(tmp_path / "of", "phi3", rope="longrope")
    want = load_config(write_gguf(tmp_path / "m.gguf", checkpoint, "phi3"))
    rope = want.layers[0].attention.rope  # type: ignore[union-attr]
    stretch, original = 256 / 128, 128
    expected = math.sqrt(1 + math.log(stretch) / math.log(original))
    assert rope.attention_factor == pytest.approx(expected)
    plain = make_checkpoint(tmp_path / "plain", "llama", rope="llama3")
    path = write_gguf(tmp_path / "n.gguf", plain, "llama", also=yarn_with(1.5))
    assert load_config(path).layers[0].attention.rope.attention_factor == 1.5  # type: ignore[union-attr]


def test_factors_of_frequencies_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "of", "llama", rope="llama3")

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_factor(2.0)

    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama", also=also)
    with pytest.raises(ModelLoadError, match=r"factor must be 1 with factors of rope_freqs"):
        load_config(path)


def test_the_pattern_of_windows(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "of", "gemma3", query_pre_attn_scalar=16, tie=True)

    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)

    path = write_gguf(tmp_path / "m.gguf", checkpoint, "gemma3", also=also)
    windows = [layer.attention.window for layer in load_config(path).layers]  # type: ignore[union-attr]
    assert [window is None for window in windows] == [i % 2 == 1 for i in range(len(windows))]


# The sizes that llama.cpp knows: heads, width of a head, width of the model, layers, and by what
# queries are scaled (`hparams.f_attention_scale` in its models, and Google's configurations).
GEMMAS = {
    "gemma2 2b": ("gemma2", 8, 256, 2304, 26, 256),
    "gemma2 9b": ("gemma2", 16, 256, 3584, 42, 256),
    "gemma2 27b": ("gemma2", 32, 128, 4608, 46, 144),
    "gemma3 4b": ("gemma3", 8, 256, 2560, 34, 256),
    "gemma3 12b": ("gemma3", 16, 256, 3840, 48, 256),
    "gemma3 27b": ("gemma3", 32, 128, 5376, 62, 168),
}


def bare(path: Path, family: str, config: dict[str, Any], **metadata: Any) -> Path:
    """A file of a large model of which only a few tensors are there, and no tokens."""
    writer = gguf.GGUFWriter(path, family)
    write_metadata(writer, config)
    for name, value in metadata.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, config["hidden_size"]), np.float32))
    for layer in {0, config["num_hidden_layers"] - 1}:
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sizes(layers: int, heads: int, of_head: int, hidden: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": 8192,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": of_head,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


@pytest.mark.parametrize("size", GEMMAS)
def test_what_scales_the_queries_of_every_gemma(tmp_path: Path, size: str) -> None:
    """The widest of both are scaled by the model's width over its heads, not by a head's."""
    family, heads, of_head, hidden, layers, scalar = GEMMAS[size]
    path = bare(tmp_path / "m.gguf", family, sizes(layers, heads, of_head, hidden))
    assert read_configuration(path)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("names", [("eos",), ("eot",), ("eom",), ("eos", "eot", "eom")])
def test_every_end_that_a_file_names_ends_an_answer(tmp_path: Path, names: tuple[str, ...]) -> None:
    ids = {f"{name}_token_id": 3 + place for place, name in enumerate(names)}
    path = bare(tmp_path / "m.gguf", "llama", sizes(1, 2, 4, 8), **ids)
    ends = parse_generation(read_configuration(path), None).eos_token_ids
    assert ends == tuple(ids.values())
