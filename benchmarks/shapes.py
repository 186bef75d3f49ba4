"""Checkpoints without weights in the shapes of known models; weights are generated from a seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from src.core.settings import CHECKOUT

_DEMO = CHECKOUT / "configs" / "demo"

_WITH_EXPERTS: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
}
_EXPERTS: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}

SHAPES: Final[dict[str, dict[str, Any]]] = {
    # Small enough to test a benchmark on any machine.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # 7 M parameters: dominated by overhead
    "7m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    # As large as two cores can handle
    "0.35b": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
    # 0.56 B parameters, most of them in experts, of which 0.15 B compute a token
    "moe": {**_WITH_EXPERTS, **_EXPERTS},
    # The same without experts: a dense layer of as many parameters as a token's experts have
    "moe-dense": _WITH_EXPERTS,
    # And one of as many bytes in all
    "moe-bytes": {**_WITH_EXPERTS, "intermediate_size": 24 * 512},
    # Llama 3.2 1B
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    # Llama 3.1 8B
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}


def write_checkpoint(
    directory: Path,
    shape: str,
    dtype: str = "bfloat16",
    *,
    layers: int | None = None,
    all_have_text: bool = False,
) -> Path:
    """Write `config.json` of a shape, with the demo model's tokenizer, which has fewer ids.

    ``layers`` replaces the shape's number of layers. With ``all_have_text``, ids that the tokenizer
    lacks get a word each, because a server sends no chunk for a token without text.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SHAPES[shape],
        **({} if layers is None else {"num_hidden_layers": layers}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO / name, directory / name)
    if all_have_text:
        _fill_vocabulary(directory / "tokenizer.json", config["vocab_size"])
    return directory


def _fill_vocabulary(file: Path, vocab_size: int) -> None:
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    # Added tokens that are not in the vocabulary would get new ids after it.
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    known = set(vocabulary.values())
    # In the tokenizer's byte alphabet, where U+0120 stands for a space.
    vocabulary |= {f"\u0120w{i}": i for i in range(vocab_size) if i not in known}
    file.write_text(json.dumps(tokenizer))
