"""Adapters as PEFT writes them, and the models that result when they are merged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import load_reference

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: Any,
    *,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.2,
    within: str = "",
    **fields: Any,
) -> Path:
    """Save an adapter of a transformers model: modules whose names end so, and contain `within`.

    `fields` are of `adapter_config.json`; ranks and scales follow its patterns of whole endings.
    """
    random = torch.Generator().manual_seed(seed)
    ranks = fields.get("rank_pattern", {})
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        ending = name.rpartition(".")[2]
        if ending not in targets or within not in name or not hasattr(module, "weight"):
            continue
        own = next((value for key, value in ranks.items() if name.endswith(key)), rank)
        rows, inputs = module.weight.shape
        down = torch.randn(own, inputs, generator=random) * inputs**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        up = torch.randn(rows, own, generator=random) * size / math.sqrt(own)
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    assert tensors
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(checkpoint: Path, adapter: Path) -> Any:
    """The checkpoint in transformers with the adapter's updates added to its weights."""
    return merged_into(load_reference(checkpoint), adapter)


def merged_into(model: Any, adapter: Path) -> Any:
    """A model of transformers with the adapter's updates added to its weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        up = tensors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = config.get("alpha_pattern", {})
        alpha = next(
            (value for key, value in alphas.items() if module.endswith(key)), config["lora_alpha"]
        )
        divisor = math.sqrt(len(down)) if config["use_rslora"] else len(down)
        with torch.no_grad():
            modules[module].weight += alpha / divisor * up @ down
    return model
