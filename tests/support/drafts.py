"""Small checkpoints of drafters, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from tests.support.checkpoints import make_checkpoint, save_tokenizer


def make_medusa(
    directory: Path,
    *,
    heads: int = 3,
    layers: int = 1,
    hidden: int = 64,
    vocab_size: int = 320,
    naming: str = "{head}.{layer}",
    seed: int = 0,
    **config: Any,
) -> dict[str, Tensor]:
    """Write random Medusa heads in a published layout; returns their tensors.

    Parameters
    ----------
    naming
        ``{head}.{layer}`` with any prefix is the authors', ``vllm`` is that of vLLM's files.
    config
        Fields of ``config.json`` that differ; None leaves one out.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    for head in range(heads):
        for layer in range(layers):
            if naming == "vllm":
                tensors[f"blocks.{head}.layers.{layer}.weight"] = random(hidden, hidden)
                continue
            name = naming.format(head=head, layer=layer)
            tensors[f"{name}.linear.weight"] = random(hidden, hidden)
            tensors[f"{name}.linear.bias"] = random(hidden)
        out = (
            f"lm_heads.{head}.weight"
            if naming == "vllm"
            else f"{naming.format(head=head, layer=layers)}.weight"
        )
        tensors[out] = random(vocab_size, hidden)
    if naming == "vllm":
        fields: dict[str, Any] = {
            "model_type": "medusa",
            "num_heads": heads,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "vocab_size": vocab_size,
        }
    else:
        fields = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    write_drafter(directory, tensors, {**fields, **config})
    return tensors


def make_eagle3(
    directory: Path,
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    vocab_size: int = 320,
    head_size: int | None = 96,
    taps: list[int] | None = None,
    uses_taps: bool = True,
    has_embedding: bool = True,
    has_head: bool = True,
    naming: str = "midlayer",
    seed: int = 0,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a random head of EAGLE-3 in a published layout; returns its tensors.

    Parameters
    ----------
    head_size
        Tokens that it knows: every third one of the first. None: all, without `d2t`.
    taps
        Layers that it reads; None: the file does not say.
    naming
        What names of its layer's tensors begin with.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    heads, kv_heads, dim, inner = 4, 2, 16, 96
    tensors = {
        f"{naming}.self_attn.q_proj.weight": random(heads * dim, 2 * hidden),
        f"{naming}.self_attn.k_proj.weight": random(kv_heads * dim, 2 * hidden),
        f"{naming}.self_attn.v_proj.weight": random(kv_heads * dim, 2 * hidden),
        f"{naming}.self_attn.o_proj.weight": random(hidden, heads * dim),
        f"{naming}.mlp.gate_proj.weight": random(inner, hidden),
        f"{naming}.mlp.up_proj.weight": random(inner, hidden),
        f"{naming}.mlp.down_proj.weight": random(hidden, inner),
        f"{naming}.input_layernorm.weight": norm(),
        f"{naming}.hidden_norm.weight": norm(),
        f"{naming}.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": random(head_size or vocab_size, hidden),
    }
    if not has_head:
        del tensors["lm_head.weight"]
    if uses_taps:
        tensors["fc.weight"] = random(hidden, 3 * target_hidden)
    if has_embedding:
        tensors["embed_tokens.weight"] = random(vocab_size, hidden)
    if head_size is not None:
        targets = torch.arange(head_size) * 3
        tensors["d2t"] = targets - torch.arange(head_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": inner,
        "vocab_size": vocab_size,
        "draft_vocab_size": head_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    if not uses_taps:
        fields["eagle_config"] = {"use_aux_hidden_state": False}
    elif taps is not None:
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": taps}
    write_drafter(directory, tensors, {**fields, **config}, file="model.safetensors")
    return tensors


MTP_FAMILIES = ("deepseekv3", "glm4_moe", "qwen3next")
_KINDS = ["linear_attention", "full_attention", "full_attention"]


class Predicting(NamedTuple):
    """A model with a layer for further tokens.

    Attributes
    ----------
    path
        The checkpoint, in the published layout.
    whole
        One of transformers' models whose last layer it is.
    tensors
        What stands around the layer: `embedding_norm`, `hidden_norm`, `join`, `final_norm`.
    """

    path: Path
    whole: Path
    tensors: dict[str, Tensor]


def make_mtp(
    directory: Path,
    family: str,
    *,
    layers: int = 2,
    copies: bool = False,
    **overrides: Any,
) -> Predicting:
    """Write a random model that brings a layer for further tokens.

    Parameters
    ----------
    family
        One of `MTP_FAMILIES`.
    layers
        Of the model itself.
    copies
        Whether the layer guesses as the model does: only the last of the model's layers changes
        hidden states, and this one computes the same of the same embeddings, but for the text's
        first token.
    """
    if family == "qwen3next":
        # The last of the model's layers has attention and experts, and so has the one behind.
        kinds = [*_KINDS[:1] * (layers - 1), *_KINDS[1:]]
        overrides = {"layer_types": kinds, "mlp_only_layers": []} | overrides
    elif copies:
        overrides = {"first_k_dense_replace": 0} | overrides
    whole = make_checkpoint(directory / "whole", family, num_hidden_layers=layers + 1, **overrides)
    tensors = load_file(whole / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(7)
    is_offset = family == "qwen3next"

    def norm() -> Tensor:
        return 1 - is_offset + 0.2 * torch.randn(hidden, generator=generator)

    own = {
        "embedding_norm": norm(),
        "hidden_norm": norm(),
        "join": 0.2 * torch.randn(hidden, 2 * hidden, generator=generator),
        "final_norm": norm(),
    }
    last = f"model.layers.{layers}."
    if copies:
        _make_last_alike(tensors, layers)
        own["embedding_norm"] = torch.full((hidden,), 1.0 - is_offset)
        own["join"] = torch.eye(hidden, 2 * hidden)
        own["final_norm"] = tensors["model.norm.weight"].clone()
        save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    stored = {}
    for name, tensor in tensors.items():
        if is_offset and name.startswith(last):
            name = "mtp.layers.0." + name.removeprefix(last)
        stored[name] = tensor.clone()
    names = (
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if is_offset
        else (f"{last}enorm", f"{last}hnorm", f"{last}eh_proj", f"{last}shared_head.norm")
    )
    stored |= {f"{name}.weight": tensor for name, tensor in zip(names, own.values(), strict=True)}
    if not is_offset:
        stored[f"{last}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        stored[f"{last}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    fields = json.loads((whole / "config.json").read_text())
    fields["num_hidden_layers"] = layers
    if is_offset:
        fields["layer_types"] = fields["layer_types"][:layers]
    else:
        fields["num_nextn_predict_layers"] = 1
    path = write_drafter(directory / "model", stored, fields, file="model.safetensors")
    save_tokenizer(path, fields["vocab_size"])
    return Predicting(path, whole, own)


def _make_last_alike(tensors: dict[str, Tensor], layers: int) -> None:
    """Of as many layers, and one behind, only the last two change hidden states, and are alike.

    Embeddings are scaled to a root mean square of 1, but for that of padding, which is 0.
    """
    embedding = tensors["model.embed_tokens.weight"].float()
    scale = embedding.pow(2).mean(-1, keepdim=True).clamp_min(1e-6).rsqrt()
    tensors["model.embed_tokens.weight"] = (embedding * scale).to(embedding.dtype)
    last, before = (f"model.layers.{number}." for number in (layers, layers - 1))
    out = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    for name, tensor in tensors.items():
        if name.startswith(last):
            tensors[name] = tensors[before + name.removeprefix(last)].clone()
        elif not name.startswith(before) and name.endswith(out):
            tensors[name] = torch.zeros_like(tensor)


def write_drafter(
    directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], *, file: str | None = None
) -> Path:
    """Write tensors and a ``config.json`` without its fields that are None."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    save_file(tensors, directory / (file or "medusa_lm_head.safetensors"))
    return directory


def device_request(key: int, prompt_len: int, params: SamplingParams) -> DeviceRequest:
    """A request as the device half has it, with its parameters' seed."""
    return DeviceRequest(key=key, prompt_len=prompt_len, params=params, seed=params.seed or 0)
