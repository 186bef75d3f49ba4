"""Converts an encoder to GGUF in float32: `convert_bert.py CHECKPOINT TO`.

For BERT with WordPiece only, which the benchmark's own checkpoint is. It writes `embedder.gguf`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy

_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_CONTINUES = "##"


def tensors(path: Path) -> Iterator[tuple[str, numpy.ndarray]]:
    """Names and values of a safetensors file; those of float32."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    header_len = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + header_len]))
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] == "F32":
            start, end = (8 + header_len + offset for offset in about["data_offsets"])
            yield name, numpy.array(data[start:end]).view("<f4").reshape(about["shape"])


def gguf_name(name: str) -> str | None:
    """The name in GGUF; ``None`` for what llama.cpp does not read."""
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    if not stem.startswith("encoder.layer."):
        return None
    layer, part = stem.removeprefix("encoder.layer.").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def spelt(word: str) -> str:
    """A word of WordPiece as llama.cpp spells it: a mark begins words, and none continues them."""
    if word.startswith(_CONTINUES):
        return word.removeprefix(_CONTINUES)
    return word if word.startswith("[") and word.endswith("]") else f"\u2581{word}"


def main(checkpoint: Path, target: Path) -> None:
    source = checkpoint / "embedder"
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    writer = gguf.GGUFWriter(str(target / "embedder.gguf"), "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    words = (source / "vocab.txt").read_text().splitlines()
    writer.add_tokenizer_model("bert")
    writer.add_token_list([spelt(word) for word in words])
    special = {"[CLS]": "bos", "[SEP]": "sep", "[PAD]": "pad", "[UNK]": "unk", "[MASK]": "mask"}
    for word, name in special.items():
        getattr(writer, f"add_{name}_token_id")(words.index(word))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    )
    for name, values in tensors(source / "model.safetensors"):
        own = gguf_name(name)
        if own is not None:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
