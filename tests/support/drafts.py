"""Small checkpoints of drafters, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest


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
