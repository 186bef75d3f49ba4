"""A common checkpoint: random weights in the shape of a known model, in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, write_checkpoint

_SEED = 0


def make(directory: Path, shape: str, *, all_have_text: bool = False) -> Path:
    """Write the checkpoint unless it exists; returns its directory.

    ``all_have_text`` is that of `write_checkpoint`.

    Weights are bfloat16. Matrices are normal with variance 1 / inputs, so that activations and
    logits have a normal scale and rounding does not decide the most likely token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = directory / "model.safetensors"
    if weights.is_file():
        return directory
    write_checkpoint(directory, shape, all_have_text=all_have_text)
    config = AutoConfig.for_model(**json.loads((directory / "config.json").read_text()))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:  # 3: a matrix of each expert
            scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.data.normal_(0.0, scale)
    unfinished = directory / "unfinished"
    model.save_pretrained(unfinished, max_shard_size="1TB")
    # Renamed last, so that an existing checkpoint is complete.
    (unfinished / weights.name).rename(weights)
    return directory


def vocabulary(shape: str) -> int:
    """Number of token ids."""
    return int(SHAPES[shape]["vocab_size"])
