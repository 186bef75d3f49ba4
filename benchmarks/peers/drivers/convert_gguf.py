"""Converts a Llama checkpoint to GGUF: `convert_gguf.py CHECKPOINT FILE BF16|Q8_0|Q4_0`.

Supports only the benchmark's own checkpoints: no tokenizer (prompts are token ids), no scaled RoPE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(path: Path) -> Iterator[tuple[str, numpy.ndarray]]:
    """Names and float32 values of a safetensors file with bfloat16 tensors."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    header_len = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + header_len]))
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] != "BF16":
            raise ValueError(f"{name} is {about['dtype']}, expected BF16")
        start, end = (8 + header_len + offset for offset in about["data_offsets"])
        # bfloat16 is the upper half of a float32.
        bits = data[start:end].view("<u2").astype("<u4") << 16
        yield name, bits.view("<f4").reshape(about["shape"])


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return NAMES[stem] + ".weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def interleaved(values: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Rows of each head so that the two halves that RoPE rotates together are neighbours."""
    outputs, inputs = values.shape
    halves = values.reshape(num_heads, 2, outputs // num_heads // 2, inputs)
    return halves.swapaxes(1, 2).reshape(outputs, inputs)


def main(checkpoint: Path, target: Path, kind: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    quantized = gguf.GGMLQuantizationType[kind]
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for name, values in tensors(checkpoint / "model.safetensors"):
        part = name.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            packed = gguf.quants.quantize(values, quantized)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
