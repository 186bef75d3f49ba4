"""GGUF files of small checkpoints, written by the format's own package.

Names of tensors come from that package's tables, keys of metadata from its writer, and blocks from
its quantization; so a file is what llama.cpp's converters write. What they do to weights is here:
rows of queries and keys are permuted, and norms of Gemma are shifted.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

# A machine with a GPU may lack it. Modules of tests take it from here, so that pytest leaves them
# out there, and collects the others.
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
Type = gguf.GGMLQuantizationType

# Key in `tests.support.checkpoints` -> the architecture in GGUF files.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
PERMUTED = ("llama", "mixtral", "granite", "smollm3")
# Types that the package reads but does not write.
_RANDOM = {Type.Q4_K: (8, 8), Type.Q5_K: (8, 8), Type.Q6_K: None}

TypeOf = Callable[[str], Type]
"""From a tensor's name in the file to its type."""


def write_gguf(
    path: Path,
    checkpoint: Path,
    architecture: str,
    type_of: TypeOf = lambda name: Type.F32,
    also: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a checkpoint of `make_checkpoint` as a GGUF file; returns ``path``.

    Matrices have the types that ``type_of`` says, vectors are F32. Blocks of types that the package
    does not write are random. ``also`` adds further metadata.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[architecture])
    write_metadata(writer, config)
    also(writer)
    if (checkpoint / "tokenizer.json").exists():
        write_tokenizer(writer, checkpoint)
    rng = np.random.default_rng(0)
    for name, values in tensors_of(checkpoint, architecture, config):
        kind = type_of(name) if values.ndim > 1 and "ffn_gate_inp" not in name else Type.F32
        writer.add_tensor(name, encode(values, kind, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(values: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Rows of values as blocks of a type."""
    if kind not in _RANDOM:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
    # Factors of a size at which the values are like those of a model.
    factors = rng.uniform(0.5, 1.5, (*blocks.shape[:-1], 2)) * values.std() / [20 * 32, 1.3 * 32]
    if kind == Type.Q6_K:
        blocks[..., 208:] = (factors[..., :1] / 8).astype(np.float16).view(np.uint8)
    else:
        blocks[..., :4] = factors.astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The configuration, as converters write it."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or hidden // heads)
    writer.add_value_length(config.get("head_dim") or hidden // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        writer.add_float32(
            f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"]
        )
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        writer.add_rope_scaling_attn_factors(attention)
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if writer.arch in ("gemma2", "gemma3", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    if writer.arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    """A byte-level BPE tokenizer, its special tokens and its chat template."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids = tokenizer["model"]["vocab"]
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def tensors_of(
    checkpoint: Path, architecture: str, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, values), as a converter changes them."""
    arch = gguf.MODEL_ARCH[ARCHITECTURES[architecture].upper()]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in stored.items():
        stem, _, ending = name.rpartition(".")
        values = tensor.float().numpy()
        if ".experts." in stem:
            before, behind = stem.split(".experts.")
            number, _, part = behind.partition(".")
            stacks.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
            continue
        if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            values = permuted(values, config, stem)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        if stem.endswith("shared_expert_gate"):
            values = values[0]
        yield f"{named(names, stem)}.{ending}", values
    for stem, stack in stacks.items():
        yield f"{named(names, stem)}.weight", np.stack([stack[i] for i in range(len(stack))])
    yield from _rope_tensors(config)


def _rope_tensors(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    rope, head_dim = config["rope_parameters"], config.get("head_dim", 0)
    if rope.get("rope_type") == "llama3":
        # As converters work it out (Grattafiori et al. 2024, and the published code).
        original, low, high = (
            rope[f"{name}"]
            for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        factors = []
        for i in range(0, head_dim, 2):
            wave = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
            if wave < original / high:
                factors.append(1.0)
            elif wave > original / low:
                factors.append(rope["factor"])
            else:
                smooth = (original / wave - low) / (high - low)
                factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        yield "rope_freqs.weight", np.array(factors, np.float32)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)


def named(names: gguf.TensorNameMap, stem: str) -> str:
    """The name in the file of a checkpoint's tensor, without its last part."""
    found = names.get_name(stem)
    assert found is not None, stem
    return found


def permuted(
    values: np.ndarray, config: dict[str, Any], stem: str, *, back: bool = False
) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates neighbours, or back from it."""
    own = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
    parts = (-1, 2) if back else (2, -1)
    pairs = values.reshape(config[own], *parts, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def restore(path: Path, checkpoint: Path, architecture: str, directory: Path) -> Path:
    """Write the values of a file as a checkpoint like the one it was made of; the directory.

    The format's own package decodes them.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = gguf.MODEL_ARCH[ARCHITECTURES[architecture].upper()]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    decoded = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type)
        for each in gguf.GGUFReader(path).tensors
    }
    shutil.copytree(checkpoint, directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            stem, _, ending = name.rpartition(".")
            number = None
            if ".experts." in stem:
                before, behind = stem.split(".experts.")
                number, _, part = behind.partition(".")
                stem = f"{before}.experts.{part}"
            values = decoded[f"{named(names, stem)}.{ending}"]
            if number is not None:
                values = values[int(number)]
            if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
                values = permuted(values, config, stem, back=True)
            if architecture.startswith("gemma") and stem.endswith("norm"):
                values = values - 1
            tensors[name] = torch.from_numpy(values.copy()).reshape(tensors[name].shape)
        save_file(tensors, file, {"format": "pt"})
    return directory
