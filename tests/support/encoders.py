"""Small random encoders in Hugging Face layout, made and saved by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

ENCODER_CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
}
"""Model type -> what transformers' names of its classes begin with."""
_SETTINGS = MappingProxyType(
    {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 130,
        "initializer_range": 0.15,
        "pad_token_id": 1,
    }
)


def make_encoder(
    directory: Path,
    name: str = "bert",
    *,
    has_head: bool = False,
    seed: int = 0,
    config_fields: Mapping[str, Any] = MappingProxyType({}),
    **overrides: Any,
) -> Path:
    """Save a random encoder, with a head for masked tokens or without; returns `directory`.

    `overrides` are fields of transformers' configuration. `config_fields` change `config.json`
    alone, behind transformers' back.
    """
    import transformers

    stem = ENCODER_CLASSES[name]
    settings = {**_SETTINGS, **overrides}
    if name == "distilbert":
        renamed = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
        renamed |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        settings = {renamed.get(field, field): value for field, value in settings.items()}
    config = getattr(transformers, f"{stem}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForMaskedLM" if has_head else f"{stem}Model")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers initializes norms and biases to constants, which would hide errors.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1:
                parameter.normal_(1, 0.1)
    model.config.dtype = torch.float32
    model.save_pretrained(directory)
    if config_fields:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config_fields}))
    return directory


def load_encoder_reference(directory: Path) -> Any:
    """The checkpoint's body in transformers: eager attention, evaluation mode."""
    import transformers

    model = transformers.AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
