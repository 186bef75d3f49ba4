"""Small random encoders in Hugging Face layout, made and saved by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

ENCODER_CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
}
"""Model type -> what transformers' names of its classes begin with."""
BOTH_WAYS = {"gemma3_text": "Gemma3Text", "qwen2": "Qwen2", "mistral": "Mistral"}
"""The same of decoders whose tokens see later ones."""
_GENERATING = MappingProxyType(
    {
        "gemma3_text": "Gemma3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "mistral": "MistralForCausalLM",
    }
)
"""Those decoders with a head that nothing reads."""
_OWN_SETTINGS = MappingProxyType(
    {
        "modernbert": {"local_attention": 12, "num_hidden_layers": 4},
        "gemma3_text": {
            "use_bidirectional_attention": True,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "sliding_window": 14,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
        },
        "qwen2": {
            "is_causal": False,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "mistral": {
            "is_causal": False,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": None,
        },
    }
)
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
    class_ending: str | None = None,
    seed: int = 0,
    config_fields: Mapping[str, Any] = MappingProxyType({}),
    **overrides: Any,
) -> Path:
    """Save a random encoder, with a head for tokens or without; returns `directory`.

    `class_ending` is of a class of transformers with another head. `overrides` are fields of
    transformers' configuration. `config_fields` change `config.json` alone, behind transformers'
    back.
    """
    import transformers

    stem = {**ENCODER_CLASSES, **BOTH_WAYS}[name]
    settings = {**_SETTINGS, **_OWN_SETTINGS.get(name, {}), **overrides}
    if name == "distilbert":
        renamed = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
        renamed |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        settings = {renamed.get(field, field): value for field, value in settings.items()}
    config = getattr(transformers, f"{stem}Config")(**settings)
    torch.manual_seed(seed)
    ending = class_ending or ("ForMaskedLM" if has_head else "Model")
    generating = _GENERATING.get(name) if has_head and class_ending is None else None
    model = getattr(transformers, generating or f"{stem}{ending}")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers initializes norms and biases to constants, which would hide errors.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
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


def save_encoder_tokenizer(directory: Path, vocab_size: int = 320) -> None:
    """A byte-level tokenizer that puts [CLS] (id 1) before a text and [SEP] (id 2) behind it.

    Of a pair, the second text and the [SEP] behind it are of kind 1.
    """
    from tokenizers import Tokenizer, processors

    from tests.support.checkpoints import save_tokenizer

    save_tokenizer(directory, vocab_size)
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    tokenizer.save(str(file))


def save_modules(
    directory: Path,
    *,
    pooling: Mapping[str, Any],
    normalizes: bool = True,
    new_spelling: bool = False,
    max_seq_length: int | None = None,
    prompts: Mapping[str, str] = MappingProxyType({}),
    default_prompt: str | None = None,
    behind: Sequence[str] | None = None,
    modules: list[dict[str, Any]] | None = None,
) -> None:
    """The files of sentence-transformers beside a checkpoint.

    `behind` are the kinds of modules behind the pooling, in place of what `normalizes` says;
    `modules` is the whole list.
    """
    old = "sentence_transformers.models."
    bases = {
        "Transformer": "sentence_transformers.base.modules.transformer.",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
        "Normalize": "sentence_transformers.sentence_transformer.modules.normalize.",
        "Dense": "sentence_transformers.base.modules.dense.",
        "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.",
        "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.",
    }
    if behind is None:
        behind = ["Normalize"] if normalizes else []
    kinds = ["Transformer", "Pooling", *behind]
    listed = modules or [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": (bases[kind] if new_spelling else old) + kind,
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(dict(pooling)))
    settings = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (directory / "sentence_bert_config.json").write_text(json.dumps(settings))
    own = {"prompts": dict(prompts), "default_prompt_name": default_prompt}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(own))


def save_dense(
    directory: Path,
    inputs: int,
    outputs: int,
    *,
    activation: str = "torch.nn.modules.linear.Identity",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, torch.Tensor]:
    """A module `Dense` with random weights, as sentence-transformers saves it; returns these."""
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(inputs * outputs)
    weights = {"linear.weight": torch.randn(outputs, inputs, generator=source) * inputs**-0.5}
    if bias:
        weights["linear.bias"] = torch.randn(outputs, generator=source) * 0.1
    if settings.get("use_residual") and inputs != outputs:
        weights["residual.weight"] = torch.randn(outputs, inputs, generator=source) * inputs**-0.5
    directory.mkdir(exist_ok=True)
    own = {"in_features": inputs, "out_features": outputs, "bias": bias}
    given = {**own, "activation_function": activation, **settings}
    (directory / "config.json").write_text(json.dumps(given))
    stored = {name: each.to(dtype) for name, each in weights.items()}
    save_file(stored, directory / "model.safetensors")
    return weights
